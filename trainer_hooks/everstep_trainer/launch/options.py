"""Settings of the launcher, ``everstep-launch``: torchrun's flags and Everstep's own."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from everstep.errors import ConfigurationError
from everstep.ids import check_name, storage_url_error
from everstep.printable_text import valid_unicode
from everstep.settings import Program, SettingsPart, with_values
from everstep.wire.v1.local import DEFAULT_AGENT_SOCKET
from everstep.wire.v1.training import JobSpec, SdcPreset, SpillPlan

# ---- flags: torchrun's and Everstep's own
#
# Every flag of torchrun is accepted in both of its spellings, so that command lines can be reused. As with torchrun,
# the variable PET_<FLAG> replaces a missing flag.


IGNORED_FLAGS = {
    "rdzv_backend": "the controller is the rendezvous; there is no other backend",
    "rdzv_conf": "the rendezvous has no settings of its own; see --join-wait-s",
    "monitor_interval": "the exit of a worker is noticed at once, without polling",
    "start_method": "workers are always forked from a process that has imported torch",
    "role": "all workers have the same role",
    "master_addr": "each generation has a store of its own",
    "master_port": "each generation has a store of its own",
    "event_log_handler": "the controller records events; see `everstep events`",
    "logs_specs": "see --log-dir and --tee",
    "redirects": "with --log-dir, all output goes to files",
    "numa_binding": "workers are not bound; start the launcher with numactl",
    "duplicate_stdout_filters": "--log-dir keeps one file per worker",
    "duplicate_stderr_filters": "--log-dir keeps one file per worker",
    "signals_to_handle": "SIGINT, SIGTERM and SIGHUP always shut down the job on this node",
    "run_path": "scripts always run in a process that exists already",
    "virtual_local_rank": "every worker sees all devices; use the one that LOCAL_RANK names",
}
"""torchrun's flags that are accepted without effect, with the reason."""
NOT_MISSED = frozenset({"rdzv_backend", "rdzv_conf", "monitor_interval", "start_method", "role", "master_addr"}) | {
    *("master_port", "redirects", "run_path")
}
"""Ignored flags whose purpose is served without them: only the launcher's log names them."""
IGNORED_SWITCHES = frozenset({"run_path", "virtual_local_rank"})
"""Ignored flags that take no value."""
DEFAULT_SDC: SdcPreset = "light"
"""Preset of audits of jobs that ask for none."""
DEFAULT_LINGER_S = 600.0  # long enough for a scheduler or a person to restart a killed launcher


class RunStart(msgspec.Struct, frozen=True):
    """How a run treats other runs of its name on this machine."""

    takes_over: bool = True
    """It continues from the memory of a launcher that was killed."""
    is_alone: bool = False
    """It must not run beside another one, which would write to the same folder."""


def _negative_values(part: SettingsPart, *names: str) -> Iterator[str]:
    for name in names:
        if (getattr(part, name) or 0) < 0:
            yield f"--{name.replace('_', '-')} cannot be negative"


class RendezvousSettings(SettingsPart, frozen=True, kw_only=True):
    """Where launchers of several nodes meet if the nodes have no agents."""

    rdzv_endpoint: str | None = None
    """``HOST:PORT`` of the first node, where launchers of several nodes meet if the nodes have no agents. The first
    node's launcher runs the job's controller there. The same on all nodes."""
    node_rank: int | None = None
    """With ``rdzv_endpoint``: 0 for the first node, any other number for the others. Default: the first node is the one
    that has the endpoint's address. It does not order ranks."""
    job_secret_file: str | None = None
    """With ``rdzv_endpoint``: file with the secret that the job's launchers share, readable by its owner only. Make one
    with ``(umask 077; openssl rand -hex 32 > FILE)``. Not needed on loopback."""
    node: str = ""
    """With ``rdzv_endpoint``: name of this node, unique in the job. Default: the host name up to the first dot."""
    first_node_timeout_s: float = 60.0
    """With ``rdzv_endpoint``: seconds without an answer from the first node after which this launcher ends the job on
    its node."""
    local_addr: str | None = None
    """Address of this node for the ranks of other nodes. Default: loopback for one node; with ``rdzv_endpoint`` the one
    from which this node reaches the first one; else the address of this host's name, or of the default route if that is
    loopback."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid value, which says how to fix it."""
        if self.first_node_timeout_s <= 0:
            yield "--first-node-timeout-s must be more than 0"
        yield from _negative_values(self, "node_rank")


