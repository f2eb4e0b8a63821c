"""Parse and validate the options of ``everstep-launch``."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from everstep import __version__
from everstep.errors import ConfigurationError
from everstep.ids import check_name, storage_url_error
from everstep.wire.v1.training import JobSpec, SpillPlan

# ---- number of ranks for ``gpu`` or ``auto``
#
# Counting may initialize CUDA, so it happens in a child of the fork server that does nothing else.


def write_rank_count(descriptors: tuple[int, ...], *, kind: str) -> None:
    """Write the number of ranks for ``gpu``, ``cpu`` or ``auto`` to the descriptor, as decimal text (gpu may be 0)."""
    (answer,) = descriptors
    os.write(answer, str(count_ranks(kind)).encode())


def count_ranks(kind: str) -> int:
    """Return the CUDA devices for ``gpu``, the cores for ``cpu``, devices or else cores for ``auto`` (as torchrun
    counts)."""
    import torch

    devices = torch.cuda.device_count() if kind in ("gpu", "auto") else 0
    if kind == "gpu" or devices:
        return devices
    return os.cpu_count() or 1


# ---- command-line flags: torchrun's and Everstep's own
#
# Every flag of torchrun is accepted, so that command lines can be reused. Those without effect are listed in
# ``IGNORED_FLAGS`` and explained once. As with torchrun, PET_<FLAG> in the environment replaces a missing flag.

AGENT_SOCKET_VARIABLE = "EVERSTEP_AGENT_SOCKET"
DEFAULT_AGENT_SOCKET = "/run/everstep/agent.sock"

IGNORED_FLAGS = {
    "rdzv_backend": "Everstep's controller is the rendezvous; no backend is chosen",
    "rdzv_endpoint": "launchers meet through their agents and the controller, at no endpoint of their own",
    "rdzv_conf": "the rendezvous has no settings of its own; see --join-wait-s",
    "monitor_interval": "a death is seen at once; nothing is polled",
    "start_method": "workers are always forked from a process that has torch imported",
    "role": "there is one role",
    "master_addr": "each generation names its own store",
    "master_port": "each generation names its own store",
    "event_log_handler": "events are in the controller: everstep events",
    "logs_specs": "see --log-dir and --tee",
    "numa_binding": "workers are not bound; bind the launcher with numactl",
    "local_ranks_filter": "see --log-dir, which keeps each worker's output apart",
    "duplicate_stdout_filters": "see --log-dir, which keeps each worker's output apart",
    "duplicate_stderr_filters": "see --log-dir, which keeps each worker's output apart",
    "signals_to_handle": "SIGINT, SIGTERM and SIGHUP end the job on this node in order",
    "run_path": "scripts are always run in a process that is there already",
    "virtual_local_rank": "every worker sees all devices; take the one that LOCAL_RANK names",
}
"""torchrun's flags that are accepted without effect, with the reason that is printed."""
_SWITCHES = frozenset({"run_path", "virtual_local_rank"})
"""Those of the ignored flags that take no value."""


def make_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return the parser of everstep-launch; defaults come from PET_ variables in ``environ``."""
    parser = argparse.ArgumentParser(
        prog="everstep-launch",
        description="Runs a training script on this node's ranks and replaces them one by one as they fail.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)

    def flag(name: str, *more: str, **how: Any) -> None:
        """Add a flag in torchrun's both spellings, with a default from PET_<NAME>."""
        names = [f"--{name}", *([f"--{name.replace('-', '_')}"] if "-" in name else []), *more]
        variable = f"PET_{name.replace('-', '_').upper()}"
        if variable in environ and "action" not in how:
            how["default"] = environ[variable]
        parser.add_argument(*names, **how)

    _torchrun_flags(flag, parser)
    _own_flags(flag)
    return parser


