"""A SQLite file that was damaged is refused when a controller starts."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from everstep.errors import ConfigurationError
from everstep_controller.store.database import check_file, open_database
from everstep_controller.store.rows import Batch, EventLogRow
from everstep_controller.store.writer import DatabaseWriter
from tests.support.fleet.controllers import controller_process
from tests.support.processes.fork_pool import ForkPool


def filled(path: Path, lines: int = 400) -> Path:
    """A database with some hundred KiB of event log, all of it in the file itself."""
    engine = open_database(f"sqlite:///{path}")
    writer = DatabaseWriter(engine)
    writer.take_over()
    rows = [EventLogRow(id=number, at=float(number), kind="test", sentence="s" * 300) for number in range(1, lines + 1)]
    writer.commit([Batch(number=1, event_log=rows)])
    writer.close()
    engine.dispose()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def cut_by_pages(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 3 * 4096)


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(b"\xff" * 4096)


def replace(path: Path) -> None:
    path.write_bytes(b"no database at all\n" * 500)


@pytest.mark.promise("sqlite-durable")
@pytest.mark.parametrize("damage", [cut, cut_by_pages, overwrite, replace], ids=lambda damage: damage.__name__)
def test_database_check_refuses_damaged_file(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = filled(tmp_path / "controller.db")
    check_file(path)
    damage(path)
    with pytest.raises(ConfigurationError, match=r"is damaged \(SQLite: .*newest backup"):
        open_database(f"sqlite:///{path}", check=True)


def test_database_check_accepts_new_or_empty_file(tmp_path: Path) -> None:
    check_file(tmp_path / "none.db")
    (tmp_path / "empty.db").touch()
    check_file(tmp_path / "empty.db")
    open_database(f"sqlite:///{tmp_path / 'new.db'}", check=True).dispose()


def test_database_check_accepts_file_being_written(tmp_path: Path) -> None:
    path = filled(tmp_path / "controller.db")
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE meta SET value = value + 1 WHERE key = 'epoch'")
        check_file(path)
        other.execute("ROLLBACK")


@pytest.mark.promise("sqlite-durable")
def test_process_refuses_damaged_file(program_forks: ForkPool, tmp_path: Path) -> None:
    overwrite(filled(tmp_path / "controller.db", 4000))  # a page that no start reads
    trusting = ("--trust-clock",)
    with (
        pytest.raises(AssertionError, match="is damaged"),
        controller_process(tmp_path, program_forks, arguments=trusting),
    ):
        pass
    with controller_process(tmp_path, program_forks, arguments=(*trusting, "--no-check-database")) as process:
        assert process.ask("GET", "/healthz", headers={})[0] == 200
