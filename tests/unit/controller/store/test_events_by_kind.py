"""Events of a kind are found by an index, whatever their share of the log; a read that takes too long is broken off."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Connection, Engine, event, text

from everstep.errors import Unavailable
from everstep_controller.store import threads
from everstep_controller.store.database import open_database
from everstep_controller.store.reader import events
from everstep_controller.store.rows import Batch, EventLogRow
from everstep_controller.store.threads import DatabaseStore
from everstep_controller.store.writer import DatabaseWriter
from tests.support.plugins.example_counts import examples

KINDS = ("finding", "finding.cleared", "job", "job.ended", "operator.hold", "operator_", "credential.issued", "Job")
NODES = ("", "n1", "n2")


def rows(number: int) -> list[EventLogRow]:
    return [
        EventLogRow(id=at, at=float(at), kind=KINDS[at % len(KINDS)], sentence="s", node=NODES[at % len(NODES)])
        for at in range(1, number + 1)
    ]


@pytest.fixture
def engine(database: str) -> Iterator[Engine]:
    engine = open_database(database)
    writer = DatabaseWriter(engine)
    writer.take_over()
    writer.commit([Batch(number=1, event_log=rows(60))])
    writer.close()
    yield engine
    engine.dispose()


@settings(
    max_examples=examples(40),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    kinds=st.lists(
        st.sampled_from(["f", "finding.", "job", "operator.", "credential.", "operator_", "x", "%"]), max_size=3
    ),
    node=st.sampled_from(NODES),
    after=st.integers(0, 70),
    limit=st.integers(1, 20),
    newest=st.booleans(),
)
def test_event_filter_matches_full_scan(
    engine: Engine, kinds: list[str], node: str, after: int, limit: int, newest: bool
) -> None:
    with engine.connect() as connection:
        found = events(connection, after=after, limit=limit, node=node, kinds=tuple(kinds), newest=newest)
    wanted = [
        row
        for row in rows(60)
        if row.id > after
        and (not node or row.node == node)
        and (not kinds or any(row.kind.startswith(kind) for kind in kinds))
    ]
    assert [row.id for row in found] == [row.id for row in (wanted[-limit:] if newest else wanted[:limit])]


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("kinds", [("operator.", "credential."), ("job",)])
def test_event_filter_reads_no_full_table(tmp_path: Path, kinds: tuple[str, ...], newest: bool) -> None:
    engine = open_database(f"sqlite:///{tmp_path / 'c.db'}")
    asked: list[tuple[str, tuple[Any, ...]]] = []

    def note(_connection: Connection, _cursor: object, statement: str, parameters: tuple[Any, ...], *_: object) -> None:
        asked.append((statement, parameters))

    event.listen(engine, "before_cursor_execute", note)
    with engine.connect() as connection:
        events(connection, after=0, limit=10, kinds=kinds, newest=newest)
    event.remove(engine, "before_cursor_execute", note)
    queries = [query for query in asked if "audit" in query[0]]
    assert queries
    with engine.connect() as connection:
        for statement, parameters in queries:
            plan = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            reads = [step.detail for step in plan if re.match(r"(SCAN|SEARCH) audit", step.detail)]
            assert reads
            assert [read for read in reads if not re.search(r"audit_by_kind|\(rowid=\?\)", read)] == []
    engine.dispose()


SLOW = {
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
    "postgresql": "SELECT pg_sleep(600)",
}


def test_slow_read_is_aborted_without_blocking_others(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "READ_TIMEOUT_S", 0.3)
    monkeypatch.setattr(threads, "ABORT_TIMEOUT_S", 30.0)

    async def story() -> int:
        engine = open_database(database)
        store = DatabaseStore(engine)
        slow = text(SLOW[engine.dialect.name])
        with pytest.raises(Unavailable):
            await store.query(lambda connection: connection.execute(slow).scalar())
        monkeypatch.setattr(threads, "READ_TIMEOUT_S", 30.0)
        value: int = await store.query(lambda connection: connection.execute(text("SELECT 1")).scalar_one())
        await asyncio.to_thread(store.close)
        return value

    assert asyncio.run(story()) == 1


@settings(
    max_examples=examples(30),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(since=st.none() | st.integers(-1, 62), until=st.none() | st.integers(-1, 62), newest=st.booleans())
def test_events_are_found_by_time_range(engine: Engine, since: int | None, until: int | None, newest: bool) -> None:
    with engine.connect() as connection:
        found = events(connection, after=0, limit=7, since=since, until=until, newest=newest)
    fit = [row.id for row in rows(60) if (since is None or row.at >= since) and (until is None or row.at < until)]
    assert [row.id for row in found] == (fit[-7:] if newest else fit[:7])


def test_empty_log_has_no_events_in_any_time_range(database: str) -> None:
    engine = open_database(database)
    writer = DatabaseWriter(engine)
    writer.take_over()
    with engine.connect() as connection:
        assert events(connection, after=0, limit=7, since=1.0, until=2.0) == []
    writer.close()
    engine.dispose()
