"""How a helper process makes sure that it does not outlive the supervisor."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Asks the kernel to kill this process when ``parent`` ends; exits where that is gone already.

    The kernel counts the thread that started us: that must be one which lives as long as the supervisor. Comparing
    with ``parent``, and not with process 1, holds in a container too, where the supervisor is process 1.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(0)
