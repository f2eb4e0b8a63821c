"""A machine's clock that is wrong when the controller starts, or is changed while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from sqlalchemy import Engine, text
from starlette.testclient import TestClient

from everstep.clock import ManualClock
from everstep.errors import ConfigurationError
from everstep.wire.v1 import operator as op
from everstep_controller.core.records import (
    Eviction,
    FleetRecord,
    MaintenanceWindow,
    NodeHealth,
    NodeHistory,
    NodeIdentity,
    NodeLiveness,
    NodeQuarantine,
    NodeRecord,
    NodeScheduling,
)
from everstep_controller.runtime.clock import (
    MAX_SLEWED_S,
    RECORD_INTERVAL_S,
    SLEW,
    SLEW_INTERVAL_S,
    ClockMonitor,
    SteadyTime,
    check_clock_at_start,
    clock_set_back_s,
)
from everstep_controller.runtime.startup_state import NO_RECORDS, KnownRecords, set_times_back
from everstep_controller.store import table_access
from everstep_controller.store.database import open_database
from everstep_controller.store.database_errors import DatabaseUnavailable
from everstep_controller.store.reader import NO_ROW_VERSIONS, events
from everstep_controller.store.rows import Batch, CredentialRow, EventLogRow, LoadedState
from everstep_controller.store.table_access import COPY_EPOCH_GAP, SET_BACK
from everstep_controller.store.writer import DatabaseWriter
from tests.support.fleet.controllers import VIEWER, AgentClient, InProcess, controller_process, get
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until

DAY = 86400.0
RIGHT = 1_700_000_000.0


def advances(steady: SteadyTime, clock: ManualClock, looks: int) -> Iterator[float]:
    """By how much ``steady`` advances between two looks."""
    for _ in range(looks):
        before = steady.now()
        steady.slew()
        assert steady.now() == before
        clock.advance(SLEW_INTERVAL_S)
        yield steady.now() - before


@pytest.mark.promise("clock-check")
@pytest.mark.parametrize("jump_s", [-75.0, 75.0, -MAX_SLEWED_S, MAX_SLEWED_S - 1])
def test_steady_time_returns_to_the_wall_clock(jump_s: float) -> None:
    clock = ManualClock(wall=RIGHT)
    steady = SteadyTime(clock)
    clock.jump_wall(jump_s)
    looks = int(abs(jump_s) / (SLEW * SLEW_INTERVAL_S)) + 2
    for advance in advances(steady, clock, looks):
        assert (1 - SLEW) * SLEW_INTERVAL_S - 1e-3 <= advance <= (1 + SLEW) * SLEW_INTERVAL_S + 1e-3
    assert abs(steady.ahead_s()) < 1e-3


def test_steady_time_ignores_a_clock_jumping_ahead() -> None:
    clock = ManualClock(wall=RIGHT)
    steady = SteadyTime(clock)
    clock.jump_wall(100 * DAY)
    assert list(advances(steady, clock, 8)) == pytest.approx([SLEW_INTERVAL_S] * 8)
    clock.jump_wall(-100 * DAY)
    assert steady.ahead_s() == pytest.approx(0.0)


def test_start_is_refused_with_clock_far_ahead() -> None:
    check_clock_at_start(RIGHT + 6.9 * DAY, RIGHT, 7.0)
    check_clock_at_start(RIGHT - 100 * DAY, RIGHT, 7.0)
    check_clock_at_start(RIGHT, 0.0, 7.0)
    check_clock_at_start(RIGHT + 100 * DAY, RIGHT, 0.0)
    with pytest.raises(ConfigurationError, match=r"100 days after.*start once with --trust-clock"):
        check_clock_at_start(RIGHT + 100 * DAY, RIGHT, 7.0)


def test_time_is_set_back_only_with_trust_clock() -> None:
    assert clock_set_back_s(RIGHT, RIGHT + DAY, trust_clock=False) == 0.0
    assert clock_set_back_s(RIGHT, RIGHT + DAY, trust_clock=True) == DAY
    assert clock_set_back_s(RIGHT, RIGHT + 1.0, trust_clock=True) == 0.0
    assert clock_set_back_s(RIGHT, RIGHT - DAY, trust_clock=True) == 0.0


@pytest.mark.promise("clock-check")
def test_process_refuses_clock_far_ahead_of_its_database(program_forks: ForkPool, tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'controller.db'}"
    engine = open_database(database)
    writer = DatabaseWriter(engine)
    writer.take_over()
    writer.commit([Batch(number=1, event_log=[EventLogRow(id=1, at=RIGHT, kind="operator.hold", sentence="kept")])])
    writer.close()
    engine.dispose()
    with (
        pytest.raises(AssertionError, match="start once with --trust-clock"),
        controller_process(tmp_path, program_forks, database=database),
    ):
        pass
    with controller_process(tmp_path, program_forks, database=database, arguments=("--trust-clock",)) as process:
        until(lambda: newest_at(database) > RIGHT, "the time in the database")
        assert process.terminate() == 0
    with controller_process(tmp_path, program_forks, database=database):  # what the last life wrote is recent
        pass


def newest_at(database: str) -> float:
    engine = open_database(database)
    try:
        with engine.connect() as connection:
            return table_access.newest_at(connection)
    finally:
        engine.dispose()


def test_database_copy_is_detected(writer: DatabaseWriter, engine: Engine) -> None:
    restored = text("UPDATE meta SET value = value + :lives WHERE key = 'epoch'")
    writer.run(lambda connection: connection.execute(restored, {"lives": COPY_EPOCH_GAP}))
    with engine.connect() as connection:
        assert table_access.is_copy(connection)


def test_clock_watch_stores_time_and_logs_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock(wall=RIGHT)
    noted: list[float] = []

    async def note(now: float) -> None:
        noted.append(now)
        if len(noted) == 1:
            raise DatabaseUnavailable("the disk is full")

    async def body() -> None:
        watch = ClockMonitor(SteadyTime(clock), note)
        clock.jump_wall(-20.0)
        for _ in range(3 * int(RECORD_INTERVAL_S / SLEW_INTERVAL_S) + 12):
            await watch.check()
            clock.advance(SLEW_INTERVAL_S)

    asyncio.run(body())
    lines = [record.getMessage() for record in caplog.records]
    assert [round((at - RIGHT) / RECORD_INTERVAL_S) for at in noted] == [0, 1, 2, 3, 4]
    assert sum("ahead of the machine's clock" in line for line in lines) == 1
    assert sum("agree again" in line for line in lines) == 1
    assert sum("the disk is full" in line for line in lines) == 1


@pytest.mark.promise("clock-check")
def test_history_is_pruned_by_the_earlier_clock(tmp_path: Path) -> None:
    clock = ManualClock(wall=RIGHT + 100 * DAY)
    served = InProcess(f"sqlite:///{tmp_path / 'c.db'}", clock=clock, retention_days=90.0)
    with TestClient(served) as client:
        assert served.controller is not None
        clock.jump_wall(-100 * DAY)
        assert served.controller.retention_limits().since == RIGHT - 90 * DAY
        shown = client.get("/metrics", headers=VIEWER).text
        assert "everstep_controller_time_ahead_of_clock_seconds 8.64e+06" in shown
        clock.jump_wall(200 * DAY)
        assert served.controller.retention_limits().since == RIGHT + 10 * DAY


@pytest.mark.promise("clock-check")
def test_trusted_clock_corrects_a_wrong_start(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'c.db'}"
    ahead = InProcess(database, clock=ManualClock(wall=RIGHT + 100 * DAY))
    with TestClient(ahead) as client:
        AgentClient(client, "n1").register()
    doubted = InProcess(database, clock=ManualClock(wall=RIGHT + 75.0))
    with TestClient(doubted):
        assert doubted.controller is not None
        assert doubted.controller.loop.now() >= RIGHT + 100 * DAY
    trusted = InProcess(database, clock=ManualClock(wall=RIGHT + 150.0), trust_clock=True)
    with TestClient(trusted) as client:
        assert trusted.controller is not None
        assert trusted.controller.loop.now() == RIGHT + 150.0
        AgentClient(client, "n2").register()
        shown = {event.kind: event for event in get(client, "/v1/events", op.EventList).events}
        assert shown[SET_BACK].at == shown["node.registered"].at == RIGHT + 150.0
    after = InProcess(database, clock=ManualClock(wall=RIGHT + 200.0))
    with TestClient(after):
        assert after.controller is not None
        assert after.controller.loop.now() == RIGHT + 200.0
        nodes = after.controller.loop.state.nodes.values()
        assert {node.identity.registered_at for node in nodes} == {RIGHT + 150.0}


def test_events_are_found_by_time_after_set_back(writer: DatabaseWriter, engine: Engine) -> None:
    wrong = RIGHT + 100 * DAY
    times = [RIGHT, RIGHT + 10, wrong, wrong + 1, RIGHT + 20, RIGHT + 30, RIGHT + 40]
    kinds = ["test"] * 4 + [SET_BACK] + ["test"] * 2
    rows = [
        EventLogRow(id=number, at=at, kind=kind, sentence="s")
        for number, (at, kind) in enumerate(zip(times, kinds, strict=True), start=1)
    ]
    writer.commit([Batch(number=1, event_log=rows)])

    def found(since: float | None, until: float | None) -> list[int]:
        with engine.connect() as connection:
            return [row.id for row in events(connection, after=0, limit=10, since=since, until=until)]

    assert found(RIGHT + 25, None) == [6, 7]
    assert found(RIGHT + 20, RIGHT + 40) == [5, 6]
    assert found(None, RIGHT + 5) == [1]
    assert found(RIGHT + 5, RIGHT + 25) == [2, 3, 4, 5]


def test_set_back_moves_times_written_by_wrong_clock() -> None:
    newest, wall = RIGHT + 100 * DAY, RIGHT
    node = NodeRecord(
        node="n1",
        since=newest - 10.0,
        identity=NodeIdentity(incarnation=1, vault="h:1", registered_at=RIGHT - 50.0),
        liveness=NodeLiveness(loss_times=[RIGHT - 9.0, newest]),
        health=NodeHealth(finding_seen_at={"k": newest}),
        quarantine=NodeQuarantine(earliest_end=newest + 600.0),
        scheduling=NodeScheduling(maintenance_until=RIGHT + 3600.0),
        history=NodeHistory(counted_reports={"r": [(newest, True)]}),
    )
    known = msgspec.structs.replace(node, node="n2")
    window = MaintenanceWindow(until=RIGHT + 2 * DAY, sentence="planned", node="n1")
    fleet = FleetRecord(recent_evictions=[Eviction(evicted_at=newest, node="n1")], maintenance_windows=[window])
    credential = CredentialRow(
        id="c", role="agent", subject="n1", hash="", created_at=RIGHT - 1.0, created_by="olga", expires_at=RIGHT + DAY
    )
    late = msgspec.structs.replace(credential, id="d", created_at=newest, expires_at=newest + DAY)
    loaded = LoadedState(
        epoch=3,
        batch=1,
        fleet=msgspec.json.encode(fleet).decode(),
        unchanged=frozenset({"n2"}),
        nodes={"n1": msgspec.json.encode(node).decode()},
        active_findings={},
        jobs={},
        outbox=[],
        acknowledged_reports={},
        poisoned=frozenset(),
        newest_event=7,
        newest_at=newest,
        versions=[],
        credentials=[credential, late],
    )
    after, batch = set_times_back(loaded, KnownRecords(NO_ROW_VERSIONS, {"n2": known}), wall)
    assert (after.newest_at, after.newest_event, after.unchanged) == (wall, 8, frozenset())
    assert (batch.nodes, batch.fleet) == (after.nodes, after.fleet)
    assert [(row.id, row.kind, row.at) for row in batch.event_log] == [(8, SET_BACK, wall)]
    for name in ("n1", "n2"):
        found = msgspec.json.decode(after.nodes[name], type=NodeRecord)
        assert (found.since, found.identity.registered_at, found.quarantine.earliest_end) == (
            wall,
            RIGHT - 50.0,
            wall + 600.0,
        )
        assert (found.liveness.loss_times, found.health.finding_seen_at, found.history.counted_reports) == (
            [RIGHT - 9.0, wall],
            {"k": wall},
            {"r": [(wall, True)]},
        )
        assert found.scheduling.maintenance_until == RIGHT + 3600.0
    changed = msgspec.json.decode(after.fleet or "", type=FleetRecord)
    assert (changed.recent_evictions[0].evicted_at, changed.maintenance_windows) == (wall, [window])
    assert [(row.created_at, row.expires_at) for row in after.credentials] == [
        (RIGHT - 1.0, RIGHT + DAY),
        (wall, wall + DAY),
    ]
    assert set_times_back(after, NO_RECORDS, wall)[0].nodes == after.nodes
