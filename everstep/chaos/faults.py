"""Bring about faults in processes of a job: kill, stop, slow down, cut off, or ask a rank to flip a bit."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum

from everstep.chaos.targets import FLIP_SIGNAL, LocalNode
from everstep.errors import Conflict
from everstep.host.processes import Process, continued_at_end, has_signal_handler, send_signal

STOPPED_S, RUNNING_S = 0.03, 0.01
"""Of each period of a slowed rank. Its agent takes a rank for stopped after half a second without a heartbeat."""


class Fault(StrEnum):
    """A fault, by its name on the command line."""

    KILL = "kill"
    HANG = "hang"
    SLOW = "slow"
    FLIP = "flip"
    PARTITION = "partition"
    NODE = "node"


def signal_or_raise(process: Process, number: int) -> None:
    """Signal a process. Raises Conflict if it has ended, or is another user's."""
    try:
        if send_signal(process, number):
            return
    except PermissionError:
        reason = "it runs as another user"
    else:
        reason = "it has ended meanwhile"
    raise Conflict(f"cannot signal process {process.pid} ({process.name}): {reason}")


def require_flips(rank: Process) -> None:
    """Raise Conflict if the rank does not flip bits on request."""
    if not has_signal_handler(rank.pid, FLIP_SIGNAL):
        raise Conflict(
            f"process {rank.pid} does not flip bits on request: start the job with everstep-launch --allow-bit-flips, "
            "and call everstep.main in the script's main thread"
        )


def kill_node(node: LocalNode) -> None:
    """Send SIGKILL to a node's launcher and all below it, and to the node's agent. Raises Conflict if none was left."""
    agent = () if node.agent is None else (node.agent,)
    killed = 0
    for process in (*node.processes, *agent):
        with suppress(PermissionError):  # a child that changed its user
            killed += send_signal(process, signal.SIGKILL)
    if not killed:
        raise Conflict(f"the processes of node {node.name} have ended meanwhile")


@contextmanager
def stopped(process: Process) -> Iterator[None]:
    """Stop a process with SIGSTOP inside the block. Raises Conflict if it has ended."""
    with continued_at_end(process):
        signal_or_raise(process, signal.SIGSTOP)
        yield


@contextmanager
def slowed(process: Process) -> Iterator[None]:
    """Let a process run for a quarter of the time inside the block. Raises Conflict if it has ended."""
    done = threading.Event()

    def alternate() -> None:
        while not done.is_set():
            if not send_signal(process, signal.SIGSTOP):
                return
            done.wait(STOPPED_S)
            send_signal(process, signal.SIGCONT)
            done.wait(RUNNING_S)

    with continued_at_end(process):
        signal_or_raise(process, signal.SIGCONT)
        thread = threading.Thread(target=alternate, name="everstep-slow", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
