from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, Engine, event, inspect, select, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from everstep.errors import ConfigurationError
from everstep_controller.store import reader as history
from everstep_controller.store import table_access, tables, writer
from everstep_controller.store.database import FOR_WRITING, engine_of, open_database, parse_url, upgrade
from everstep_controller.store.database_errors import DatabaseUnavailable, LeadershipLost, redacted_url
from everstep_controller.store.rows import (
    Batch,
    EventLogRow,
    FindingRow,
    GenerationRow,
    OutboxRow,
    RecoveryRow,
    RemediationRow,
    RemediationState,
    VerdictRow,
    VersionRow,
)
from everstep_controller.store.table_access import upsert
from everstep_controller.store.writer import DatabaseWriter


def commit(writer: DatabaseWriter, batch: Batch) -> None:
    """Writes it as the next one."""
    with writer._engine.connect() as connection:
        newest = connection.execute(text("SELECT value FROM meta WHERE key = 'batch'")).scalar_one()
    batch.number = newest + 1
    writer.commit([batch])


def entry(number: int, **fields: str) -> EventLogRow:
    return EventLogRow(id=number, at=float(number), kind="test", sentence=f"event {number}", **fields)  # type: ignore[arg-type]


def generation(number: int) -> GenerationRow:
    return GenerationRow(job="j", number=number, reason="formed", trace="t", issued_at=float(number), doc="{}")


def version(step: int, *, verified: bool = False) -> VersionRow:
    return VersionRow(job="j", generation=1, step=step, committed_at=1.0, verified_at=2.0 if verified else None)


def by_place(*rows: VersionRow) -> dict[tuple[str, int, int], VersionRow]:
    return {(row.job, row.generation, row.step): row for row in rows}


def test_unfinished_remediations_are_loaded_with_state(engine: Engine, writer: DatabaseWriter) -> None:
    rows = [
        RemediationRow(
            id=f"remediation-1-{number}", node="n1", kind="cordon", state=state, requested_at=float(number), doc="{}"
        )
        for number, state in enumerate(RemediationState)
    ]
    commit(writer, Batch(remediations={row.id: row for row in rows}))
    loaded = DatabaseWriter(engine).take_over()
    assert [(row.id, row.state) for row in loaded.remediations] == [
        ("remediation-1-0", RemediationState.REQUESTED),
        ("remediation-1-1", RemediationState.STARTED),
    ]


def test_findings_are_stored_from_raised_to_cleared(engine: Engine, writer: DatabaseWriter) -> None:
    def seen(at: float, doc: str = "") -> FindingRow:
        return FindingRow(node="n1", key="gpu.xid/0/79", kind="gpu.xid", at=at, doc=doc)

    commit(writer, Batch(findings=[seen(1.0, '{"a":1}'), seen(2.0, '{"a":2}'), seen(3.0), seen(4.0, '{"a":3}')]))
    with engine.connect() as connection:
        rows, _ = history.list_page(connection, history.FINDINGS, "", 10, node="n1")
    assert [(row["at"], row["cleared_at"], row["doc"]) for row in rows] == [
        (4.0, None, '{"a":3}'),
        (1.0, 3.0, '{"a":2}'),
    ]


def test_committed_state_is_loaded_by_next_controller(engine: Engine, writer: DatabaseWriter) -> None:
    commit(
        writer,
        Batch(
            fleet='{"probes":3}',
            nodes={"n1": '{"node":"n1"}', "n2": '{"node":"n2"}'},
            jobs={"j": '{"job":"j"}'},
            event_log=[entry(1), entry(2)],
            outbox=[OutboxRow(node="n1", seq=2, body="{}"), OutboxRow(node="n1", seq=1, body="{}")],
            acknowledged_reports={("n1", 7): 12},
            versions=by_place(version(4, verified=True), version(5)),
        ),
    )
    writer.close()
    second = DatabaseWriter(engine)
    loaded = second.take_over()
    second.close()
    assert loaded.epoch == 2
    assert loaded.fleet == '{"probes":3}'
    assert loaded.nodes == {"n1": '{"node":"n1"}', "n2": '{"node":"n2"}'}
    assert loaded.jobs == {"j": '{"job":"j"}'}
    assert [row.seq for row in loaded.outbox] == [1, 2]
    assert loaded.acknowledged_reports == {("n1", 7): 12}
    assert (loaded.newest_event, loaded.newest_at) == (2, 2.0)
    assert {row.step for row in loaded.versions} == {4, 5}


