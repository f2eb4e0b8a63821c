"""What a forked process is made to look like: what it is called, how it takes signals, how its group is reached."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

_PR_SET_NAME = 15
OOM_SCORE_ADJUSTMENT = 500
_libc = ctypes.CDLL(None)


def call_process(name: str) -> None:
    """What top and ``ps -o comm`` show (15 characters): forked children all have their fork server's command line."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def fresh_signals() -> None:
    """What a process started from a shell has: default handlers, Ctrl-C as KeyboardInterrupt, nothing blocked."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def handles(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; False for one that is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def signal_group(pid: int, number: int) -> None:
    """Sends ``number`` to the process group that ``pid`` leads; nothing where there is none any more."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        return


def step_forward_to_oom_killer() -> None:
    """Where memory is short the kernel shall end a rank, which is replaced, before the vault that its state is in.

    A vault maps the slots of all ranks, so that it may look like the largest process of the node. Anybody may raise
    his own score; what was set for the whole job (by a container's runtime, say) is the least.
    """
    file = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError):
        file.write_text(str(max(int(file.read_text()), OOM_SCORE_ADJUSTMENT)))
