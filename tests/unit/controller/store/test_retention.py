from __future__ import annotations

import asyncio
import re

import msgspec
import pytest
from sqlalchemy import Connection, Engine, event, func, insert, select, text
from sqlalchemy.exc import DBAPIError

from everstep_controller.api.stream import joined_frames
from everstep_controller.store import retention, tables
from everstep_controller.store import retention as retention_module
from everstep_controller.store.database import open_database
from everstep_controller.store.database_errors import DatabaseUnavailable
from everstep_controller.store.reader import events_after
from everstep_controller.store.retention import DeleteBatch, RetentionLimits, find_deletions, prune_events
from everstep_controller.store.rows import Batch, EventLogRow, GenerationRow, RecoveryRow, VerdictRow, VersionRow
from everstep_controller.store.threads import DatabaseStore
from everstep_controller.store.writer import DatabaseWriter

EVERYTHING = RetentionLimits(since=0.0, events=1_000_000, orders=1_000_000, rows=1_000_000, generations=1_000_000)


def keep(**changed: float) -> RetentionLimits:
    return msgspec.structs.replace(EVERYTHING, **changed)


def entries(*numbers: int) -> list[EventLogRow]:
    return [EventLogRow(id=number, at=float(number), kind="test", sentence="s") for number in numbers]


def ids(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(select(tables.event_log.c.id).order_by(tables.event_log.c.id)).scalars())


def bites(engine: Engine, limits: RetentionLimits) -> list[DeleteBatch]:
    """The first one of each kind, and of each job."""
    with engine.connect() as connection:
        return [bite for chore in find_deletions(connection, limits) if (bite := chore(connection)) is not None]


def pruned(writer: DatabaseWriter, engine: Engine, limits: RetentionLimits) -> int:
    """Deletes one bite of everything; how many rows the largest had."""
    taken = writer.run(lambda connection: prune_events(connection, limits))
    for bite in bites(engine, limits):
        writer.run(bite.execute)
        taken = max(taken, len(bite.keys))
    return taken


@pytest.mark.promise("event-log-append-only")
@pytest.mark.parametrize("limits", [keep(since=7.0), keep(events=4)], ids=["by age", "by number"])
def test_retention_deletes_old_events_of_append_only_log(
    writer: DatabaseWriter, engine: Engine, limits: RetentionLimits
) -> None:
    writer.commit([Batch(number=1, event_log=entries(*range(1, 11)))])
    pruned(writer, engine, limits)
    assert ids(engine) == [7, 8, 9, 10]
    with engine.connect() as connection, pytest.raises(DBAPIError, match="append-only"), connection.begin():
        connection.execute(text("DELETE FROM audit"))
    writer.commit([Batch(number=2, event_log=entries(11))])
    assert ids(engine) == [7, 8, 9, 10, 11]


def flooded(orders: int, flood: int, *, kind: str = "operator.hold") -> list[EventLogRow]:
    """Lines of people, followed by those of an agent that has gone wild."""
    return [
        EventLogRow(id=number, at=float(number), kind=kind if number <= orders else "finding", sentence="s")
        for number in range(1, orders + flood + 1)
    ]


@pytest.mark.promise("event-log-orders")
@pytest.mark.parametrize("kind", ["operator.hold", "credential.revoked"])
@pytest.mark.parametrize("limits", [keep(since=1e12), keep(events=5)], ids=["by age", "by number"])
def test_retention_keeps_operator_events_in_an_event_flood(
    writer: DatabaseWriter, engine: Engine, limits: RetentionLimits, kind: str
) -> None:
    writer.commit([Batch(number=1, event_log=flooded(4, 40, kind=kind))])
    while pruned(writer, engine, limits):
        pass
    left = ids(engine)
    assert left[:4] == [1, 2, 3, 4]
    assert len(left) == (5 if limits.since else 9)
    writer.commit([Batch(number=2, event_log=entries(45))])
    assert pruned(writer, engine, limits) == 1


@pytest.mark.promise("event-log-orders")
def test_retention_limits_operator_events_separately(
    writer: DatabaseWriter, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "DELETE_BATCH_ROWS", 10)
    writer.commit([Batch(number=1, event_log=flooded(30, 3))])
    assert [pruned(writer, engine, keep(orders=5)) for _ in range(4)] == [10, 10, 5, 0]
    assert ids(engine) == [*range(26, 34)]


@pytest.mark.promise("event-log-orders")
def test_operator_events_are_not_deletable_by_event_mark(writer: DatabaseWriter, engine: Engine) -> None:
    writer.commit([Batch(number=1, event_log=flooded(2, 4))])
    pruned(writer, engine, keep(since=1e12))
    assert ids(engine) == [1, 2, 6]
    with engine.connect() as connection, pytest.raises(DBAPIError, match="append-only"), connection.begin():
        connection.execute(text("DELETE FROM audit WHERE id = 1"))


