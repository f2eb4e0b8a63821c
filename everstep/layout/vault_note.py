"""Whose memory a directory of slots is: a lock that its vault holds, and in its file what the vault says of itself.

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
"""One process: other numbers mean groups of them, or all, to whoever sends a signal."""


class VaultNote(msgspec.Struct, frozen=True, kw_only=True):
    """``pid``: the vault. ``run_dir``: where its socket is. ``alone_since``: wall seconds since when neither an agent
    nor a rank is connected, None where one is. ``ends_at``: when it ends for that, None where it does not."""

    pid: Pid
    run_dir: str
    idle_since: float | None = None
    ends_at: float | None = None


def write_note(lock: int, note: VaultNote) -> None:
    """Writes the note through the descriptor of the held lock, in one call, so that a reader sees this or the last."""
    os.pwrite(lock, msgspec.json.encode(note).ljust(_NOTE_BYTES - 1) + b"\n", 0)


def read_note(directory: Path) -> VaultNote | None:
    """What the vault of ``directory``, alive or not, said last; None where nothing can be read, or where it names a
    process of somebody who is not the note's owner: whoever reads it may end that process."""
    try:
        with (directory / LOCK_FILE).open("rb") as file:
            note = msgspec.json.decode(file.read(_NOTE_BYTES), type=VaultNote)
            return note if _owner_of(note.pid) in (None, os.fstat(file.fileno()).st_uid) else None
    except (OSError, *DECODE_ERRORS):
        return None


def _owner_of(pid: int) -> int | None:
    """The user of a process; None where it has ended."""
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except FileNotFoundError:
        return None


def is_locked(directory: Path, name: str = LOCK_FILE) -> bool:
    """Whether a process holds the lock ``name`` in ``directory``."""
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
