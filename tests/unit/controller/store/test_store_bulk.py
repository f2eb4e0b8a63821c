"""Many rows by one statement with arrays leave in the database what as many statements leave."""

from __future__ import annotations

from typing import Any

import pytest
from everstep_controller.store import table_access, tables, writer
from everstep_controller.store.table_access import upsert
from sqlalchemy import Connection, Engine, event, select

MANY = 50


def _audit(number: int) -> dict[str, Any]:
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
    table_access.execute_many(connection, writer._INSERTS["audit"], [_audit(number) for number in numbers])
    upsert(connection, tables.versions, _versions(1, 2.5))
    upsert(connection, tables.versions, _versions(1 + MANY // 2, None))
    queued = [{"node": f"n{number % 5}", "seq": number, "body": "b"} for number in numbers]
    table_access.execute_many(connection, writer._INSERTS["outbox"], queued)
    pruned = [{"of": f"n{number}", "last": 20} for number in range(4)]
    table_access.execute_many(connection, writer._PRUNE_OUTBOX, pruned * 3)
    table_access.execute_many(connection, writer._DROP_OUTBOX, [{"of": "n4", "is": number} for number in numbers])
    return {
        table.name: [tuple(row) for row in connection.execute(select(table).order_by(*table.primary_key))]
        for table in (tables.audit, tables.versions, tables.outbox)
    }


def test_bulk_write_equals_single_statements(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    event.listen(engine, "before_cursor_execute", lambda *given: said.append(given[2]))
    with engine.connect() as connection:
        together = _play(connection)
        connection.rollback()
        assert any("unnest(" in text for text in said) == (engine.dialect.name == "postgresql")
        monkeypatch.setattr(table_access, "MIN_ROWS_FOR_ARRAYS", 1 << 30)
        said.clear()
        apart = _play(connection)
        connection.rollback()
    assert not any("unnest(" in text for text in said)
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
