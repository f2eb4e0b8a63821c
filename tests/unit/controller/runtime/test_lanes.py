"""The end of a thread in which a database is spoken to, while a call to that hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest
from everstep_controller.store import threads
from everstep_controller.store.threads import DatabaseStore, DatabaseThread
from sqlalchemy import Engine

LONG_S = 5.0


def ended(lane: DatabaseThread, until: threading.Event) -> list[str]:
    """What came of a call that waits for ``until``, and of the last one, when the lane was closed meanwhile."""
    came: list[str] = []

    async def story() -> None:
        calling = asyncio.create_task(lane.call(lambda: until.wait(LONG_S), 10 * LONG_S))
        await asyncio.sleep(0)  # it is under way
        await asyncio.to_thread(lane.close, lambda: came.append("last"))
        came.append("closed")
        until.set()
        await calling

    asyncio.run(story())
    return came


def test_lane_aborts_hanging_call_and_runs_last_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(threads, "ABORT_TIMEOUT_S", LONG_S)
    cut = threading.Event()
    assert ended(DatabaseThread("test", cut.set), cut) == ["last", "closed"]


def test_lane_closes_despite_call_without_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", 0.01)
    monkeypatch.setattr(threads, "ABORT_TIMEOUT_S", 0.01)
    assert ended(DatabaseThread("test", lambda: None), threading.Event()) == ["closed"]


def test_store_can_be_closed_twice(engine: Engine) -> None:
    store = DatabaseStore(engine)
    asyncio.run(store.query(lambda connection: None))
    for _ in range(2):
        store.close()
