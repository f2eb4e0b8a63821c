"""Commits whose answer is lost: their outcome is looked up before the next write."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, text

from everstep_controller.store.database_errors import DatabaseUnavailable
from everstep_controller.store.rows import Batch, EventLogRow
from everstep_controller.store.threads import DatabaseStore


class Answers:
    """The fate of the database's answers to COMMIT."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost = 0
        self.broken = False
        self.late = threading.Event()
        self.late.set()
        commit, connect = engine.dialect.do_commit, engine.dialect.connect
        kind: Any = sqlite3.OperationalError if engine.dialect.name == "sqlite" else psycopg.OperationalError

        def committing(connection: Any) -> None:
            commit(connection)
            self.late.wait(60)
            if self.lost:
                self.lost -= 1
                raise kind("disk I/O error: the answer is lost")

        def connecting(*given: Any, **named: Any) -> Any:
            if self.broken:
                raise kind("connection refused")
            return connect(*given, **named)

        monkeypatch.setattr(engine.dialect, "do_commit", committing)
        monkeypatch.setattr(engine.dialect, "connect", connecting)


@pytest.fixture
def answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Answers:
    return Answers(engine, monkeypatch)


def entry(number: int) -> Batch:
    return Batch(event_log=[EventLogRow(id=number, at=1.0, kind="test", sentence=f"entry {number}")])


def written(engine: Engine) -> list[int]:
    with engine.connect() as connection:
        return list(connection.execute(text("SELECT id FROM audit ORDER BY id")).scalars())


def test_lost_commit_answer_is_recovered(engine: Engine, answers: Answers) -> None:
    async def body() -> None:
        store = DatabaseStore(engine)
        await store.take_over()
        answers.lost = 1
        await store.commit(entry(1))
        await store.commit(entry(2))
        assert written(engine) == [1, 2]
        store.close()

    asyncio.run(body())


@pytest.mark.promise("acknowledged-is-durable")
def test_commit_kept_before_outage_is_not_repeated(engine: Engine, answers: Answers) -> None:
    async def body() -> None:
        store = DatabaseStore(engine)
        await store.take_over()
        answers.lost, answers.broken = 1, True
        with pytest.raises(DatabaseUnavailable) as away:
            await store.commit(entry(1))
        assert away.value.is_batch_queued
        with pytest.raises(DatabaseUnavailable) as still_away:
            await store.commit(entry(2))
        assert not still_away.value.is_batch_queued
        answers.broken = False
        await store.commit(entry(2))
        await store.commit(Batch())
        assert written(engine) == [1, 2]
        store.close()

    asyncio.run(body())


def test_slow_commit_is_aborted_and_looked_up(engine: Engine, answers: Answers) -> None:
    async def body() -> None:
        store = DatabaseStore(engine, commit_timeout_s=0.1)
        await store.take_over()
        answers.late.clear()
        with pytest.raises(DatabaseUnavailable, match="hangs: no answer for") as away:
            await store.commit(entry(1))
        assert away.value.is_batch_queued
        with pytest.raises(DatabaseUnavailable, match="hangs"):
            await store.commit(entry(2))
        answers.late.set()
        async with asyncio.timeout(60):
            while True:
                try:
                    await store.commit(entry(2))
                    break
                except DatabaseUnavailable:
                    await asyncio.sleep(0.01)
        assert written(engine) == [1, 2]
        store.close()

    asyncio.run(body())
