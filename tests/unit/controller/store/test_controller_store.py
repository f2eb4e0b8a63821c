from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec
import pytest
from everstep_controller.store import reader as history
from everstep_controller.store import table_access
from everstep_controller.store.database import FOR_WRITING, engine_of, open_database, parse_url, upgrade
from everstep_controller.store.database_errors import DatabaseUnavailable, LeadershipLost
from everstep_controller.store.rows import (
    AlertRow,
    AuditRow,
    Batch,
    CredentialRow,
    FindingRow,
    GenerationRow,
    OutboxRow,
    RecoveryRow,
    RemediationRow,
    RemediationState,
    VerdictRow,
    VersionRow,
)
from everstep_controller.store.writer import DatabaseWriter
from sqlalchemy import Connection, Engine, inspect, text
from sqlalchemy.exc import DBAPIError, IntegrityError

from everstep.errors import ConfigurationError


def commit(writer: DatabaseWriter, batch: Batch) -> None:
    """Writes it as the next one."""
    with writer._engine.connect() as connection:
        newest = connection.execute(text("SELECT value FROM meta WHERE key = 'batch'")).scalar_one()
    batch.number = newest + 1
    writer.commit([batch])


def audit(number: int, **fields: str) -> AuditRow:
    return AuditRow(id=number, at=float(number), kind="test", sentence=f"event {number}", **fields)  # type: ignore[arg-type]


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


def test_findings_batch_equals_single_writes(engine: Engine, writer: DatabaseWriter) -> None:
    draw, expected, standing = Random(7), [], {}
    for number in range(12):
        rows = []
        for at in range(40 * number, 40 * number + 40):
            node, key = draw.choice("ab"), draw.choice("xyz")
            doc = "" if draw.random() < 0.3 else f"{at}"
            rows.append(FindingRow(node=node, key=key, kind=key, at=float(at), doc=doc))
            if not doc:
                if (stood := standing.pop((node, key), None)) is not None:
                    stood["cleared_at"] = float(at)
            elif (node, key) in standing:
                standing[node, key]["doc"] = doc
            else:
                standing[node, key] = {"node": node, "key": key, "at": float(at), "cleared_at": None, "doc": doc}
                expected.append(standing[node, key])
        commit(writer, Batch(findings=rows))
    with engine.connect() as connection:
        found = connection.execute(text("SELECT node, key, at, cleared_at, doc FROM findings ORDER BY at")).mappings()
        assert [dict(row) for row in found] == expected
    assert len(expected) > 100


def test_superseded_directives_are_deleted(engine: Engine, writer: DatabaseWriter) -> None:
    rows = [OutboxRow(node=node, seq=seq, body="{}") for node in ("n1", "n2") for seq in (1, 2, 3)]
    commit(writer, Batch(outbox=rows))
    commit(writer, Batch(superseded=[("n1", 2), ("n2", 1)]))
    left = [(row.node, row.seq) for row in DatabaseWriter(engine).take_over().outbox]
    assert left == [("n1", 1), ("n1", 3), ("n2", 2), ("n2", 3)]


