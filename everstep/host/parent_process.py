"""Make a process end together with the one that started it (Linux)."""

from __future__ import annotations

import ctypes
import os
import signal

from everstep.errors import ConfigurationError

PARENT_VARIABLE = "EVERSTEP_PARENT_PID"
"""In a child's environment: the pid of the process that started it."""
_PR_SET_PDEATHSIG = 1


def parent_pid() -> int:
    """Return the pid of the process that started this one: from the environment, where that process may have written
    it and it is removed, else from the kernel, which names another process once the parent has ended."""
    return int(os.environ.pop(PARENT_VARIABLE, "") or os.getppid())


def die_with_parent(parent: int, signum: signal.Signals = signal.SIGTERM) -> None:
    """Have the kernel send ``signum`` to this process when ``parent`` ends; at once if it has ended already.

    The kernel follows the parent's *thread*: start children from a thread that lives as long as its process. Install
    the signal's handler before; SIGKILL is for a process that has nothing to clean up. In a container ``parent`` may be
    1, or 0 for another process namespace. Raises ConfigurationError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0) != 0:
        raise ConfigurationError(f"cannot follow the parent's end: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the kernel knew: the signal would never come
        signal.raise_signal(signum)
