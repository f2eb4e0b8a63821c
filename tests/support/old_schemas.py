"""Databases as older releases left them: made by the migrations up to a revision, filled with rows of that time."""

from __future__ import annotations

from typing import Any

from alembic import command
from everstep_controller.store.database import config, engine_of, parse_url, writing
from sqlalchemy import text

Rows = dict[str, list[dict[str, Any]]]

ROWS_0001: Rows = {
    "fleet": [{"id": 1, "doc": '{"breaker":"","evictions":[1.5],"probes":3}'}],
    "nodes": [{"node": "n1", "doc": '{"node":"n1"}'}, {"node": "n2", "doc": '{"node":"n2"}'}],
    "jobs": [{"job": "j", "doc": '{"job":"j"}'}],
    "generations": [
        {"job": "j", "number": n, "reason": "formed", "trace": "t", "issued_at": float(n), "doc": "{}"} for n in (1, 2)
    ],
    "versions": [
        {
            "job": "j",
            "generation": 1,
            "step": 5,
            "committed_at": 1.0,
            "verified_at": None,
            "bytes": 1 << 40,
            "ranks": 8,
        }
    ],
    "recoveries": [{"job": "j", "generation": 1, "doc": "{}"}],
    "verdicts": [{"id": "n1-1", "node": "n1", "decision": "evict", "at": 1.0, "trace": "t", "doc": "{}"}],
    "audit": [
        {
            "id": n,
            "at": float(n),
            "kind": "test",
            "node": "n1",
            "job": "",
            "generation": None,
            "trace": "t",
            "sentence": f"event {n}",
            "detail": "{}",
        }
        for n in (1, 2)
    ],
    "outbox": [{"node": "n1", "seq": 7_000_000_001, "body": "{}"}],
    "report_marks": [{"node": "n1", "incarnation": 1_700_000_000_000, "through": 12}],
    "poisoned_reports": [{"node": "n1", "incarnation": 1, "number": 3}],
    "meta": [{"key": "epoch", "value": 7}],
}
"""A row or more of every table that revision 0001 had."""


def released_database(database: str, revision: str, rows: Rows | str) -> None:
    """Makes the schema of ``revision`` in an empty database and fills it: ``rows``, or statements, one a line."""
    engine = engine_of(parse_url(database))
    with engine.connect() as plain:
        connection = writing(plain)
        with connection.begin():
            made = config()
            made.attributes["connection"] = connection
            command.upgrade(made, revision)
            for statement in rows.splitlines() if isinstance(rows, str) else ():
                connection.exec_driver_sql(statement)
            for table, values in rows.items() if isinstance(rows, dict) else ():
                connection.execute(text(f"DELETE FROM {table}") if table == "meta" else text("SELECT 1"))
                names = ", ".join(values[0])
                places = ", ".join(f":{name}" for name in values[0])
                connection.execute(text(f"INSERT INTO {table} ({names}) VALUES ({places})"), values)
    engine.dispose()
