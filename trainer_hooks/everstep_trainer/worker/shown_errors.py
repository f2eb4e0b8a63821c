"""Print an exception once, although all ranks of a node may raise it into the same terminal or log."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import sys
from pathlib import Path

from everstep_trainer.launch.output.marks import shown_stderr

_claims: list[socket.socket] = []
"""Claims of this process; they end with it."""


def show(text: str) -> None:
    """Print to stderr, if the training function left a usable one; the error is reported to the job in any case."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def claim_error(error: str, scope: str) -> bool:
    """Return whether this process is the first one that prints an error into its stderr.

    A claim is a name in the abstract namespace of unix sockets, which leaves no file and ends with its process. A
    process whose claim cannot be made prints: an error shown twice is better than one that is lost.

    Args:
        error: The error's class and message.
        scope: What only the ranks of one generation know, such as its secret and number.
    """
    try:
        key = hashlib.sha256(f"{scope}\0{shown_stderr()}\0{error}".encode(errors="replace"))
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError:
        return True
    try:
        claim.bind(f"\0everstep/error/{key.hexdigest()}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    return True


def launcher_shares_stderr() -> bool:
    """Return whether this rank's stderr is shown in that of its launcher, which prints why a job ended."""
    try:
        status = Path(f"/proc/{os.getppid()}/fd/2").stat()  # the fork server has the launcher's
        return shown_stderr() == f"{status.st_dev}:{status.st_ino}"
    except OSError:
        return False
