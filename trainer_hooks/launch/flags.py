"""The flags of the command line: torchrun's, and those of our own.

Every flag of torchrun's is taken, so that a command line can be carried over; what has no meaning here is named in
``UNUSED`` and explained once. As with torchrun, PET_<FLAG> in the environment fills what the command line leaves out.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Protocol

from everstep import __version__

AGENT_SOCKET_VARIABLE = "EVERSTEP_AGENT_SOCKET"
DEFAULT_AGENT_SOCKET = "/run/everstep/agent.sock"

UNUSED = {
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
"""torchrun's flags that are taken and change nothing, with the reason that is printed."""
_SWITCHES = frozenset({"run_path", "virtual_local_rank"})
"""Of these, those without a value."""


def command_line(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """The parser of everstep-launch. Values are as they were given, or as ``environ`` has them."""
    parser = argparse.ArgumentParser(
        prog="everstep-launch",
        description="Runs a training script on this node's ranks and replaces them one by one as they fail.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)

    def flag(name: str, *more: str, **how: Any) -> None:
        """A flag in torchrun's both spellings, filled from PET_<NAME> where it is not given."""
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
    for name in UNUSED:
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
    flag("parity", type=int, default=0, help="members of groups that keep clean versions with two parities; 0 for none")
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
    """How ``flag`` above is called."""

    def __call__(self, name: str, *more: str, **how: Any) -> None: ...
