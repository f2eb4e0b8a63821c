"""The database away from the event loop: one thread that writes, one that reads, and neither is waited for for ever."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from everstep.errors import Unavailable
from everstep_controller.store.database_errors import DatabaseUnavailable, diagnose, redacted_url
from everstep_controller.store.reader import NO_ROW_VERSIONS, HistoryReader, RowVersions
from everstep_controller.store.rows import Batch, LoadedState
from everstep_controller.store.writer import Claim, DatabaseWriter

T = TypeVar("T")

ABORT_TIMEOUT_S = 0.2
"""Seconds that a call may take to fail once its connection was cut."""
CLOSE_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 60.0
"""For everything that a controller starts from."""


class CallTimeout(TimeoutError):
    """A call has not returned. ``is_running``: it was this one, and it may still come to its end."""

    def __init__(self, message: str, *, is_running: bool) -> None:
        super().__init__(message)
        self.is_running = is_running


class DatabaseThread:
    """One thread; what is called in it runs one after the other, and one call that hangs holds up no other lane."""

    def __init__(self, name: str, abort: Callable[[], None]) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
        self._abort = abort
        self._newest: concurrent.futures.Future[Any] | None = None
        self._hanging: concurrent.futures.Future[Any] | None = None
        self._hangs_since = 0.0

    async def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Runs ``function``; after ``timeout_s`` its connection is cut. Raises Hangs where that does not end it,
        and at once while an earlier call hangs."""
        if self._hanging is not None and not self._hanging.done():
            raise CallTimeout(f"no answer for {time.perf_counter() - self._hangs_since:.0f} s", is_running=False)
        started = time.perf_counter()
        running = self._pool.submit(function)
        self._newest = running
        waiting: asyncio.Future[T] = asyncio.wrap_future(running)
        done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
        if not done:
            self._abort()
            done, _ = await asyncio.wait({waiting}, timeout=ABORT_TIMEOUT_S)
        if not done:
            self._hanging, self._hangs_since = running, started
            waiting.cancel()
            raise CallTimeout(f"no answer for {timeout_s:g} s", is_running=True)
        return waiting.result()

    def close(self, final_call: Callable[[], None]) -> None:
        """Runs ``last`` after what is running, which gets CLOSE_S to end, and ends the thread. Blocks."""
        running = self._newest
        if running is not None and concurrent.futures.wait({running}, timeout=CLOSE_TIMEOUT_S).not_done:
            self._abort()
            if concurrent.futures.wait({running}, timeout=ABORT_TIMEOUT_S).not_done:
                self._pool.shutdown(wait=False)
                return
        self._pool.submit(final_call)
        self._pool.shutdown()


class DatabaseStore:
    """Async access to the tables. The writing connection lives in its own thread, so commits never wait for reads.

    Args:
        commit_timeout_s: a transaction that takes longer is broken off: a database that hangs is a database away.
    """

    def __init__(self, engine: Engine, *, commit_timeout_s: float = 3.0) -> None:
        self._engine = engine
        self._commit_timeout_s = commit_timeout_s
        self._writer = DatabaseWriter(engine)
        self._writes = DatabaseThread("store-write", self._writer.abort)
        self._reader = HistoryReader(engine)
        self._reads = DatabaseThread("store-read", self._reader.abort)
        self._number = 0
        self._kept: list[Batch] = []
        self._closed = False

    async def take_over(
        self, *, expected: int | None = None, claim: Claim | None = None, row_versions: RowVersions = NO_ROW_VERSIONS
    ) -> LoadedState:
        """Fences earlier controllers off and reads everything a controller starts from, but what is ``known``.
        Raises as ``Writer`` does."""
        loaded = await self._written(
            lambda: self._writer.take_over(expected=expected, claim=claim, known=row_versions), LOAD_TIMEOUT_S
        )
        self._number = loaded.batch
        return loaded

    async def commit(self, batch: Batch) -> None:
        """Writes the batch, and before it those whose outcome was not known, in one transaction; durable on return.
        Without anything to write it passes the fence.

        Raises Superseded, StoreAway (its ``kept`` says whose the batch is now), and SQLAlchemy's where a row is wrong.
        """
        if batch:
            self._number += 1
            batch.number = self._number
        batches = [*self._kept, batch] if batch else list(self._kept)
        try:
            await self._written(lambda: self._attempt(batches), self._commit_timeout_s)
        except DatabaseUnavailable as error:
            if batch and error.is_batch_kept:
                self._kept.append(batch)
            elif batch:
                self._number -= 1
            raise
        self._kept.clear()

    def _attempt(self, batches: list[Batch]) -> None:
        """A connection that broke while it was idle costs nobody anything: there is a second try on a new one."""
        was_connected = self._writer.connected
        try:
            self._writer.commit(batches)
        except DatabaseUnavailable as broken:
            if not was_connected:
                raise
            try:
                self._writer.commit(batches)
            except DatabaseUnavailable as error:
                raise DatabaseUnavailable(
                    str(error), is_batch_kept=broken.is_batch_kept or error.is_batch_kept
                ) from error

    async def write(self, change: Callable[[Connection], T]) -> T:
        """Runs ``change`` in a transaction of its own, fenced as every other. Raises Superseded and StoreAway."""
        return await self._written(lambda: self._writer.run(change), self._commit_timeout_s)

    async def query(self, query: Callable[[Connection], T]) -> T:
        """Runs a query that belongs to no ``Reader`` in the reading thread. Raises as ``read``."""
        return await self.read(lambda reader: reader.page(query))

    async def read(self, query: Callable[[HistoryReader], T]) -> T:
        """Runs a query in the reading thread. Raises Unavailable where the database fails."""
        try:
            return await self._reads.call(lambda: query(self._reader), READ_TIMEOUT_S)
        except SQLAlchemyError as error:
            raise Unavailable(diagnose(error, self._engine.url)) from error
        except CallTimeout as error:
            raise Unavailable(f"the database at {redacted_url(self._engine.url)} hangs: {error}") from error

    async def _written(self, function: Callable[[], T], timeout_s: float) -> T:
        try:
            return await self._writes.call(function, timeout_s)
        except CallTimeout as error:
            raise DatabaseUnavailable(
                f"the database at {redacted_url(self._engine.url)} hangs: {error}", is_batch_kept=error.is_running
            ) from error

    def close(self) -> None:
        """Waits for what is being written, unless it hangs, then closes the connections. Blocks; may be repeated."""
        if self._closed:
            return
        self._closed = True
        self._writes.close(self._writer.close)
        self._reads.close(lambda: None)
        self._engine.dispose()