@pytest.mark.promise("generations-increase")
def test_duplicate_generation_number_rolls_back_the_batch(writer: DatabaseWriter, engine: Engine) -> None:
    commit(writer, Batch(generations=[generation(1)]))
    with pytest.raises(IntegrityError):
        commit(writer, Batch(nodes={"n1": "x"}, event_log=[entry(1)], generations=[generation(1)]))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM nodes")).scalar() == 0
        assert connection.execute(text("SELECT count(*) FROM audit")).scalar() == 0


@pytest.mark.promise("event-log-append-only")
@pytest.mark.parametrize("change", ["UPDATE audit SET sentence = 'nothing happened'", "DELETE FROM audit"])
def test_event_log_is_append_only(writer: DatabaseWriter, engine: Engine, change: str) -> None:
    commit(writer, Batch(event_log=[entry(1)]))
    with engine.connect() as connection, pytest.raises(DBAPIError, match="append-only"), connection.begin():
        connection.execute(text(change))


FORGED = (
    "(id, at, kind, node, job, generation, trace, sentence, detail) "
    "SELECT id, at, 'forged', node, job, generation, trace, sentence, detail FROM audit WHERE id = 1"
)
REPLACED = (
    f"INSERT OR REPLACE INTO audit {FORGED}",
    f"REPLACE INTO audit {FORGED}",
    "UPDATE OR REPLACE audit SET id = 2 WHERE id = 1",
)
UPSERTED = f"INSERT INTO audit {FORGED} AND true ON CONFLICT (id) DO UPDATE SET kind = 'forged'"


@pytest.mark.promise("event-log-append-only")
@pytest.mark.parametrize("recursive", [False, True], ids=["", "recursive triggers"])
@pytest.mark.parametrize("change", [*REPLACED, UPSERTED])
def test_event_log_refuses_replacement_in_sqlite(tmp_path: Path, change: str, recursive: bool) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'controller.db'}")
    writer = DatabaseWriter(engine)
    writer.take_over()
    commit(writer, Batch(event_log=[entry(1), entry(2)]))
    writer.close()
    with engine.connect() as connection:
        connection.execute(text(f"PRAGMA recursive_triggers = {int(recursive)}"))
        connection.rollback()
        with pytest.raises(DBAPIError, match="append-only"), connection.begin():
            connection.execute(text(change))
        assert set(connection.execute(text("SELECT kind FROM audit")).scalars()) == {entry(1).kind}
    engine.dispose()


@pytest.mark.promise("event-log-append-only")
def test_event_log_refuses_upserts(writer: DatabaseWriter, engine: Engine) -> None:
    commit(writer, Batch(event_log=[entry(1), entry(2)]))
    change = UPSERTED
    with engine.connect() as connection, pytest.raises(DBAPIError, match="append-only"), connection.begin():
        connection.execute(text(change))
    with engine.connect() as connection:
        assert set(connection.execute(text("SELECT kind FROM audit")).scalars()) == {entry(1).kind}


@pytest.mark.promise("old-leader-fenced")
def test_superseded_controller_cannot_write(writer: DatabaseWriter, engine: Engine) -> None:
    second = DatabaseWriter(engine)
    second.take_over()
    with pytest.raises(LeadershipLost, match="another controller took the database over"):
        commit(writer, Batch(nodes={"n1": "late"}))
    commit(second, Batch(nodes={"n2": "on time"}))
    second.close()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT node FROM nodes")).scalars().all() == ["n2"]


def test_acknowledged_directives_are_deleted(writer: DatabaseWriter, engine: Engine) -> None:
    commit(writer, Batch(outbox=[OutboxRow(node=node, seq=seq, body="{}") for node in "ab" for seq in (1, 2, 3)]))
    commit(writer, Batch(acknowledged={"a": 2}))
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT node, seq FROM outbox ORDER BY node, seq")).all()
    assert rows == [("a", 3), ("b", 1), ("b", 2), ("b", 3)]


