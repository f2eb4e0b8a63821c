"""What stands, and what is old enough to go, is found among a million findings without reading them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from everstep_controller.store import reader, retention, tables
from everstep_controller.store.database import open_database
from sqlalchemy import Connection, event

KEEP = retention.RetentionLimits(since=1.0, events=10, orders=10, rows=10, generations=10)


def _page(kind: str) -> Callable[[Connection], Any]:
    return lambda connection: reader.list_page(
        connection, reader.FINDINGS, "", 100, is_null=("cleared_at", True), kind=kind
    )


@pytest.mark.parametrize(
    ("look", "index"),
    [
        (_page(""), "findings_active"),
        (_page("gpu.xid"), "findings_active_by_kind"),
        (lambda connection: retention._ended(connection, tables.findings, "cleared_at", "id", KEEP), "findings_by_end"),
    ],
    ids=["active", "active of a kind", "ended long ago"],
)
def test_findings_queries_use_an_index(tmp_path: Path, look: Callable[[Connection], Any], index: str) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'c.db'}")
    asked: list[tuple[str, Any]] = []

    def note(_connection: Connection, _cursor: object, statement: str, parameters: object, *_: object) -> None:
        asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    with engine.connect() as connection:
        look(connection)
        event.remove(engine, "before_cursor_execute", note)
        statement, parameters = next(one for one in asked if "findings" in one[0])
        plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
    engine.dispose()
    reads = [step.detail for step in plan if "findings" in step.detail]
    assert reads
    assert [read for read in reads if not re.search(rf"INDEX {index}\b", read)] == []
