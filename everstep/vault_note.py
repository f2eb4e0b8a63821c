"""Whose memory a directory of slots is: a lock that its vault holds, and in its file what the vault says of itself.

The lock ends with the vault, however it ends; its file stays beside the slots.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

LOCK_FILE = ".vault.lock"
_NOTE_BYTES = 4096


class VaultNote(msgspec.Struct, frozen=True, kw_only=True):
    """``pid``: the vault. ``run_dir``: where its socket is. ``alone_since``: wall seconds since when neither an agent
    nor a rank is connected, None where one is. ``ends_at``: when it ends for that, None where it does not."""

    pid: int
    run_dir: str
    alone_since: float | None = None
    ends_at: float | None = None


def write_note(lock: int, note: VaultNote) -> None:
    """Writes the note through the descriptor of the held lock, in one call, so that a reader sees this or the last."""
    os.pwrite(lock, msgspec.json.encode(note).ljust(_NOTE_BYTES - 1) + b"\n", 0)


def read_note(directory: Path) -> VaultNote | None:
    """What the vault of ``directory``, alive or not, said last; None where nothing can be read."""
    try:
        return msgspec.json.decode((directory / LOCK_FILE).read_bytes(), type=VaultNote)
    except (OSError, msgspec.DecodeError):
        return None


def is_held(directory: Path, name: str = LOCK_FILE) -> bool:
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
