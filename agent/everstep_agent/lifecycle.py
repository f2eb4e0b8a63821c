"""How a process of the agent begins and ends: alone in its run directory, and nothing left."""

from __future__ import annotations

import datetime
import fcntl
import logging
import os
import stat
import sys
from pathlib import Path
from typing import Any

import msgspec

from everstep.errors import ConfigurationError
from everstep.plain_text import PlainLineFormatter


def private_directory(path: Path) -> Path:
    """Makes ``path`` (and its parents) as a directory that only this user may enter.

    Raises ConfigurationError where it exists and belongs to somebody else, or lies in a directory of theirs.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if path.stat().st_uid != os.geteuid():
        raise ConfigurationError(f"{path} belongs to another user; give a directory of your own")
    _check_parent_owners(path.absolute())
    path.chmod(0o700)
    return path


def _check_parent_owners(path: Path) -> None:
    """Whoever owns a directory puts others in the place of those in it: below one where all may make some (``/tmp``,
    ``/dev/shm``) our names can be foreseen, so what leads to ``path`` must be ours or root's, links too."""
    below: list[Path] = []
    for place in (path, *path.parents):
        found = place.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
            if below:
                raise ConfigurationError(f"{below[-1]} belongs to another user; give a directory of your own")
            return
        if found.st_uid not in (0, os.geteuid()):
            below.append(place)


def write_atomically(path: Path, content: Any) -> None:
    """Writes ``content`` as JSON, readable by this user only, so that a reader sees all of it or the file before."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(content) + b"\n")
    draft.rename(path)


def acquire_lock(lock_file: Path, error_message: str) -> int:
    """Makes what lies beside ``lock_file`` this process's own; returns the descriptor of a lock that ends with it.

    The file may be unlinked by its holder, as the last thing before the descriptor is closed. Raises
    ConfigurationError, with ``refusal``, where another process holds it.
    """
    lock = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigurationError(error_message) from None
    if lock_file.exists() and os.path.samestat(lock_file.stat(), os.fstat(lock)):
        return lock
    os.close(lock)
    return acquire_lock(lock_file, error_message)  # a holder that ended at this moment took the file along


class AgentRunDirectory:
    """An agent's own directory: held by a lock, so that two agents never serve the same sockets.

    Raises ConfigurationError where another agent holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = private_directory(path.absolute())
        self._lock_file = self.path / "agent.lock"
        refusal = f"another agent runs in {self.path}; stop it, or give another --run-dir"
        self._lock = acquire_lock(self._lock_file, refusal)

    def next_incarnation(self, wall: float) -> int:
        """This life's number: milliseconds of ``wall``, but more than any earlier life's where the clock went back."""
        file = self.path / "incarnation"
        last = int(file.read_text()) if file.exists() and file.read_text().strip().isdigit() else 0
        now = max(int(wall * 1000), last + 1)
        write_atomically(file, now)
        return now

    def release(self, *names: str) -> None:
        """Removes ``names`` and the lock from the directory, which itself stays, with what the next life needs."""
        for name in names:
            (self.path / name).unlink(missing_ok=True)
        self._lock_file.unlink(missing_ok=True)
        os.close(self._lock)


def delete_segments(directory: Path) -> int:
    """Unlinks what a vault that was killed left in its segment directory, and the directory; returns how many files.

    Only for a directory whose vault is known to be gone: a live vault's ranks would lose their slots.
    """
    if not directory.is_dir() or directory.is_symlink():
        return 0
    files = [p for p in directory.rglob("*") if not p.is_dir()]
    for file in files:
        file.unlink(missing_ok=True)
    for folder in sorted((p for p in directory.rglob("*") if p.is_dir()), reverse=True):
        folder.rmdir()
    directory.rmdir()
    if directory.parent.name.startswith("everstep-") and not any(directory.parent.iterdir()):
        directory.parent.rmdir()
    return len(files)


# ---- log format
# How a daemon's log lines look: for people, or one JSON object a line for machines.

LOG_FIELDS = ("node", "job", "generation", "trace")
"""What a record may carry in ``extra`` so that a search by it finds the whole story."""


class TextLines(PlainLineFormatter):
    """Time, level, message, and the fields that are known."""

    def text(self, record: logging.LogRecord) -> str:
        known = [
            f"{name}={getattr(record, name)}" for name in LOG_FIELDS if getattr(record, name, None) not in (None, "")
        ]
        line = super().text(record)
        return f"{line} [{' '.join(known)}]" if known else line


class JsonLines(logging.Formatter):
    """One JSON object: at (ISO 8601, UTC), level, logger, message, and the fields that are known."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line = {
            "at": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in LOG_FIELDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def log_to_stderr(log_format: str, level: str) -> None:
    """Sends the whole process's log to stderr as ``text`` or ``json``."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
