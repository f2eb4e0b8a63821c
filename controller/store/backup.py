"""A copy of a SQLite database while its controller writes, and what makes a copy fit to go on from."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from controller.store.audit_ids import LIVES
from controller.store.database import parse_url
from everstep.errors import ConfigurationError


def back_up(database: str, target: Path) -> int:
    """Writes ``target``: the database as one transaction sees it, whole and checked. Writers are not held up.

    Args:
        database: its URL.

    Returns the copy's size in bytes. Raises ConfigurationError where there is no such database, where it is not
    SQLite's, and where something is at ``target`` already.
    """
    url = parse_url(database)
    if url.drivername != "sqlite" or not url.database:
        raise ConfigurationError("this copies a SQLite database; of PostgreSQL make one with pg_dump")
    path = Path(url.database)
    if not path.is_file():
        raise ConfigurationError(f"there is no database at {path}")
    with _draft(target) as draft:
        with _opened(path, "ro") as source:
            source.execute("VACUUM INTO ?", (str(draft),))
        with _opened(draft, "rw") as copy:
            (verdict,) = copy.execute("PRAGMA integrity_check").fetchone()
            if verdict != "ok":
                raise ConfigurationError(f"the database at {path} is damaged: {verdict}")
            copy.execute("UPDATE meta SET value = value + ? WHERE key = 'epoch'", (LIVES,))
            copy.commit()
    return target.stat().st_size


@contextlib.contextmanager
def _opened(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    try:
        with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise ConfigurationError(f"the database cannot be copied: {error}") from error


@contextlib.contextmanager
def _draft(target: Path) -> Iterator[Path]:
    """An empty file beside ``target``, for this user's eyes; it becomes ``target`` when it is complete."""
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists():
            raise ConfigurationError(f"{target} exists already: give a name that is not taken")
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.rename(target)
    except OSError as error:
        raise ConfigurationError(f"{target} cannot be written: {error.strerror}") from error
    finally:
        draft.unlink(missing_ok=True)