def test_events_are_found_by_id_trace_node_and_job(writer: DatabaseWriter, engine: Engine) -> None:
    rows = [entry(1, node="a", trace="t1"), entry(2, node="b", trace="t1", job="j"), entry(3, trace="t2", job="j")]
    commit(writer, Batch(event_log=rows))
    with engine.connect() as connection:
        assert history.events(connection, after=0, limit=9) == rows
        assert [row.id for row in history.events(connection, after=1, limit=1)] == [2]
        assert [row.id for row in history.events(connection, after=0, limit=2, newest=True)] == [2, 3]
        assert [row.id for row in history.events(connection, after=0, limit=9, trace="t1")] == [1, 2]
        assert [row.id for row in history.events(connection, after=0, limit=9, node="b")] == [2]
        assert [row.id for row in history.events(connection, after=0, limit=9, job="j", trace="t2")] == [3]


def test_interrupted_migration_leaves_no_table(database: str) -> None:
    engine = engine_of(parse_url(database))
    with engine.connect() as plain:
        connection = plain.execution_options(**FOR_WRITING)
        cut = connection.begin()
        upgrade(connection)
        cut.rollback()
    with engine.connect() as connection:
        assert inspect(connection).get_table_names() == []
    engine.dispose()
    open_database(database).dispose()


def test_schema_of_newer_release_is_refused(database: str) -> None:
    engine = open_database(database)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(ConfigurationError, match=r"schema 9999.*upgrade everstep"):
        open_database(database)


def test_empty_database_without_migration_is_refused(database: str) -> None:
    with pytest.raises(ConfigurationError, match=r"schema none.*--migrate"):
        open_database(database, migrate=False)
    open_database(database).dispose()
    open_database(database, migrate=False).dispose()


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("nonsense", "use sqlite:///PATH or postgresql"),
        ("mysql://u:hidden@h/d", "kind 'mysql' are not supported"),
        ("sqlite://", "is lost at a restart"),
        ("sqlite:////nonexistent/dir/x.db", "mkdir -p /nonexistent/dir"),
        ("postgresql://u:hidden@127.0.0.1:1/d", "nothing listens there: start PostgreSQL"),
        ("postgresql://u:hidden@host.invalid/d", "does not resolve"),
        ("postgresql:///d?host=/nonexistent", "nothing listens on that socket"),
    ],
)
def test_unreachable_database_is_explained_without_password(url: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as refused:
        open_database(url)
    assert "hidden" not in str(refused.value)


def test_postgresql_missing_database_or_rights_are_explained(postgres: str) -> None:
    missing = postgres.replace("everstep_", "absent_")
    with pytest.raises(ConfigurationError, match="no such database: `createdb"):
        open_database(missing)
    engine = open_database(postgres)
    with engine.begin() as connection:
        connection.execute(text("CREATE ROLE pauper LOGIN"))
        connection.execute(text("REVOKE ALL ON ALL TABLES IN SCHEMA public FROM PUBLIC"))
    engine.dispose()
    with pytest.raises(ConfigurationError, match="lacks a permission: `GRANT"):
        open_database(postgres.replace("postgres:@", "pauper@").replace("postgres@", "pauper@"))


def test_sqlite_file_in_another_encoding_is_shown() -> None:
    """With PYTHONUTF8=0 in the C locale, Python reads a name in UTF-8 as surrogates."""
    assert redacted_url(parse_url("sqlite:////tmp/\udcc3\udcb6.db")) == redacted_url(parse_url("sqlite:////tmp/ö.db"))


def test_sqlite_file_is_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "c.db"
    engine = open_database(f"sqlite:///{path}")
    writer = DatabaseWriter(engine)
    writer.take_over()
    assert {file.name: file.stat().st_mode & 0o077 for file in tmp_path.iterdir()} == {
        "c.db": 0,
        "c.db-wal": 0,
        "c.db-shm": 0,
    }
    writer.close()
    engine.dispose()


def test_sqlite_file_readable_by_others_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.db"
    open_database(f"sqlite:///{path}").dispose()
    assert not caplog.records
    path.chmod(0o644)
    open_database(f"sqlite:///{path}").dispose()
    assert "other users can read" in caplog.text
    assert path.stat().st_mode & 0o777 == 0o644


def test_full_disk_keeps_committed_data(tmp_path: Path) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'c.db'}")
    writer = DatabaseWriter(engine)
    writer.take_over()
    commit(writer, Batch(nodes={"n1": "kept"}))
    assert writer.connection is not None
    pages = writer.connection.exec_driver_sql("PRAGMA page_count").scalar()
    writer.connection.exec_driver_sql(f"PRAGMA max_page_count={pages}")
    writer.connection.rollback()
    with pytest.raises(DatabaseUnavailable, match="the disk is full: free some space"):
        commit(writer, Batch(nodes={"n1": "not yet", "n2": "x" * 200_000}))
    assert DatabaseWriter(engine).take_over().nodes == {"n1": "kept"}
    writer.close()
    engine.dispose()


