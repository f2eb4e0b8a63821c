"""Act as the first process of a container: pass signals on to the launcher, and reap orphaned processes.

The kernel gives orphans, such as the children of a killed rank, to process 1, where they stay zombies until it waits
for them. The launcher waits for its own children alone, so process 1 is another process.
"""

from __future__ import annotations

import os
import signal

_SENT_BY_KERNEL = 0x80
"""si_code of a signal of the terminal (Ctrl-C), which reaches every process of the foreground group by itself."""
_FAULTS = {signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}


def continue_in_child_of_init() -> None:
    """Return in a child if this is process 1, which ends with the child's status; else return at once.

    Call it before any thread starts.
    """
    if os.getpid() != 1:
        return
    awaited = signal.valid_signals() - _FAULTS
    before = signal.pthread_sigmask(signal.SIG_BLOCK, awaited)
    child = os.fork()
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        received = signal.sigwaitinfo(awaited)
        if received.si_signo == signal.SIGCHLD:
            _reap(child)
        elif received.si_code != _SENT_BY_KERNEL:
            os.kill(child, received.si_signo)  # not reaped yet, so the pid is still its own


def _reap(child: int) -> None:
    """Reap all dead processes, and end with the status of ``child`` if it is one of them."""
    while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)) is not None:
        if dead.si_pid == child:
            has_exited = dead.si_code == os.CLD_EXITED
            os._exit(dead.si_status if has_exited else 128 + dead.si_status)
