"""Check a SQLite file before a controller starts from it.

SQLite opens a file that was cut short or overwritten in part, and fails only when it reads the damaged pages: requests
would be answered with errors hours after the damage. ``PRAGMA quick_check`` reads every page once.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import time
from pathlib import Path

from everstep.errors import ConfigurationError

log = logging.getLogger(__name__)

TELL_EVERY_S = 5.0
"""Seconds between two lines of log while a large file is checked."""
INSTRUCTIONS = 100_000
"""Steps of SQLite's machine between two looks at the time: some milliseconds."""
_BUSY_S = 5.0


def check_file(path: Path) -> None:
    """Reads the whole file once; a file that is missing or empty is a new database.

    Raises:
        ConfigurationError: it is damaged; the message says what SQLite found and what to do.
    """
    size = path.stat().st_size if path.exists() else 0
    if not size:
        return
    began = time.perf_counter()
    told = began

    def tell() -> int:
        nonlocal told
        now = time.perf_counter()
        if now - told >= TELL_EVERY_S:
            told = now
            log.info("checking the database %s (%d MiB) for damage, for %.0f s so far", path, size >> 20, now - began)
        return 0

    try:
        with contextlib.closing(sqlite3.connect(path, timeout=_BUSY_S)) as connection:
            connection.set_progress_handler(tell, INSTRUCTIONS)
            (found,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError as error:  # locked, no permission, a failing disk: opening it says what to do
        log.warning("the database %s could not be checked for damage: %s", path, error)
        return
    except sqlite3.DatabaseError as error:
        found = str(error)
    if found != "ok":
        raise ConfigurationError(_damaged(path, found))


def _damaged(path: Path, found: str) -> str:
    words = "; ".join(line for line in found.splitlines() if not line.startswith("***"))
    return (
        f"the database file {path} is damaged (SQLite: {words[:300]}). Move it and its -wal and -shm files away, put "
        "the newest backup in its place and start again; docs/operations.md, Backup and restore, has the commands"
    )