def _torchrun_flags(flag: _Flag, parser: argparse.ArgumentParser) -> None:
    flag("nnodes", default="1", help="nodes of the job, N or MIN:MAX; more launchers are spares")
    flag("nproc-per-node", default="1", help="ranks on this node: a number, gpu, cpu or auto")
    flag("rdzv-id", "--job", dest="job", default=None, help="the run's name, the same on all its nodes")
    flag("standalone", action="store_true", help="one node with a controller and an agent of its own")
    flag("max-restarts", type=int, default=3, help="deaths of a local rank within 60 s that are replaced (3)")
    flag("node-rank", type=int, default=None, help="taken, but ranks are given by the controller")
    flag("local-addr", default=None, help="this node's address, as the other nodes' ranks reach it")
    flag("log-dir", default=None, help="directory for the workers' output")
    flag("redirects", "-r", default=None, help="with --log-dir: taken as torchrun's, all output goes to files")
    flag("tee", "-t", default=None, help="with --log-dir: also show the output, each line with its rank")
    flag("module", "-m", action="store_true", help="the script is a module's name")
    flag("no-python", action="store_true", help=argparse.SUPPRESS)
    for name in IGNORED_FLAGS:
        how: dict[str, Any] = {"action": "store_const", "const": True} if name in _SWITCHES else {}
        flag(name.replace("_", "-"), default=None, help=argparse.SUPPRESS, **how)
    parser.add_argument("training_script", help="path of the training script, or a module's name with -m")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="its own arguments")


def _own_flags(flag: _Flag) -> None:
    flag("agent-socket", default=None, help=f"the agent's socket (${AGENT_SOCKET_VARIABLE}, {DEFAULT_AGENT_SOCKET})")
    flag("standbys", type=int, default=1, help="warm processes waiting to replace one that died (1)")
    flag("standby-delay-s", type=float, default=1.0, help="seconds from a recovery to the next standby's fork (1)")
    flag("preload", default=None, help="modules to import once, before ranks are forked: transformers,datasets")
    flag("block-nodes", type=int, default=1, help="nodes of one tensor x pipeline block; rosters are whole blocks (1)")
    flag(
        "block-within",
        choices=("", "rack", "switch"),
        default="",
        help="the nodes of a block share their rack, or their switch",
    )
    flag("priority", type=int, default=0, help="of jobs that want the same node the higher one gets it (0)")
    flag("replicas", type=int, default=2, help="nodes (on a single one: ranks) that hold each byte (2)")
    flag(
        "parity-group-size",
        type=int,
        default=0,
        help="members of groups that keep clean versions with two parities; 0 for none",
    )
    flag("spill-to", default=None, help="path or URL, without credentials, where versions go as ordinary checkpoints")
    flag("spill-every", type=int, default=1000, help="with --spill-to: least steps from one to the next (1000)")
    flag("spill-keep", type=int, default=2, help="with --spill-to: how many stay there; 0 for all (2)")
    flag(
        "digest-interval",
        type=int,
        default=50,
        help="steps between parameter digests, besides those of what is to be committed; 0 for none at all (50)",
    )
    flag("hang-threshold-s", type=float, default=None, help="seconds without progress that are a hang")
    flag("user-retries", type=int, default=0, help="exceptions of the script that the job outlives (0)")
    flag("join-wait-s", type=float, default=30.0, help="seconds to wait for the maximum of nodes (30)")
    flag(
        "grace-s",
        "--shutdown-timeout",
        "--shutdown_timeout",
        type=float,
        default=5.0,
        help="seconds between SIGTERM and SIGKILL (5)",
    )
    flag("exit-wait-s", type=float, default=300.0, help="seconds for workers to end after the job finished (300)")
    flag("die-with-parent", action="store_true", help="end in order when the process that started this one ends")
    flag("start-from", default=None, help="checkpoint to start from where nothing is in memory: a path or URL")
    flag("state-dir", default=None, help="logs and private services' files ($XDG_STATE_HOME/everstep)")
    flag(
        "vault-linger-s",
        type=float,
        default=None,
        help="without an agent: seconds that checkpoints outlive a kill of this launcher (600 with --job)",
    )


class _Flag(Protocol):
    """The signature of ``flag`` above."""

    def __call__(self, name: str, *more: str, **how: Any) -> None: ...


DEFAULT_LINGER_S = 600.0
"""Long enough for a scheduler or a person to restart a killed launcher."""

