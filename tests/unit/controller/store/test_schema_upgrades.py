"""A database that an older release left, with data in it, is brought up to date and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from everstep_controller.store.database import engine_of, head, open_database, parse_url, upgrade, writing
from everstep_controller.store.reader import Reader
from everstep_controller.store.rows import AuditRow, Batch
from everstep_controller.store.tables import HEAD
from everstep_controller.store.writer import Writer
from sqlalchemy import Engine, text
from sqlalchemy.exc import DBAPIError

from tests.support.old_schemas import ROWS_0001, released_database

DOCUMENTS = (("generations", "doc"), ("jobs", "doc"), ("outbox ORDER BY seq", "body"))


@pytest.fixture
def left_by_0001(database: str) -> str:
    """A database at the first revision, with a row or more in every table it had."""
    released_database(database, "0001", ROWS_0001)
    return database


@pytest.fixture
def upgraded(left_by_0001: str) -> Iterator[Engine]:
    engine = open_database(left_by_0001)
    yield engine
    engine.dispose()


def test_every_row_of_the_first_release_is_there_after_the_upgrade(upgraded: Engine) -> None:
    with upgraded.connect() as connection:
        for table, rows in ROWS_0001.items():
            columns = ", ".join(rows[0])
            keep = " WHERE key = 'epoch'" if table == "meta" else ""
            found = connection.execute(text(f"SELECT {columns} FROM {table}{keep}")).mappings().all()
            assert [dict(row) for row in found] == rows, table


def test_a_controller_goes_on_from_what_the_first_release_left(upgraded: Engine) -> None:
    writer = Writer(upgraded)
    loaded = writer.take_over()
    assert loaded.epoch == 8
    assert loaded.newest_audit == 2
    writer.commit([Batch(number=1, audit=[AuditRow(id=3, at=3.0, kind="test", sentence="after the upgrade")])])
    writer.close()
    assert [row.id for row in Reader(upgraded).events(after=0, limit=9)] == [1, 2, 3]


def test_the_audit_log_stays_append_only_through_the_upgrade(upgraded: Engine) -> None:
    for change in ("UPDATE audit SET sentence = 'x'", "DELETE FROM audit WHERE id = 1"):
        with upgraded.connect() as connection, pytest.raises(DBAPIError, match="append-only"), connection.begin():
            connection.execute(text(change))


def test_findings_in_the_documents_of_the_second_release_are_rows_after_the_upgrade(database: str) -> None:
    finding = {"kind": "gpu_xid", "subject": "GPU-0", "severity": "warning", "message": "Xid 31"}
    sick = {"node": "n1", "incarnation": 5, "vault": "", "findings": {"gpu_xid/GPU-0": finding}, "labels": {"a": "b"}}
    nodes = [{"node": node, "doc": json.dumps(doc)} for node, doc in (("n1", sick), ("n2", {"node": "n2"}))]
    released_database(database, "0002", {"nodes": nodes})
    engine = open_database(database)
    writer = Writer(engine)
    loaded = writer.take_over()
    writer.close()
    engine.dispose()
    assert {place: json.loads(doc) for place, doc in loaded.standing.items()} == {("n1", "gpu_xid/GPU-0"): finding}
    del sick["findings"]
    assert {node: json.loads(doc) for node, doc in loaded.nodes.items()} == {"n1": sick, "n2": {"node": "n2"}}


def test_rosters_of_the_second_release_are_seats_after_the_upgrade(database: str) -> None:
    roster = [{"rank": rank, "node": f"n{2 - rank // 2}", "local_rank": rank % 2} for rank in range(4)]
    old = {"job": "j", "number": 3, "roster": roster}
    directive = {"type": "NewGeneration", "spec": old}
    row = {"job": "j", "number": 3, "reason": "formed", "trace": "t", "issued_at": 3.0, "doc": json.dumps(old)}
    bodies = (json.dumps(directive), "@j/3", '{"type":"VersionNotice"}')
    released_database(
        database,
        "0002",
        {
            "generations": [row],
            "jobs": [{"job": "j", "doc": json.dumps({"job": "j", "generation": old, "leaving": None})}],
            "outbox": [{"node": "n1", "seq": seq, "body": body} for seq, body in enumerate(bodies)],
        },
    )
    engine = open_database(database)
    with engine.connect() as connection:
        read = [connection.execute(text(f"SELECT {c} FROM {t}")).scalars().all() for t, c in DOCUMENTS]
    engine.dispose()
    new = {"job": "j", "number": 3, "seats": ["n2", "n1"]}
    (generation,), (job,), (inline, reference, other) = read
    assert json.loads(generation) == new
    assert json.loads(job) == {"job": "j", "generation": new, "leaving": None}
    assert json.loads(inline) == {"type": "NewGeneration", "spec": new}
    assert (reference, other) == bodies[1:]


def test_an_upgrade_that_is_repeated_changes_nothing(left_by_0001: str) -> None:
    for _ in range(2):
        engine = open_database(left_by_0001)
        with engine.connect() as connection:
            assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == HEAD == head()
            assert connection.execute(text("SELECT count(*) FROM lease")).scalar() == 1
        engine.dispose()


def test_an_upgrade_that_is_cut_off_leaves_the_older_schema_whole(left_by_0001: str) -> None:
    engine = engine_of(parse_url(left_by_0001))
    with engine.connect() as plain:
        connection = writing(plain)
        cut = connection.begin()
        upgrade(connection)
        cut.rollback()
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar() == "0001"
        with pytest.raises(DBAPIError):
            connection.execute(text("SELECT * FROM lease"))
    engine.dispose()
