"""SQLite databases, copied from a template because the migrations take 50 ms of CPU."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from everstep_controller.store.database import open_database, parse_url


@functools.cache
def _template() -> bytes:
    """Return an empty database file with the newest schema, as the migrations make it."""
    with tempfile.TemporaryDirectory(prefix="ev-") as folder:
        path = Path(folder) / "template.db"
        open_database(f"sqlite:///{path}").dispose()  # closing the last connection merges the write-ahead log
        return path.read_bytes()


def create_with_schema(database: str) -> None:
    """Write the database file of a SQLite URL if there is none yet. Other databases are not changed."""
    url = parse_url(database)
    if url.drivername != "sqlite" or not url.database:
        return
    path = Path(url.database)
    if not path.exists() and path.parent.is_dir():
        path.touch(0o600)
        path.write_bytes(_template())
