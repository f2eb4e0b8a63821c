"""Receive a worker's assignment from its launcher: the worker's side of ``everstep_trainer.launch``.

``everstep-launch`` runs a script as one of two kinds of worker. An *active* worker has a local rank from the start. A
*standby* runs the script too, so that its imports are done, but waits in ``wait_for_local_rank`` until a worker dies
and then takes over its local rank. Neither knows its rank before a generation begins. For the main thread only.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys

import msgspec

from everstep.chaos.targets import AGENT_SOCKET_VARIABLE, JOB_VARIABLE
from everstep.ids import split_address
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_trainer.launch.forking.fork_messages import ControlChannel, Promote, ReachedMain
from everstep_trainer.launch.forking.process_setup import StandbyMemory, set_process_name, warm_up_torch
from everstep_trainer.launch.forking.process_title import change_title
from everstep_trainer.launch.job_cache import RecordedImportLoader, cache_folder

CONTROL_FD_VARIABLE = "EVERSTEP_CONTROL_FD"
WORKER_PID_VARIABLE = "EVERSTEP_WORKER_PID"
STARTED_AT_VARIABLE = "EVERSTEP_WORKER_STARTED_AT"
START_FROM_VARIABLE = "EVERSTEP_START_FROM"
LOCAL_RANK_VARIABLE = "LOCAL_RANK"
ALLOW_BIT_FLIPS_VARIABLE = "EVERSTEP_ALLOW_BIT_FLIPS"
RANK_PID_VARIABLE = "EVERSTEP_RANK_PID"
"""The pid of a rank that takes part in a generation, by which programs that it starts know that they are none."""
TORCHRUN_SCRIPT_VARIABLE = "EVERSTEP_TORCHRUN_SCRIPT"
"""Set for a script that the launcher was told not to call ``everstep.main``."""
_OWN_RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")
"""Variables by which env:// would join the rank's own rendezvous, and wait there for the other ranks."""
STANDBY_POLL_S = 1.0


class WorkerAssignment(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's assignment by the launcher, at its start."""

    job: str
    agent_socket: str
    local_rank: int | None  # None for a standby that was not promoted yet
    start_from: str = ""  # checkpoint to start from if nothing is in memory; empty for none
    started_at: float | None = None  # when an active worker began (perf_counter); nothing waits for a standby


class LauncherGone(SystemExit):
    """The launcher ended while a standby waited for its promotion (exit status 1)."""


def current_assignment() -> WorkerAssignment | None:
    """Return the worker's assignment; None if ``everstep-launch`` did not start this process, or a worker forked it."""
    if os.environ.get(WORKER_PID_VARIABLE) != str(os.getpid()):
        return None
    local_rank = os.environ.get(LOCAL_RANK_VARIABLE)
    started_at = os.environ.get(STARTED_AT_VARIABLE) if local_rank is not None else None
    return WorkerAssignment(
        job=os.environ[JOB_VARIABLE],
        agent_socket=os.environ[AGENT_SOCKET_VARIABLE],
        local_rank=None if local_rank is None else int(local_rank),
        start_from=os.environ.get(START_FROM_VARIABLE, ""),
        started_at=None if started_at is None else float(started_at),
    )


def wait_for_local_rank() -> int:
    """Return this worker's local rank, for a standby after its promotion; it then sets LOCAL_RANK. Tells the launcher
    that the script has come this far. Raises LauncherGone, or RuntimeError outside of a launcher."""
    assignment = current_assignment()
    if assignment is None:
        raise RuntimeError("this process has no local rank to wait for: start it with everstep-launch")
    if assignment.local_rank is None and "torch" in sys.modules:
        warm_up_torch()
    control = _control()
    if control is not None:
        with contextlib.suppress(OSError):  # orphaned: the kernel is about to end this process, as its launcher is gone
            control.send(ReachedMain())
    if assignment.local_rank is not None:
        return assignment.local_rank
    if control is None:
        raise LauncherGone("everstep: the launcher is gone")
    return _wait_for_promotion(control)


_channel: ControlChannel[Promote] | None = None


def _control() -> ControlChannel[Promote] | None:
    """Return the control channel, opened once; None if the launcher closed it."""
    global _channel  # one per process, like the descriptor
    if _channel is None and CONTROL_FD_VARIABLE in os.environ:
        _channel = ControlChannel(socket.socket(fileno=int(os.environ.pop(CONTROL_FD_VARIABLE))), Promote)
    return _channel


def _wait_for_promotion(control: ControlChannel[Promote]) -> int:
    def wanted(within_s: float = 0.0) -> bool:
        return bool(select.select([control], [], [], within_s)[0])

    memory, imports = StandbyMemory(), RecordedImportLoader(cache_folder(os.environ), wanted)
    while True:
        memory.match_ranks()
        imports.import_new()
        if wanted(STANDBY_POLL_S):
            break
    received = control.receive()
    if received is None:
        raise LauncherGone("everstep: the launcher is gone")
    promote, _ = received
    os.environ[LOCAL_RANK_VARIABLE] = str(promote.local_rank)
    set_process_name(f"everstep-rank{promote.local_rank}")
    change_title(f"local rank {promote.local_rank}")  # until a generation gives it a rank
    return promote.local_rank


def enter_environment(spec: GenerationSpec, member: Member) -> None:
    """Set this process's variables for a generation.

    Programs that it starts inherit them, but for the address of the rendezvous: a child program that calls
    ``init_process_group`` then fails at once, instead of waiting for the other ranks.
    """
    os.environ.update(torchrun_environment(spec, member) | {RANK_PID_VARIABLE: str(os.getpid())})
    for name in _OWN_RENDEZVOUS:
        os.unsetenv(name)  # os.environ keeps it, for the code of this process


def parent_rank() -> str | None:
    """Return the number of the rank that started this program, or the one above it; None if no rank did.

    A launcher in between, such as torchrun, gives the program a place in another run.
    """
    pid = os.environ.get(RANK_PID_VARIABLE, "")
    is_same_run = os.environ.get("TORCHELASTIC_RUN_ID") == os.environ.get(JOB_VARIABLE)
    return os.environ.get("RANK") if pid not in ("", str(os.getpid())) and is_same_run else None


def leave_environment() -> None:
    """Remove the variables of the rank that started this program, which would make libraries wait for its peers."""
    for name in (*_TORCHRUN_VARIABLES, RANK_PID_VARIABLE):
        os.environ.pop(name, None)


_TORCHRUN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "NODE_RANK"),
    *("ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
)


def torchrun_environment(spec: GenerationSpec, member: Member) -> dict[str, str]:
    """Return the variables that torchrun would set for ``member`` if the generation were one of its restarts. Nodes are
    numbered by their first rank; env:// finds the generation's store under MASTER_ADDR and MASTER_PORT."""
    nodes, locals_here = list(spec.seats), spec.spec.nproc_per_node
    host, port = split_address(spec.store)
    group = str(nodes.index(member.node))
    return {
        "RANK": str(member.rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_RANK": str(member.local_rank),
        "LOCAL_WORLD_SIZE": str(locals_here),
        "GROUP_RANK": group,
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "NODE_RANK": group,
        "ROLE_NAME": "default",
        "ROLE_RANK": str(member.rank),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_RESTART_COUNT": str(max(0, spec.number - 1)),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