_NOT_NEGATIVE = (
    "max_restarts",
    "standbys",
    "standby_delay_s",
    "digest_interval",
    "user_retries",
    "join_wait_s",
    "grace_s",
)


class LaunchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options on the command line.

    Attributes:
        script: Path of the script, or name of the module if ``is_module``.
        arguments: The script's own arguments.
        job: Name of the run; launchers with the same name (and controller) form one job.
        cache_name: Name of the folder on this node that keeps compiled code. The job's name, or the script's if the
            job's name was generated, so that the script's next run finds the folder.
        preload: Modules that are imported once, before ranks are forked.
        min_nodes: Fewest nodes of the roster.
        max_nodes: Most nodes of the roster; further launchers are spares.
        nproc_per_node: Ranks on this node, or ``gpu``, ``cpu``, ``auto`` to count.
        max_restarts: Deaths of one local rank within a minute that are replaced (3: a fourth is no coincidence).
        node_rank: Accepted for torchrun's command lines; the controller assigns ranks.
        agent_socket: Socket of the node's agent; None starts a private controller and agent.
        local_addr: This node's address for the ranks of other nodes; None: see ``rendezvous_host``.
        standbys: Warm processes waiting for a death (1: single failures are by far the most frequent).
        standby_delay_s: Seconds after a recovery began until the next standby is forked.
        block_nodes: Nodes that form one tensor x pipeline block.
        block_within: The domain that a block must not leave.
        priority: The job with the higher priority gets a contested node.
        replicas: Nodes that hold each byte of a checkpoint; on a single node, ranks (2: any one may be lost).
        parity_group_size: Members of groups that also keep clean versions by two parities (0: none); see
            docs/operations.md.
        spill_to: Path or URL to which versions are spilled; None: none are.
        spill_every: Fewest steps from one spilled version to the next.
        spill_keep: Number of spilled versions to keep (0: all).
        digest_interval: Steps between parameter digests, besides those of versions to be committed (0: none at all).
        hang_threshold_s: Seconds without progress that count as a hang; None: follows the job's own step time.
        user_retries: How often the job continues after an exception of the training function (0: it would recur).
        join_wait_s: Seconds that the first generation waits for ``max_nodes`` once ``min_nodes`` are there.
        grace_s: Seconds between SIGTERM and SIGKILL when workers are ended (torchrun: 30; a step must not take that
            long).
        exit_wait_s: Seconds that workers may run after the job finished (300, as torchrun's exit barrier).
        die_with_parent: Treat the death of the launcher's parent process as SIGTERM.
        start_from: Checkpoint on storage, as a path or URL, to start from if memory holds none: a torch.save file, a
            torch.distributed.checkpoint folder, weights as safetensors, or a folder of Everstep's own.
        state_dir: Folder of logs and the private services' files; None: $XDG_STATE_HOME/everstep.
        vault_linger_s: Without an agent: seconds that checkpoints stay in memory for the job's next launcher if this
            one is killed (600 if a name was given). None: they do not, since nobody returns to a generated name.
        log_dir: Folder of the workers' output.
        tee: Also print the workers' output with a prefix.
        ignored_flags: torchrun's flags that were given and have no effect.
    """

    script: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    job: str
    cache_name: str = ""
    preload: tuple[str, ...] = ()
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: int | str = 1
    max_restarts: int = 3
    node_rank: int | None = None
    agent_socket: str | None = None
    local_addr: str | None = None
    standbys: int = 1
    standby_delay_s: float = 1.0
    block_nodes: int = 1
    block_within: Literal["", "rack", "switch"] = ""
    priority: int = 0
    replicas: int = 2
    parity_group_size: int = 0
    spill_to: str | None = None
    spill_every: int = 1000
    spill_keep: int = 2
    digest_interval: int = 50
    hang_threshold_s: float | None = None
    user_retries: int = 0
    join_wait_s: float = 30.0
    grace_s: float = 5.0
    exit_wait_s: float = 300.0
    die_with_parent: bool = False
    start_from: str | None = None
    state_dir: str | None = None
    vault_linger_s: float | None = None
    log_dir: str | None = None
    tee: bool = False
    ignored_flags: tuple[str, ...] = ()

    def validate(self) -> LaunchOptions:
        """Return these options if they are valid.

        Raises:
            ConfigurationError: Options contradict each other; the message says how to fix them.
        """
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise ConfigurationError(
                f"--nnodes {self.min_nodes}:{self.max_nodes}: the minimum must be at least 1 and at most the maximum"
            )
        if self.max_nodes > 1 and self.agent_socket is None:
            raise ConfigurationError(
                "a job of several nodes needs an agent on each of them: start everstep-agent and give its "
                f"--agent-socket (or set {AGENT_SOCKET_VARIABLE})"
            )
        if isinstance(self.nproc_per_node, int) and not 1 <= self.nproc_per_node <= 64:
            raise ConfigurationError(f"--nproc-per-node {self.nproc_per_node}: a node runs 1 to 64 ranks")
        if self.vault_linger_s is not None and self.vault_linger_s <= 0:
            raise ConfigurationError(f"--vault-linger-s {self.vault_linger_s:g}: more than 0 seconds, or leave it out")
        for name in self.preload:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ConfigurationError(f"--preload {name}: expected names of modules, such as transformers,datasets")
        for name in _NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise ConfigurationError(f"--{name.replace('_', '-')} cannot be negative")
        if not 1 <= self.replicas <= 8:
            raise ConfigurationError(f"--replicas {self.replicas}: between 1 and 8 failure domains")
        self._validate_parity_and_spill()
        if not 1 <= self.block_nodes <= self.max_nodes:
            raise ConfigurationError(
                f"--block-nodes {self.block_nodes}: a block has at least one node, and no more than --nnodes allows"
            )
        if self.block_within not in ("", "rack", "switch"):
            raise ConfigurationError(f"--block-within {self.block_within}: rack or switch, or leave it out")
        if not -1000 <= self.priority <= 1000:
            raise ConfigurationError(f"--priority {self.priority}: between -1000 and 1000")
        if self.hang_threshold_s is not None and self.hang_threshold_s <= 0:
            raise ConfigurationError("--hang-threshold-s must be positive; leave it out to follow the job's step time")
        if self.tee and self.log_dir is None:
            raise ConfigurationError("--tee writes files and shows them: say where with --log-dir")
        if not self.is_module and not Path(self.script).is_file():
            raise ConfigurationError(f"there is no script {self.script!r} here (for a module, use -m)")
        return self

    def _validate_parity_and_spill(self) -> None:
        """Check parity and spill options; the controller checks that there are enough nodes for parity."""
        if self.parity_group_size and not 2 <= self.parity_group_size <= 64:
            raise ConfigurationError(
                f"--parity-group-size {self.parity_group_size}: a group has 2 to 64 members, and P and Q; "
                "0 for no parity"
            )
        if self.parity_group_size and self.max_nodes < 4:
            raise ConfigurationError(
                f"--parity-group-size {self.parity_group_size} on {self.max_nodes} nodes: a group takes 4 nodes at "
                "least, 2 members and one more for P and for Q each; use copies (--replicas), or more nodes"
            )
        if self.spill_every < 1 or not 0 <= self.spill_keep <= 1000:
            raise ConfigurationError("--spill-every is at least 1 step, and --spill-keep between 0 (all) and 1000")
        if self.spill_to is not None and (why := storage_url_error(self.spill_to)):
            raise ConfigurationError(f"--spill-to: {why}")

    def job_spec(self, nproc_per_node: int) -> JobSpec:
        """Return the job's specification for the controller, given the number of ranks."""
        return JobSpec(
            job=self.job,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            nproc_per_node=nproc_per_node,
            join_wait_s=self.join_wait_s,
            replicas=self.replicas,
            digest_interval=self.digest_interval,
            hang_threshold_s=self.hang_threshold_s,
            max_user_retries=self.user_retries,
            block_nodes=self.block_nodes,
            block_within=self.block_within,
            priority=self.priority,
            parity_group_size=self.parity_group_size,
            spill=None
            if self.spill_to is None
            else SpillPlan(every_steps=self.spill_every, url=self.spill_to, keep_last=self.spill_keep),
        )


def parse_options(argv: Sequence[str], environ: Mapping[str, str]) -> LaunchOptions:
    """Return the options from the command line (without the program's name) and the environment.

    Raises:
        ConfigurationError: Options contradict each other.
        SystemExit: An option is unknown or malformed, as in argparse.
    """
    parser = make_parser(environ)
    given = parser.parse_args(argv)
    if given.no_python:
        raise ConfigurationError(
            "--no-python cannot be: workers are forked from a process that has Python and torch in it already, which "
            "is what makes a replacement fast; name a Python script or a module (-m)"
        )
    low, high = _nnodes(given.nnodes)
    found = None if given.standalone else (given.agent_socket or _found_socket(environ))
    socket = os.path.abspath(found) if found is not None else None  # scripts may change their directory
    if given.standalone and (low, high) != (1, 1):
        raise ConfigurationError("--standalone is for one node; leave out --nnodes or --standalone")
    return LaunchOptions(
        script=given.training_script,
        arguments=tuple(given.training_script_args),
        is_module=given.module,
        job=_job_name(given.job, given.training_script, several=high > 1),
        cache_name=given.job or _stem(given.training_script),
        preload=tuple(filter(None, (given.preload or "").split(","))),
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=_nproc(given.nproc_per_node),
        max_restarts=given.max_restarts,
        node_rank=given.node_rank,
        agent_socket=socket,
        local_addr=given.local_addr,
        standbys=given.standbys,
        standby_delay_s=given.standby_delay_s,
        block_nodes=given.block_nodes,
        block_within=given.block_within,
        priority=given.priority,
        replicas=given.replicas,
        parity_group_size=given.parity_group_size,
        spill_to=_absolute(given.spill_to),
        spill_every=given.spill_every,
        spill_keep=given.spill_keep,
        digest_interval=given.digest_interval,
        hang_threshold_s=given.hang_threshold_s,
        user_retries=given.user_retries,
        join_wait_s=given.join_wait_s,
        grace_s=given.grace_s,
        exit_wait_s=given.exit_wait_s,
        die_with_parent=given.die_with_parent,
        start_from=given.start_from,
        state_dir=given.state_dir,
        vault_linger_s=_linger_s(given.vault_linger_s, named=given.job is not None),
        log_dir=given.log_dir,
        tee=given.tee not in (None, "0"),
        ignored_flags=tuple(name for name in IGNORED_FLAGS if getattr(given, name) is not None),
    ).validate()


def _nnodes(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if match is None:
        raise ConfigurationError(f"--nnodes {text}: expected a number, or MIN:MAX such as 1:4")
    low = int(match[1])
    return low, int(match[2]) if match[2] is not None else low


def _absolute(url: str | None) -> str | None:
    """Make a relative path absolute; leave a URL as it is."""
    return url if url is None or "://" in url else os.path.abspath(url)


def _nproc(text: str) -> int | str:
    if text in ("gpu", "cpu", "auto"):
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigurationError(f"--nproc-per-node {text}: expected a number, gpu, cpu or auto") from None


def _linger_s(given: float | None, *, named: bool) -> float | None:
    return DEFAULT_LINGER_S if given is None and named else given


def _job_name(given: str | None, script: str, *, several: bool) -> str:
    if given is not None:
        try:
            return check_name(given, "job")
        except ValueError as error:
            raise ConfigurationError(f"--job: {error}") from None
    if several:
        raise ConfigurationError("launchers of several nodes find one another by the job's name: give --job NAME")
    return f"{_stem(script)}-{secrets.token_hex(3)}"


def _stem(script: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).stem).lstrip("._-")[:40] or "job"


def _found_socket(environ: Mapping[str, str]) -> str | None:
    named = environ.get(AGENT_SOCKET_VARIABLE)
    if named:
        return named
    try:
        there = stat.S_ISSOCK(os.stat(DEFAULT_AGENT_SOCKET).st_mode)
    except OSError:
        return None
    return DEFAULT_AGENT_SOCKET if there else None
