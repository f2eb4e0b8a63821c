"""How a process makes sure that it does not outlive the one that started it (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

from everstep.errors import ConfigurationError

PARENT_VARIABLE = "EVERSTEP_PARENT_PID"
"""In a child's environment: the pid of the process that started it."""
_PR_SET_PDEATHSIG = 1


def parent_pid() -> int:
    """The pid of the process that started this one, for ``die_with_parent``: as it said itself, or as the kernel says,
    for whom another takes its place where it ends before anybody asks. Takes the word out of the environment."""
    return int(os.environ.pop(PARENT_VARIABLE, "") or os.getppid())


def die_with_parent(parent: int, signum: signal.Signals = signal.SIGTERM) -> None:
    """Lets this process get ``signum`` when ``parent`` ends; at once where it has ended already.

    Args:
        parent: the pid of the process that started this one: given by it, or what ``os.getppid()`` said first thing
            in ``main``. It may well be 1, or 0 from another process namespace, in a container.
        signum: have its handler in place before. SIGKILL for a process with nothing to put in order.

    The kernel counts the parent's *thread*: a child must be started by a thread that lives as long as its process.
    Raises ConfigurationError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise ConfigurationError(f"cannot follow the parent's end: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the kernel knew: the signal would never come
        signal.raise_signal(signum)