class LogFileSettings(SettingsPart, frozen=True, kw_only=True):
    """Files with the output of the workers."""

    log_dir: str | None = None
    """Directory for the output of the workers."""
    tee: str = "0"
    """Print each line with its rank, also with ``log_dir``. As in torchrun, any value but 0."""
    local_ranks_filter: str = ""
    """Local ranks, separated by commas, whose output is printed; files and ``everstep logs`` have the others' too.
    Default: all."""

    @property
    def printed_local_ranks(self) -> frozenset[int] | None:
        """Local ranks whose output is printed; None: all."""
        return frozenset(map(int, self.local_ranks_filter.split(","))) if self.local_ranks_filter else None

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid value, which says how to fix it."""
        if self.local_ranks_filter and not re.fullmatch(r" *\d+ *(, *\d+ *)*", self.local_ranks_filter):
            yield f"--local-ranks-filter {self.local_ranks_filter}: expected local ranks, such as 0,1"


class ProcessSettings(SettingsPart, frozen=True, kw_only=True):
    """Processes kept ready, and what they have imported."""

    standbys: int = 1
    """Processes kept ready to replace a failed rank. One suffices for single failures, the most frequent case."""
    standby_delay_s: float = 1.0
    """Seconds from the start of a recovery until the next standby process is forked."""
    preload: tuple[str, ...] = ()
    """Modules, separated by commas, that are imported once before ranks are forked."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid value, which says how to fix it."""
        for name in self.preload:
            if not all(part.isidentifier() for part in name.split(".")):
                yield f"--preload {name}: expected names of modules, such as transformers,datasets"
        yield from _negative_values(self, "standbys", "standby_delay_s")


class PlacementSettings(SettingsPart, frozen=True, kw_only=True):
    """Which nodes the controller gives to the job."""

    block_nodes: int = 1
    """Number of nodes of one tensor x pipeline block. A generation consists of complete blocks."""
    block_within: Literal["", "rack", "switch"] = ""
    """Failure domain that all nodes of a block share."""
    priority: int = 0
    """Priority of the job: the job with the higher priority gets a contested node."""

    def problems(self, max_nodes: int) -> Iterator[str]:
        """Yield a message for each invalid value, which says how to fix it."""
        if not 1 <= self.block_nodes <= max_nodes:
            yield f"--block-nodes {self.block_nodes}: must be at least 1, and at most the maximum of --nnodes"
        if not -1000 <= self.priority <= 1000:
            yield f"--priority {self.priority}: must be between -1000 and 1000"


class CheckpointSettings(SettingsPart, frozen=True, kw_only=True):
    """Copies of checkpoints in memory, and those written to storage."""

    replicas: int = 2
    """Number of nodes (on a single node: of ranks) that hold each byte of a checkpoint. With 2, any one may be lost."""
    parity_group_size: int = 0
    """Data nodes per parity group, to which two parity nodes are added. 0: no parity."""
    spill_to: str | None = None
    """Path or URL, without credentials, where committed versions are written as ordinary DCP checkpoints. A job that
    has checkpoints there continues from the newest one."""
    fresh: bool = False
    """Start anew, although ``spill_to`` has checkpoints of the job; the run writes to a new folder beside them."""
    spill_every: int = 1000
    """Minimum steps between versions written to ``spill_to``."""
    spill_keep: int = 2
    """Number of versions kept at ``spill_to``. 0: all."""

    def problems(self, max_nodes: int) -> Iterator[str]:
        """Yield a message for each invalid value, which says how to fix it."""
        if not 1 <= self.replicas <= 8:
            yield f"--replicas {self.replicas}: must be between 1 and 8"
        # The controller checks that there are enough nodes for parity.
        if self.parity_group_size and not 2 <= self.parity_group_size <= 64:
            yield f"--parity-group-size {self.parity_group_size}: a group has 2 to 64 data nodes; 0 turns parity off"
        if self.parity_group_size and max_nodes < 4:
            yield (
                f"--parity-group-size {self.parity_group_size} needs at least 4 nodes (2 data and 2 parity nodes), and "
                f"--nnodes allows {max_nodes}: use copies (--replicas), or more nodes"
            )
        if self.spill_every < 1 or not 0 <= self.spill_keep <= 1000:
            yield "--spill-every must be at least 1, and --spill-keep between 0 (all) and 1000"
        if self.spill_to is not None and (problem := storage_url_error(self.spill_to)):
            yield f"--spill-to: {problem}"
        if self.fresh and self.spill_to is None:
            yield "--fresh has no meaning without --spill-to: a job without checkpoints on storage always starts anew"