def test_stream_reports_every_gap_between_operator_events(writer: DatabaseWriter, engine: Engine) -> None:
    kinds = ["x", "operator.hold", "x", "x", "operator.evict", "x", "x", "x"]
    rows = [EventLogRow(id=number, at=1.0, kind=kind, sentence="s") for number, kind in enumerate(kinds, start=1)]
    writer.commit([Batch(number=1, event_log=rows)])
    pruned(writer, engine, keep(events=2))
    with engine.connect() as connection:
        found = events_after(connection, 0, 10)
    frames = b"".join(joined_frames(found.rows, 0, found.deleted_through))
    assert re.findall(rb"id: (\d+)\nevent: (\w+)", frames) == [
        (b"1", b"gap"),
        (b"2", b"entry"),
        (b"4", b"gap"),
        (b"5", b"entry"),
        (b"6", b"gap"),
        (b"7", b"entry"),
        (b"8", b"entry"),
    ]


def test_retention_keeps_the_newest_event(writer: DatabaseWriter, engine: Engine) -> None:
    writer.commit([Batch(number=1, event_log=entries(1, 2, 3))])
    pruned(writer, engine, keep(since=1e12, events=0))
    assert ids(engine) == [3]
    writer.close()
    loaded = DatabaseWriter(engine).take_over()
    assert (loaded.newest_event, loaded.newest_at) == (3, 3.0)


@pytest.mark.promise("retention")
@pytest.mark.parametrize(
    ("limits", "left"),
    [(keep(since=5.0), ["a9", "b1"]), (keep(rows=3), ["a2", "a9", "b1"]), (keep(rows=2, since=1.5), ["a9", "b1"])],
)
def test_retention_keeps_newest_verdict_of_each_node(
    writer: DatabaseWriter, engine: Engine, limits: RetentionLimits, left: list[str]
) -> None:
    rows = [
        VerdictRow(id=f"{node}-{at}", node=node, decision="evict", at=float(at), trace="", doc=f"{node}{at}")
        for node, at in (("a", 1), ("a", 2), ("a", 9), ("b", 1))
    ]
    writer.commit([Batch(number=1, verdicts=rows)])
    while pruned(writer, engine, limits):
        pass
    with engine.connect() as connection:
        assert connection.execute(text("SELECT doc FROM verdicts ORDER BY doc")).scalars().all() == left


def test_retention_limits_generations_and_recoveries_per_job(writer: DatabaseWriter, engine: Engine) -> None:
    generations = [
        GenerationRow(job=job, number=number, reason="formed", trace="", issued_at=1.0, doc="{}")
        for job in ("j", "k")
        for number in range(1, 6 if job == "j" else 3)
    ]
    recoveries = [RecoveryRow(job="j", generation=number, doc=str(number)) for number in range(1, 6)]
    batch = Batch(number=1, jobs={"j": "{}", "k": "{}"}, generations=generations, recoveries=recoveries)
    writer.commit([batch])
    pruned(writer, engine, keep(generations=2))
    with engine.connect() as connection:
        left = connection.execute(text("SELECT job, number FROM generations ORDER BY job, number")).all()
        came = connection.execute(text("SELECT generation FROM recoveries ORDER BY generation")).scalars().all()
    assert left == [("j", 4), ("j", 5), ("k", 1), ("k", 2)]
    assert came == [4, 5]


def test_retention_keeps_newest_and_newest_verified_versions(
    writer: DatabaseWriter, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "MAX_VERSIONS_PER_JOB", 3)
    rows = [
        VersionRow(job="j", generation=1, step=step, committed_at=1.0, verified_at=2.0 if step < 3 else None)
        for step in range(10)
    ]
    writer.commit([Batch(number=1, jobs={"j": "{}"}, versions={("j", 1, row.step): row for row in rows})])
    pruned(writer, engine, EVERYTHING)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT step FROM versions ORDER BY step")).scalars().all() == [2, 7, 8, 9]