def test_committed_state_is_loaded_by_next_controller(engine: Engine, writer: DatabaseWriter) -> None:
    commit(
        writer,
        Batch(
            fleet='{"probes":3}',
            nodes={"n1": '{"node":"n1"}', "n2": '{"node":"n2"}'},
            jobs={"j": '{"job":"j"}'},
            audit=[audit(1), audit(2)],
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
    assert (loaded.newest_audit, loaded.newest_at) == (2, 2.0)
    assert {row.step for row in loaded.versions} == {4, 5}


def test_documents_replace_previous_documents(writer: DatabaseWriter, engine: Engine) -> None:
    commit(writer, Batch(nodes={"n1": "1"}, fleet="a"))
    commit(writer, Batch(nodes={"n1": "2"}, fleet="b"))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT node, doc FROM nodes")).all() == [("n1", "2")]
        assert connection.execute(text("SELECT doc FROM fleet")).scalars().all() == ["b"]


@pytest.mark.promise("generations-increase")
def test_duplicate_generation_number_rolls_back_the_batch(writer: DatabaseWriter, engine: Engine) -> None:
    commit(writer, Batch(generations=[generation(1)]))
    with pytest.raises(IntegrityError):
        commit(writer, Batch(nodes={"n1": "x"}, audit=[audit(1)], generations=[generation(1)]))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT count(*) FROM nodes")).scalar() == 0
        assert connection.execute(text("SELECT count(*) FROM audit")).scalar() == 0


@pytest.mark.promise("audit-append-only")
@pytest.mark.parametrize("change", ["UPDATE audit SET sentence = 'nothing happened'", "DELETE FROM audit"])
def test_audit_log_is_append_only(writer: DatabaseWriter, engine: Engine, change: str) -> None:
    commit(writer, Batch(audit=[audit(1)]))
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


@pytest.mark.promise("audit-append-only")
@pytest.mark.parametrize("recursive", [False, True], ids=["", "recursive triggers"])
@pytest.mark.parametrize("change", [*REPLACED, UPSERTED])
def test_audit_log_refuses_replacement_in_sqlite(tmp_path: Path, change: str, recursive: bool) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'controller.db'}")
    writer = DatabaseWriter(engine)
    writer.take_over()
    commit(writer, Batch(audit=[audit(1), audit(2)]))
    writer.close()
    with engine.connect() as connection:
        connection.execute(text(f"PRAGMA recursive_triggers = {int(recursive)}"))
        connection.rollback()
        with pytest.raises(DBAPIError, match="append-only"), connection.begin():
            connection.execute(text(change))
        assert set(connection.execute(text("SELECT kind FROM audit")).scalars()) == {audit(1).kind}
    engine.dispose()


@pytest.mark.promise("audit-append-only")
def test_audit_log_refuses_upserts(writer: DatabaseWriter, engine: Engine) -> None:
    commit(writer, Batch(audit=[audit(1), audit(2)]))
    change = UPSERTED
    with engine.connect() as connection, pytest.raises(DBAPIError, match="append-only"), connection.begin():
        connection.execute(text(change))
    with engine.connect() as connection:
        assert set(connection.execute(text("SELECT kind FROM audit")).scalars()) == {audit(1).kind}


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


def test_report_marks_of_earlier_incarnations_are_deleted(writer: DatabaseWriter, engine: Engine) -> None:
    commit(writer, Batch(acknowledged_reports={("n1", 1): 50, ("n2", 1): 5}))
    commit(writer, Batch(acknowledged_reports={("n1", 2): 3}))
    with engine.connect() as connection:
        rows = connection.execute(
            text("SELECT node, incarnation, through FROM acknowledged_reports ORDER BY node")
        ).all()
    assert rows == [("n1", 2, 3), ("n2", 1, 5)]


def test_verification_is_added_to_committed_version(writer: DatabaseWriter, engine: Engine) -> None:
    commit(writer, Batch(versions=by_place(version(1))))
    for verified in (True, False):
        commit(writer, Batch(versions=by_place(version(1, verified=verified))))
        with engine.connect() as connection:
            assert history.newest_versions(connection, "j", 9) == [version(1, verified=True)]


def test_credential_is_replaced_as_a_whole(writer: DatabaseWriter, engine: Engine) -> None:
    row = CredentialRow(id="c", role="agent", subject="n1", hash="h", created_at=1.0, created_by="a", expires_at=9.0)
    for kept in (row, msgspec.structs.replace(row, expires_at=None, uses_left=2)):
        commit(writer, Batch(credentials={"c": kept}))
        assert DatabaseWriter(engine).take_over().credentials == [kept]
        writer.take_over()


def test_events_are_found_by_id_trace_node_and_job(writer: DatabaseWriter, engine: Engine) -> None:
    rows = [audit(1, node="a", trace="t1"), audit(2, node="b", trace="t1", job="j"), audit(3, trace="t2", job="j")]
    commit(writer, Batch(audit=rows))
    with engine.connect() as connection:
        assert history.events(connection, after=0, limit=9) == rows
        assert [row.id for row in history.events(connection, after=1, limit=1)] == [2]
        assert [row.id for row in history.events(connection, after=0, limit=2, newest=True)] == [2, 3]
        assert [row.id for row in history.events(connection, after=0, limit=9, trace="t1")] == [1, 2]
        assert [row.id for row in history.events(connection, after=0, limit=9, node="b")] == [2]
        assert [row.id for row in history.events(connection, after=0, limit=9, job="j", trace="t2")] == [3]


def test_verdicts_recoveries_and_generations_are_read_back(writer: DatabaseWriter, engine: Engine) -> None:
    verdicts = [
        VerdictRow(id=f"n1-{i}", node="n1", decision="evict", at=float(i), trace="t", doc=f'"{i}"') for i in (1, 2)
    ]
    recoveries = [RecoveryRow(job="j", generation=i, doc=f'"r{i}"') for i in (1, 2, 3)]
    generations = [generation(1), generation(2), generation(3)]
    commit(writer, Batch(verdicts=verdicts, recoveries=recoveries, generations=generations))
    with engine.connect() as connection:
        assert history.find_verdict(connection, "n1-2") == '"2"'
        assert history.find_verdict(connection, "n9-1") is None
        assert history.newest_verdicts(connection, "n1", 9) == ['"2"', '"1"']
        assert history.newest_recoveries(connection, "j", 2) == ['"r2"', '"r3"']
        rows, _ = history.list_page(connection, history.GENERATIONS, "", 2, job="j")
    assert [row["number"] for row in rows] == [3, 2]


def test_reopening_keeps_stored_data(database: str) -> None:
    for round_ in range(2):
        engine = open_database(database)
        writer = DatabaseWriter(engine)
        loaded = writer.take_over()
        commit(writer, Batch(nodes={f"n{round_}": "x"}))
        writer.close()
        engine.dispose()
    assert list(loaded.nodes) == ["n0"]


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


def test_batch_with_unknown_outcome_is_applied_once(writer: DatabaseWriter, engine: Engine) -> None:
    first, second = Batch(number=1, audit=[audit(1)]), Batch(number=2, audit=[audit(2)])
    writer.commit([first])
    writer.commit([first])
    writer.commit([first, second])
    with engine.connect() as connection:
        assert [row.id for row in history.events(connection, after=0, limit=9)] == [1, 2]
    writer.close()
    assert DatabaseWriter(engine).take_over().batch == 2


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
        Batch(fleet="f", nodes={"b": "2"}, audit=[audit(1)], versions=by_place(version(1, verified=True))),
        Batch(
            acknowledged={"a": 1}, acknowledged_reports={("a", 2): 1}, versions=by_place(version(1)), audit=[audit(2)]
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
                loaded.newest_audit,
            )
        )
        engine.dispose()
    assert found[0] == found[1]


def test_alerts_are_stored_until_resolved(writer: DatabaseWriter, engine: Engine) -> None:
    first, second = AlertRow(fingerprint="a", doc="1"), AlertRow(fingerprint="b", doc="2")
    writer.run(lambda connection: table_access.write_alerts(connection, [first, second], []))
    writer.run(
        lambda connection: table_access.write_alerts(connection, [AlertRow(fingerprint="b", doc="3")], ["a", "c"])
    )
    writer.close()
    assert DatabaseWriter(engine).take_over().alerts == [AlertRow(fingerprint="b", doc="3")]