def test_connection_cut_in_transaction_rolls_back(
    postgres: str,
) -> None:
    engine = open_database(postgres)
    writer = DatabaseWriter(engine)
    writer.take_over()

    def cut_off(connection: Connection) -> None:
        connection.execute(text("INSERT INTO nodes VALUES ('n1', 'x')"))
        writer.abort()
        connection.execute(text("SELECT 1"))

    with pytest.raises(DatabaseUnavailable) as away:
        writer.run(cut_off)
    assert not away.value.is_batch_queued
    assert writer.run(lambda connection: connection.execute(text("SELECT count(*) FROM nodes")).scalar()) == 0
    writer.close()
    engine.dispose()


def test_merged_batches_equal_single_batches(database: str, tmp_path: Path) -> None:
    batches = [
        Batch(
            nodes={"a": "1", "b": "1"},
            acknowledged_reports={("a", 1): 5},
            outbox=[OutboxRow(node="a", seq=1, body="{}")],
        ),
        Batch(fleet="f", nodes={"b": "2"}, event_log=[entry(1)], versions=by_place(version(1, verified=True))),
        Batch(
            acknowledged={"a": 1},
            acknowledged_reports={("a", 2): 1},
            versions=by_place(version(1)),
            event_log=[entry(2)],
        ),
    ]
    merged = Batch()
    for batch in batches:
        merged.merge(batch)
    assert [row.seq for row in merged.outbox] == []
    found = []
    for name, written in (("one by one", batches), ("merged", [merged])):
        url = database if name == "merged" else f"sqlite:///{tmp_path / 'other.db'}"
        engine = open_database(url)
        writer = DatabaseWriter(engine)
        writer.take_over()
        for batch in written:
            commit(writer, batch)
        writer.close()
        loaded = DatabaseWriter(engine).take_over()
        found.append(
            (
                loaded.nodes,
                loaded.fleet,
                loaded.acknowledged_reports,
                loaded.outbox,
                loaded.versions,
                loaded.newest_event,
            )
        )
        engine.dispose()
    assert found[0] == found[1]


MANY = 50


def _event(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "at": number if number % 3 else number + 0.5,
        "kind": "k",
        "node": f'n "{number}" \\ {{,}}',
        "job": "",
        "generation": None if number % 2 else number << 33,
        "trace": "NULL",
        "sentence": "ä %s %(id)s",
        "detail": "{}",
    }


def _versions(first: int, verified: float | None) -> list[dict[str, Any]]:
    return [
        {
            "job": "j",
            "generation": 1,
            "step": step,
            "committed_at": 1.5,
            "verified_at": verified,
            "bytes": 7,
            "ranks": 2,
        }
        for step in range(first, first + MANY)
    ]


