"""Lock a directory of slots for its vault, and keep the vault's note about itself in the lock file.

The lock ends with the vault, however it ends; its file stays beside the slots.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Annotated

import msgspec

from everstep.errors import DECODE_ERRORS

LOCK_FILE = ".vault.lock"
_NOTE_BYTES = 4096


Pid = Annotated[int, msgspec.Meta(gt=0, le=1 << 22)]
"""A single process: other numbers name groups of processes, or all, when a signal is sent."""


class VaultStatusFile(msgspec.Struct, frozen=True, kw_only=True):
    """A vault's note about itself. Times are wall seconds."""

    pid: Pid
    run_dir: str  # directory of its socket
    idle_since: float | None = None  # neither an agent nor a rank is connected; None while one is
    ends_at: float | None = None  # because of that; None if it does not


def write_status(lock: int, note: VaultStatusFile) -> None:
    """Write the note through the held lock's descriptor, in one call, so that readers see this one or the last."""
    os.pwrite(lock, msgspec.json.encode(note).ljust(_NOTE_BYTES - 1) + b"\n", 0)


def read_status(directory: Path) -> VaultStatusFile | None:
    """Return the last note of the vault of ``directory``, alive or not; None if it cannot be read. Also None if the
    note names a process of another user than its owner, since the reader may end that process."""
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            note = msgspec.json.decode(file.read(_NOTE_BYTES), type=VaultStatusFile)
            return note if _owner_of(note.pid) in (None, os.fstat(file.fileno()).st_uid) else None
    except (OSError, *DECODE_ERRORS):
        return None


def _owner_of(pid: int) -> int | None:
    """Return the user of a process; None if it has ended."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return None


def is_locked(directory: Path, name: str = LOCK_FILE) -> bool:
    """Return whether a process holds the lock ``name`` in ``directory``."""
    try:
        lock = os.open(directory / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