class AuditSettings(SettingsPart, frozen=True, kw_only=True):
    """How the ranks check each other's work."""

    digest_interval: int = 50
    """Steps between digests of the parameters, besides those of versions to be committed. 0: no digests."""
    sdc: Literal["", "off", "light", "standard", "paranoid"] = ""
    """How thoroughly the ranks check each other's work for silent corruption: light takes up to 1 % of a step,
    standard 3 %, paranoid 30 %. standard and paranoid keep two more versions in memory. Default: light, which then
    only reports."""
    sdc_mode: Literal["", "report", "enforce"] = ""
    """What follows from a difference: report (a finding and an event), or enforce (steps are computed again, and a node
    that computes wrongly leaves). Default: enforce if ``sdc`` is given, else report."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid value, which says how to fix it."""
        yield from _negative_values(self, "digest_interval")


class FailureSettings(SettingsPart, frozen=True, kw_only=True):
    """When a rank counts as hung, and how often the script may fail."""

    hang_threshold_s: float | None = None
    """Seconds without progress and without a sign of work (processor, I/O, child processes) before a rank counts as
    hung. Default: 60, or more for long steps."""
    work_limit_s: float = 1800.0
    """Seconds without progress before a rank that works, as in an evaluation, counts as hung."""
    user_retries: int = 0
    """Number of times that the job continues after an exception of the script."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid value, which says how to fix it."""
        if self.hang_threshold_s is not None and self.hang_threshold_s <= 0:
            yield "--hang-threshold-s must be positive; omit it to follow the job's step time"
        if self.work_limit_s <= 0:
            yield "--work-limit-s must be positive"
        yield from _negative_values(self, "user_retries")


class WaitSettings(SettingsPart, frozen=True, kw_only=True):
    """How long the launcher waits at the start and at the end."""

    join_wait_s: float = 30.0
    """Seconds that the first generation waits for the maximum number of nodes once the minimum is there."""
    grace_s: float = 30.0
    """Seconds that ranks have to end, and checkpoints to reach ``spill_to``, after a signal to the launcher. As long as
    torchrun waits. Keep it below the scheduler's own time until SIGKILL."""
    exit_wait_s: float = 300.0
    """Seconds that workers may run after the job has finished. As long as torchrun's exit barrier."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid value, which says how to fix it."""
        yield from _negative_values(self, "join_wait_s", "grace_s")


class DirectorySettings(SettingsPart, frozen=True, kw_only=True):
    """Where the launcher keeps its files."""

    segment_dir: str | None = None
    """Without an agent: directory on a memory file system for checkpoints; each run makes a folder of its own there.
    Default: ``/dev/shm/everstep-UID``."""
    state_dir: str | None = None
    """Directory for logs, receipts and files of private services. Default: ``$XDG_STATE_HOME/everstep``,
    or ``/tmp/everstep-UID/state`` if the home directory is too long a path for sockets, or cannot be written."""


class DisplaySettings(SettingsPart, frozen=True, kw_only=True):
    """What the launcher prints."""

    keep_output: bool = True
    """Copy the output of the ranks through the launcher, which keeps the end of it for ``everstep logs``. Without it
    they write to the launcher's own stdout and stderr. ``log_dir`` keeps the whole output instead."""
    verbose: bool = False
    """Show all lines of the launcher's log, which ``everstep logs JOB --launcher`` has in any case."""
    progress: bool = True
    """Show the progress of the job: a live line on a terminal, log lines elsewhere. With an agent, only the launcher of
    rank 0 does."""
    progress_interval_s: float = 60.0
    """Seconds between lines of progress where the launcher's output is not a terminal."""

    def problems(self) -> Iterator[str]:
        """Yield a message for each invalid value, which says how to fix it."""
        if self.progress_interval_s <= 0:
            yield "--progress-interval-s must be more than 0; --no-progress shows none"


class LaunchSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of ``everstep-launch``."""

    nnodes: int | str = 1
    """Number of nodes of the job: ``N``, or ``MIN:MAX``. Further launchers are spares."""
    nproc_per_node: int | str = 1
    """Number of ranks on this node, or ``gpu``, ``cpu`` or ``auto`` to count devices."""
    job: str = ""
    """Name of the job, the same on all its nodes. Default: a generated name. With ``spill_to`` it follows from the
    script and its arguments, so that the same command continues the job."""
    standalone: bool = False
    """Run on one node, with a private controller and agent, even if the node has an agent."""
    max_restarts: int = 3
    """Maximum failures of one local rank within 60 s that are replaced; after one more, this node leaves the job. Of a
    script that does not call ``everstep.main``: how often all ranks start again in the whole run, as under torchrun;
    only if the flag is given, since such a script may overwrite what it saved."""
    torchrun_script: bool = False
    """The script does not call ``everstep.main``. Each loss of a rank or node ends all its processes and starts them
    again, from the script's own checkpoint. On one node without an agent this flag is not needed."""
    rendezvous: RendezvousSettings = RendezvousSettings()
    log_files: LogFileSettings = LogFileSettings()
    module: bool = False
    """The script is the name of a module, as in ``python -m``."""
    no_python: bool = False
    """The script is any program, which is run as it is. It must not call ``everstep.main``."""
    agent_socket: str | None = None
    """Socket of the node's agent. Default: ``/run/everstep/agent.sock`` if it exists, else a private agent."""
    processes: ProcessSettings = ProcessSettings()
    placement: PlacementSettings = PlacementSettings()
    checkpoints: CheckpointSettings = CheckpointSettings()
    audits: AuditSettings = AuditSettings()
    failures: FailureSettings = FailureSettings()
    waits: WaitSettings = WaitSettings()
    die_with_parent: bool = False
    """Shut down when the process that started the launcher ends."""
    start_from: str | None = None
    """Checkpoint to start from if none is in memory or at ``spill_to``, as a path or URL: a ``torch.save`` file, a
    ``torch.distributed.checkpoint`` folder, weights as safetensors, or a folder that Everstep wrote."""
    allow_bit_flips: bool | None = None
    """Let ``everstep chaos flip`` change a bit of a rank's parameters. Default: only without an agent, in a private
    run."""
    directories: DirectorySettings = DirectorySettings()
    display: DisplaySettings = DisplaySettings()
    vault_linger_s: float | None = None
    """Without an agent: seconds that checkpoints survive in memory if this launcher is killed. Default: 600 with
    ``job``; otherwise they do not survive."""

    @property
    def node_range(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes. Raises ConfigurationError if ``nnodes`` is malformed."""
        match = re.fullmatch(r"(\d+)(?::(\d+))?", str(self.nnodes))
        if match is None:
            raise ConfigurationError(f"--nnodes {self.nnodes}: expected a number, or MIN:MAX such as 1:4")
        return int(match[1]), int(match[2] or match[1])


_AS_IN_TORCHRUN = """
    nnodes nproc_per_node rdzv_endpoint node_rank standalone max_restarts local_addr log_dir tee module
    local_ranks_filter no_python
"""
TORCHRUN_SETTINGS = tuple(_AS_IN_TORCHRUN.split())
"""Settings that have torchrun's name and meaning."""

PROGRAM = Program(
    "everstep-launch",
    LaunchSettings,
    other_variables={
        **{name: f"PET_{name.upper()}" for name in TORCHRUN_SETTINGS},
        "job": "PET_RDZV_ID",
        "grace_s": "PET_SHUTDOWN_TIMEOUT",
    },
)

ALIASES = {
    **{name: (f"--{name}",) for name in TORCHRUN_SETTINGS if "_" in name},
    "job": ("--rdzv-id", "--rdzv_id"),
    "grace_s": ("--shutdown-timeout", "--shutdown_timeout"),
    "tee": ("-t",),
    "module": ("-m",),
}
"""torchrun's other spellings of flags."""


class LaunchOptions(LaunchSettings, frozen=True, kw_only=True):
    """The settings of one launch, with the script."""

    script: str
    """Path of the script, or name of the module if ``module``."""
    arguments: tuple[str, ...] = ()
    """Arguments of the script."""
    cache_name: str = ""
    """Name of the folder on this node that keeps compiled code: the job's name, or the script's if the job's name was
    generated, so that the next run of the script finds the folder."""
    max_script_restarts: int | None = None
    """``max_restarts`` if it was given."""

    @property
    def min_nodes(self) -> int:
        return self.node_range[0]

    @property
    def max_nodes(self) -> int:
        return self.node_range[1]

    @property
    def command_to_continue(self) -> str:
        """What to run to continue the job, in words."""
        return "the same command without --fresh" if self.checkpoints.fresh else "the same command"

    @property
    def run_start(self) -> RunStart:
        """How the run treats what an earlier one of its name left in memory on this machine."""
        return RunStart(takes_over=not self.checkpoints.fresh, is_alone=self.checkpoints.spill_to is not None)

    @property
    def allows_bit_flips(self) -> bool:
        """True if a rank changes a bit of its parameters when it is asked to."""
        return self.agent_socket is None if self.allow_bit_flips is None else self.allow_bit_flips

    @property
    def meets_at_endpoint(self) -> bool:
        """True if this launcher meets those of other nodes at ``rdzv_endpoint``, because it has no agent."""
        return self.rendezvous.rdzv_endpoint is not None and self.agent_socket is None and self.max_nodes > 1

    @property
    def endpoint_notice(self) -> str | None:
        """Why given flags for a meeting of launchers have no effect; None if they have, or were not given."""
        flags = {
            "--rdzv-endpoint": self.rendezvous.rdzv_endpoint,
            "--node-rank": self.rendezvous.node_rank,
            "--job-secret-file": self.rendezvous.job_secret_file,
        }
        given = [flag for flag, value in flags.items() if value is not None]
        if not given or self.meets_at_endpoint:
            return None
        if self.agent_socket is None:
            reason = "a job of one node has no other launcher to meet"
        else:
            reason = "launchers meet through their agents and the controller"
        return f"{', '.join(given)} {'has' if len(given) == 1 else 'have'} no effect: {reason}"

    def validate(self) -> LaunchOptions:
        """Return these options if they are valid. Raises ConfigurationError, which says how to fix them."""
        for problem in self._problems():
            raise ConfigurationError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        low, high = self.node_range
        if not 1 <= low <= high:
            yield f"--nnodes {low}:{high}: the minimum must be at least 1 and at most the maximum"
        if high > 1 and self.agent_socket is None and self.rendezvous.rdzv_endpoint is None:
            yield (
                "a job of several nodes needs an agent on each of them, or a place to meet: start everstep-agent and "
                f"give its --agent-socket (or set {PROGRAM.variable('agent_socket')}), or give --rdzv-endpoint "
                "HOST:PORT of the first node and --job-secret-file"
            )
        yield from self.rendezvous.problems()
        if self.nproc_per_node not in ("gpu", "cpu", "auto", *range(1, 65)):
            yield f"--nproc-per-node {self.nproc_per_node}: expected 1 to 64, gpu, cpu or auto"
        if self.vault_linger_s is not None and self.vault_linger_s <= 0:
            yield f"--vault-linger-s {self.vault_linger_s:g}: must be more than 0, or omitted"
        if self.max_restarts < 0:
            yield "--max-restarts cannot be negative"
        yield from self.processes.problems()
        yield from self.audits.problems()
        yield from self.failures.problems()
        yield from self.waits.problems()
        yield from self.checkpoints.problems(high)
        keeps_state = self.checkpoints.spill_to is not None or self.start_from is not None
        if self.torchrun_script and (keeps_state or self.audits.sdc):
            yield (
                "--torchrun-script: Everstep keeps and checks no state of such a script, so --spill-to, --start-from "
                "and --sdc have no meaning; omit them"
            )
        yield from self.placement.problems(high)
        yield from self.display.problems()
        yield from self.log_files.problems()
        for flag, path in {
            "--spill-to": self.checkpoints.spill_to,
            "--start-from": self.start_from,
            "--agent-socket": self.agent_socket,
            "--segment-dir": self.directories.segment_dir,
        }.items():
            if path is not None and (problem := path_encoding_error(path)):
                yield f"{flag}: {problem}"
        if self.no_python:
            yield from self._problems_of_a_program()
        elif not self.module and not Path(self.script).is_file():
            yield f"there is no script {self.script!r} here (for a module, use -m)"

    def _problems_of_a_program(self) -> Iterator[str]:
        if self.module:
            yield "--no-python runs a program, and --module a module of Python: omit one of them"
        if self.max_nodes > 1 and not self.torchrun_script:
            yield "--no-python in a job of several nodes needs --torchrun-script"
        if shutil.which(self.script) is None:
            yield f"--no-python: there is no executable program {self.script!r} here or in PATH"

    def job_spec(self, nproc_per_node: int) -> JobSpec:
        """Return the job's specification for the controller, given the number of ranks."""
        copies, spill = self.checkpoints, None
        if copies.spill_to is not None:
            spill = SpillPlan(every_steps=copies.spill_every, url=copies.spill_to, keep_last=copies.spill_keep)
        return JobSpec(
            job=self.job,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            nproc_per_node=nproc_per_node,
            join_wait_s=self.waits.join_wait_s,
            replicas=copies.replicas,
            digest_interval=self.audits.digest_interval,
            sdc="off" if self.torchrun_script else self.audits.sdc or DEFAULT_SDC,
            sdc_mode=self.audits.sdc_mode or ("enforce" if self.audits.sdc else "report"),
            hang_threshold_s=self.failures.hang_threshold_s,
            work_limit_s=self.failures.work_limit_s,
            max_user_retries=(self.max_script_restarts or 0) if self.torchrun_script else self.failures.user_retries,
            block_nodes=self.placement.block_nodes,
            block_within=self.placement.block_within,
            priority=self.placement.priority,
            parity_group_size=copies.parity_group_size,
            restarts_script=self.torchrun_script,
            spill=spill,
        )


def load_options(
    script: str, arguments: Sequence[str], flags: Mapping[str, Any], environ: Mapping[str, str]
) -> LaunchOptions:
    """Return the validated options of a launch, of a script (or module) with its own arguments.

    Raises ConfigurationError if a value is invalid, or options contradict each other.
    """
    given = PROGRAM.read(flags, environ)
    settings = with_values(LaunchSettings(), given)
    if settings.standalone and settings.node_range != (1, 1):
        raise ConfigurationError("--standalone is for one node: omit --nnodes or --standalone")
    agent_socket = None if settings.standalone else settings.agent_socket or _default_socket()
    by_endpoint = agent_socket is None and settings.rendezvous.rdzv_endpoint is not None
    several = settings.node_range[1] > 1
    command = json.dumps([os.path.abspath(script), *arguments]) if settings.checkpoints.spill_to is not None else None
    job = _job_name(settings.job, script, several=several, by_endpoint=by_endpoint, command=command)
    spill_to = settings.checkpoints.spill_to
    if spill_to is not None and "://" not in spill_to:
        spill_to = os.path.abspath(spill_to)
    resolved: dict[str, Any] = {
        "job": job,
        "agent_socket": os.path.abspath(agent_socket) if agent_socket else None,  # scripts may change their directory
        "spill_to": spill_to,
    }
    if settings.job and settings.vault_linger_s is None:
        resolved["vault_linger_s"] = DEFAULT_LINGER_S
    return LaunchOptions(
        **msgspec.structs.asdict(with_values(settings, resolved)),
        script=script,
        arguments=tuple(arguments),
        cache_name=settings.job or _stem(script),
        max_script_restarts=given.get("max_restarts"),
    ).validate()


def path_encoding_error(path: str) -> str | None:
    """Return what is wrong with a path that the messages of Everstep's programs cannot hold; None if nothing is."""
    whole = os.path.abspath(path)
    name = valid_unicode(whole)
    if name == whole:
        return None
    advice = "give another path" if sys.flags.utf8_mode else "set PYTHONUTF8=1, or give another path"
    return f"{name} is not in this environment's encoding, {sys.getfilesystemencoding()}: {advice}"


def _job_name(given: str, script: str, *, several: bool, by_endpoint: bool, command: str | None) -> str:
    """Return the job's name. ``command``: script and arguments of a job that continues from storage, which name it."""
    if given:
        try:
            return check_name(given, "job")
        except ValueError as error:
            raise ConfigurationError(f"--job: {error}") from None
    if several and by_endpoint:
        return _stem(script)
    if several:
        raise ConfigurationError("launchers of several nodes find each other by the job's name: give --job NAME")
    suffix = secrets.token_hex(3) if command is None else hashlib.sha256(command.encode()).hexdigest()[:6]
    return f"{_stem(script)}-{suffix}"


def _stem(script: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).stem).lstrip("._-")[:40] or "job"


def _default_socket() -> str | None:
    try:
        exists = stat.S_ISSOCK(os.stat(DEFAULT_AGENT_SOCKET).st_mode)
    except OSError:
        return None
    return DEFAULT_AGENT_SOCKET if exists else None
