"""Access the database from the event loop: one writing thread, one reading thread, and a timeout for every call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import time
from collections.abc import Callable
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from everstep.errors import Unavailable
from everstep_controller.store.database_errors import DatabaseUnavailable, abort_connection, diagnose, redacted_url
from everstep_controller.store.reader import NO_ROW_VERSIONS, RowVersions
from everstep_controller.store.rows import Batch, LoadedState
from everstep_controller.store.writer import Claim, DatabaseWriter

T = TypeVar("T")

ABORT_TIMEOUT_S = 0.2
"""Seconds within which an aborted call must fail."""
CLOSE_TIMEOUT_S = 2.0
READ_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 60.0
"""Seconds for loading the state that a controller starts from."""


class CallTimeout(TimeoutError):
    """A call has not returned. ``is_running``: this call was started, and may still complete."""

    def __init__(self, message: str, *, is_running: bool) -> None:
        super().__init__(message)
        self.is_running = is_running


class DatabaseThread:
    """One thread that runs calls in order. A hanging call blocks no other thread."""

    def __init__(self, name: str, abort: Callable[[], None]) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=name)
        self._abort = abort
        self._newest: concurrent.futures.Future[Any] | None = None
        self._hanging: concurrent.futures.Future[Any] | None = None
        self._hangs_since = 0.0

    async def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Run ``function``, aborted after ``timeout_s``. Raises CallTimeout if it hangs, or an earlier call does."""
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
        """Run ``final_call`` after the current call, which gets CLOSE_TIMEOUT_S, and end the thread. Blocks."""
        running = self._newest
        if running is not None and concurrent.futures.wait({running}, timeout=CLOSE_TIMEOUT_S).not_done:
            self._abort()
            if concurrent.futures.wait({running}, timeout=ABORT_TIMEOUT_S).not_done:
                self._pool.shutdown(wait=False)
                return
        self._pool.submit(final_call)
        self._pool.shutdown()


class DatabaseStore:
    """Async access to the tables; commits have their own thread and connection, and a time limit."""

    def __init__(self, engine: Engine, *, commit_timeout_s: float = 3.0) -> None:
        self._engine = engine
        self._commit_timeout_s = commit_timeout_s
        self._writer = DatabaseWriter(engine)
        self._writes = DatabaseThread("store-write", self._writer.abort)
        self._reading: Connection | None = None
        self._reads = DatabaseThread("store-read", self._abort_read)
        self._number = 0
        self._kept: list[Batch] = []
        self._closed = False

    async def take_over(
        self, *, expected: int | None = None, claim: Claim | None = None, row_versions: RowVersions = NO_ROW_VERSIONS
    ) -> LoadedState:
        """Fence off earlier controllers and return the starting state. See ``DatabaseWriter.take_over``."""
        loaded = await self._written(
            lambda: self._writer.take_over(expected=expected, claim=claim, known=row_versions), LOAD_TIMEOUT_S
        )
        self._number = loaded.batch
        return loaded

    async def commit(self, batch: Batch) -> None:
        """Write the batch, after any batches with unknown outcome, in one transaction; durable on return.

        An empty batch only checks the fence. Raises as ``DatabaseWriter`` does; ``DatabaseUnavailable.is_batch_queued``
        says who keeps the batch.
        """
        if batch:
            self._number += 1
            batch.number = self._number
        batches = [*self._kept, batch] if batch else list(self._kept)
        try:
            await self._written(lambda: self._attempt(batches), self._commit_timeout_s)
        except DatabaseUnavailable as error:
            if batch and error.is_batch_queued:
                self._kept.append(batch)
            elif batch:
                self._number -= 1
            raise
        self._kept.clear()

    def _attempt(self, batches: list[Batch]) -> None:
        """Try to commit, twice if the connection was open before: it may have broken while idle."""
        was_connected = self._writer.connection is not None
        try:
            self._writer.commit(batches)
        except DatabaseUnavailable as broken:
            if not was_connected:
                raise
            try:
                self._writer.commit(batches)
            except DatabaseUnavailable as error:
                error.is_batch_queued |= broken.is_batch_queued
                raise

    async def write(self, change: Callable[[Connection], T]) -> T:
        """Run ``change`` in its own fenced transaction. Raises LeadershipLost and DatabaseUnavailable."""
        return await self._written(lambda: self._writer.run(change), self._commit_timeout_s)

    async def query(self, query: Callable[[Connection], T]) -> T:
        """Run a query in the reading thread. Raises Unavailable if the database fails."""
        try:
            return await self._reads.call(lambda: self._read(query), READ_TIMEOUT_S)
        except SQLAlchemyError as error:
            raise Unavailable(diagnose(error, self._engine.url)) from error
        except CallTimeout as error:
            raise Unavailable(f"the database at {redacted_url(self._engine.url)} hangs: {error}") from error

    def _read(self, query: Callable[[Connection], T]) -> T:
        """Run a query over a connection of its own, so that no read delays a decision."""
        with self._engine.connect() as connection:
            self._reading = connection
            try:
                return query(connection)
            finally:
                self._reading = None

    def _abort_read(self) -> None:
        if (connection := self._reading) is not None:
            abort_connection(connection)

    async def _written(self, function: Callable[[], T], timeout_s: float) -> T:
        try:
            return await self._writes.call(function, timeout_s)
        except CallTimeout as error:
            raise DatabaseUnavailable(
                f"the database at {redacted_url(self._engine.url)} hangs: {error}", is_batch_queued=error.is_running
            ) from error

    def close(self) -> None:
        """Wait for the current write, unless it hangs, then close the connections. Blocks; may be repeated."""
        if self._closed:
            return
        self._closed = True
        self._writes.close(self._writer.close)
        self._reads.close(lambda: None)
        self._engine.dispose()