@pytest.mark.promise("retention")
@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (keep(since=5.0), ["k9.0", "kNone"]),
        (keep(rows=3), ["k3.0", "k9.0", "kNone"]),
        (keep(rows=1), ["kNone"]),
        (keep(rows=2, since=2.0), ["k9.0", "kNone"]),
        (keep(rows=0, since=1e9), ["kNone"]),
    ],
)
def test_retention_keeps_unfinished_findings_and_remediations(
    writer: DatabaseWriter, engine: Engine, limits: RetentionLimits, left: list[str]
) -> None:
    def raised(connection: Connection) -> None:
        for ended in (None, 1.0, 3.0, 9.0):
            name = f"k{ended}"
            row = {"node": "n", "key": name, "kind": "x", "at": 0.5, "cleared_at": ended, "doc": "{}"}
            connection.execute(insert(tables.findings).values(**row))
            asked = {"id": name, "node": "n", "kind": "x", "state": "x", "requested_at": ended or 0.5, "detail": ""}
            connection.execute(insert(tables.remediations).values(**asked, ended_at=ended, doc="{}"))

    writer.run(raised)
    while pruned(writer, engine, limits):
        pass
    with engine.connect() as connection:
        assert sorted(connection.execute(select(tables.findings.c.key)).scalars()) == left
        assert sorted(connection.execute(select(tables.remediations.c.id)).scalars()) == left


@pytest.mark.promise("retention")
@pytest.mark.parametrize("kind", ["verdicts", "findings"])
def test_retention_deletes_excess_rows_in_batches(
    writer: DatabaseWriter, engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(retention, "DELETE_BATCH_ROWS", 10)
    table = tables.metadata.tables[kind]

    def flood(connection: Connection) -> None:
        for at in range(1, 36):
            verdict = {"id": f"a-{at:02}", "decision": "evict", "trace": ""}
            more = verdict if kind == "verdicts" else {"key": f"k{at}", "kind": "x", "cleared_at": float(at)}
            connection.execute(insert(table).values(node="a", at=float(at), doc="{}", **more))

    writer.run(flood)
    assert [pruned(writer, engine, keep(rows=5)) for _ in range(4)] == [10, 10, 10, 0]
    with engine.connect() as connection:
        assert sorted(connection.execute(select(table.c.at)).scalars()) == [31.0, 32.0, 33.0, 34.0, 35.0]


def test_retention_deletes_one_job_per_transaction_by_key(
    database: str, engine: Engine, writer: DatabaseWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of jobs delays no decision, because the writing thread receives primary keys."""
    jobs = [f"j{number}" for number in range(112)]
    generations = [
        GenerationRow(job=job, number=number, reason="formed", trace="", issued_at=1.0, doc="{}")
        for job in jobs
        for number in range(1, 5 if job < "j11" else 3)
    ]
    writer.commit([Batch(number=1, jobs=dict.fromkeys(jobs, "{}"), generations=generations, event_log=entries(1, 2))])
    monkeypatch.setattr(retention_module, "BATCH_PAUSE_S", 0.0)

    async def body() -> list[list[str]]:
        own = open_database(database)
        store = DatabaseStore(own)
        await store.take_over()
        written: list[list[str]] = []

        def note(connection: Connection, _cursor: object, statement: str, parameters: object, *_: object) -> None:
            if not connection.get_execution_options().get("everstep_write"):
                return
            if "FROM meta" in statement and " IN " in statement:  # the fence, which every transaction begins with
                written.append([])
            elif not statement.startswith("BEGIN"):
                written[-1].append(f"{statement} {parameters}")

        event.listen(own, "before_cursor_execute", note)
        task = asyncio.create_task(retention_module.run_retention(store, lambda: keep(generations=2), first_s=0.0))
        left = select(func.count()).select_from(tables.generations)
        async with asyncio.timeout(60):
            while await store.query(lambda connection: connection.execute(left).scalar_one()) > 2 * len(jobs):
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        store.close()
        return written

    events, *written = asyncio.run(body())
    crowded = [job for job in jobs if job < "j11"]
    assert len(events) <= 3
    assert len(written) == len(crowded)
    for (statement,), job in zip(written, sorted(crowded), strict=True):
        assert statement.startswith("DELETE FROM generations")
        assert {other for other in crowded if f"'{other}'" in statement} == {job}


def test_retention_task_continues_after_outage(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention_module, "ROUND_S", 0.0)

    async def body() -> None:
        store = DatabaseStore(open_database(database))
        await store.take_over()
        await store.commit(Batch(event_log=entries(*range(1, 11))))
        write, tries = store.write, 0

        async def failing_first(change: object) -> object:
            nonlocal tries
            tries += 1
            if tries == 1:
                raise DatabaseUnavailable("the disk is full")
            return await write(change)  # type: ignore[arg-type]

        monkeypatch.setattr(store, "write", failing_first)
        task = asyncio.create_task(retention_module.run_retention(store, lambda: keep(events=4), first_s=0.0))
        async with asyncio.timeout(60):
            count = text("SELECT count(*) FROM audit")
            while await store.query(lambda connection: connection.execute(count).scalar_one()) > 4:
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        store.close()

    asyncio.run(body())