def _play(connection: Connection) -> dict[str, list[Any]]:
    """The same of everything that is written in numbers: inserted, brought up to date, deleted."""
    numbers = range(1, MANY + 1)
    table_access.execute_many(connection, writer._INSERTS["event_log"], [_event(number) for number in numbers])
    upsert(connection, tables.versions, _versions(1, 2.5))
    upsert(connection, tables.versions, _versions(1 + MANY // 2, None))
    queued = [{"node": f"n{number % 5}", "seq": number, "body": "b"} for number in numbers]
    table_access.execute_many(connection, writer._INSERTS["outbox"], queued)
    pruned = [{"of": f"n{number}", "last": 20} for number in range(4)]
    table_access.execute_many(connection, writer._PRUNE_OUTBOX, pruned * 3)
    table_access.execute_many(connection, writer._DROP_OUTBOX, [{"of": "n4", "is": number} for number in numbers])
    return {
        table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
        for table in (tables.event_log, tables.versions, tables.outbox)
    }


def test_bulk_write_equals_single_statements(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    statements: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    with engine.connect() as connection:
        together = _play(connection)
        connection.rollback()
        assert any("unnest(" in text for text in statements) == (engine.dialect.name == "postgresql")
        monkeypatch.setattr(table_access, "MIN_ROWS_FOR_ARRAYS", 1 << 30)
        statements.clear()
        apart = _play(connection)
        connection.rollback()
    assert not any("unnest(" in text for text in statements)
    assert together == apart
    assert len(together["audit"]) == MANY
    assert {row[0] for row in together["outbox"]} == {"n0", "n1", "n2", "n3"}
    assert all(row[6] == 2.5 for row in together["versions"] if row[2] <= MANY)


def test_bulk_statement_covers_insert_and_delete() -> None:
    insert = table_access._with_arrays("INSERT INTO t (a, b) VALUES (%(a)s::VARCHAR, %(b)s) ON CONFLICT (a) DO NOTHING")
    assert insert is not None
    assert insert[0].endswith("unnest(%(a)s::VARCHAR[], %(b)s::DOUBLE PRECISION[]) ON CONFLICT (a) DO NOTHING")
    delete = table_access._with_arrays("DELETE FROM t WHERE t.a = %(of)s::VARCHAR")
    assert delete is not None
    assert delete[0] == 'DELETE FROM t USING unnest(%(of)s::VARCHAR[]) AS given("of") WHERE t.a = given."of"'


def test_other_statements_are_not_rewritten_as_bulk() -> None:
    assert table_access._with_arrays("UPDATE t SET a = %(a)s::VARCHAR WHERE b = %(b)s::VARCHAR") is None
    assert table_access._with_arrays("INSERT INTO t (a) SELECT %(a)s::VARCHAR WHERE NOT (EXISTS (SELECT 1))") is None
    assert table_access._with_arrays("INSERT INTO t (a, b) VALUES (%(a)s::VARCHAR, lower(%(b)s::VARCHAR))") is None


TABLES = {
    "nodes": tables.nodes.c.node,
    "standing": tables.active_findings.c.node,
    "verdicts": tables.verdicts.c.id,
    "outbox": tables.outbox.c.seq,
    "marks": tables.acknowledged_reports.c.through,
    "jobs": tables.jobs.c.job,
    "generations": tables.generations.c.number,
    "recoveries": tables.recoveries.c.generation,
    "versions": tables.versions.c.step,
}


def of_node(node: str, number: int) -> Batch:
    """Return rows for every table, distinguished by ``number``."""
    return Batch(
        nodes={node: "{}"},
        active_findings={(node, "key"): "{}"},
        verdicts=[VerdictRow(id=f"{node}-{number}", node=node, decision="evict", at=1.0, trace="t", doc="{}")],
        outbox=[OutboxRow(node=node, seq=number, body="{}")],
        acknowledged_reports={(node, number): number},
    )


def of_job(job: str, number: int) -> Batch:
    return Batch(
        jobs={job: "{}"},
        generations=[GenerationRow(job=job, number=number, reason="", trace="t", issued_at=1.0, doc="{}")],
        recoveries=[RecoveryRow(job=job, generation=number, doc="{}")],
        versions={(job, 1, number): VersionRow(job=job, generation=1, step=number, committed_at=1.0)},
    )


BOTH = [of_node("n1", 1), of_node("n2", 2), of_job("j1", 1), of_job("j2", 2)]
GONE = [Batch(forgotten_nodes={"n1": None}), Batch(forgotten_jobs={"j1": None})]
LEFT: dict[str, list[Any]] = {
    "nodes": ["n2"],
    "standing": ["n2"],
    "verdicts": ["n2-2"],
    "outbox": [2],
    "marks": [2],
    "jobs": ["j2"],
    "generations": [2],
    "recoveries": [2],
    "versions": [2],
}


def written(database: str, batches: list[Batch]) -> dict[str, list[Any]]:
    """Return the tables of a new database after these batches, each in a transaction of its own."""
    engine = open_database(database)
    writer = DatabaseWriter(engine)
    writer.take_over()
    for number, batch in enumerate(batches, start=1):
        batch.number = number
        writer.commit([batch])
    writer.close()
    with engine.connect() as connection:
        found = {name: list(connection.execute(select(of).order_by(of)).scalars()) for name, of in TABLES.items()}
    engine.dispose()
    return found


def test_forgetting_deletes_only_rows_of_the_named_node_or_job(
    database: str,
) -> None:
    assert written(database, [*BOTH, *GONE]) == LEFT
