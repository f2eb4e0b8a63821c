"""SQLite databases for tests that are not about the schema: a copy, since the migrations take 50 ms of CPU."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from everstep_controller.store.database import open_database, parse_url


@functools.cache
def _template() -> bytes:
    """A database file with the newest schema and nothing in it, as the migrations make it."""
    with tempfile.TemporaryDirectory(prefix="ev-") as folder:
        path = Path(folder) / "template.db"
        open_database(f"sqlite:///{path}").dispose()  # the last connection's end takes in the write-ahead log
        return path.read_bytes()


def give_schema(database: str) -> None:
    """Writes the database file of a SQLite URL where there is none yet; other databases are left alone."""
    url = parse_url(database)
    if url.drivername != "sqlite" or not url.database:
        return
    path = Path(url.database)
    if not path.exists() and path.parent.is_dir():
        path.touch(0o600)
        path.write_bytes(_template())
