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
from everstep_controller.store.database_errors import StoreAway, diagnose, shown
from everstep_controller.store.reader import NONE, Marks, Reader
from everstep_controller.store.rows import Batch, Loaded
from everstep_controller.store.writer import Claim, Writer

T = TypeVar("T")

ABORT_S = 0.2
"""Seconds that a call may take to fail once its connection was cut."""
CLOSE_S = 2.0
READ_TIMEOUT_S = 10.0
LOAD_TIMEOUT_S = 60.0
"""For everything that a controller starts from."""


class Hangs(TimeoutError):
    """A call has not returned. ``begun``: it was this one, and it may still come to its end."""

    def __init__(self, message: str, *, begun: bool) -> None:
        super().__init__(message)
        self.begun = begun


class Lane:
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
            raise Hangs(f"no answer for {time.perf_counter() - self._hangs_since:.0f} s", begun=False)
        started = time.perf_counter()
        running = self._pool.submit(function)
        self._newest = running
        waiting: asyncio.Future[T] = asyncio.wrap_future(running)
        done, _ = await asyncio.wait({waiting}, timeout=timeout_s)
        if not done:
            self._abort()
            done, _ = await asyncio.wait({waiting}, timeout=ABORT_S)
        if not done:
            self._hanging, self._hangs_since = running, started
            waiting.cancel()
            raise Hangs(f"no answer for {timeout_s:g} s", begun=True)
        return waiting.result()

    def close(self, last: Callable[[], None]) -> None:
        """Runs ``last`` after what is running, which gets CLOSE_S to end, and ends the thread. Blocks."""
        running = self._newest
        if running is not None and concurrent.futures.wait({running}, timeout=CLOSE_S).not_done:
            self._abort()
            if concurrent.futures.wait({running}, timeout=ABORT_S).not_done:
                self._pool.shutdown(wait=False)
                return
        self._pool.submit(last)
        self._pool.shutdown()


class Store:
    """Async access to the tables. The writing connection lives in its own thread, so commits never wait for reads.

    Args:
        commit_timeout_s: a transaction that takes longer is broken off: a database that hangs is a database away.
    """

    def __init__(self, engine: Engine, *, commit_timeout_s: float = 3.0) -> None:
        self._engine = engine
        self._commit_timeout_s = commit_timeout_s
        self._writer = Writer(engine)
        self._writes = Lane("store-write", self._writer.abort)
        self._reader = Reader(engine)
        self._reads = Lane("store-read", self._reader.abort)
        self._number = 0
        self._kept: list[Batch] = []
        self._closed = False

    async def take_over(
        self, *, expected: int | None = None, claim: Claim | None = None, known: Marks = NONE
    ) -> Loaded:
        """Fences earlier controllers off and reads everything a controller starts from, but what is ``known``.
        Raises as ``Writer`` does."""
        loaded = await self._written(
            lambda: self._writer.take_over(expected=expected, claim=claim, known=known), LOAD_TIMEOUT_S
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
        except StoreAway as error:
            if batch and error.kept:
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
        except StoreAway as broken:
            if not was_connected:
                raise
            try:
                self._writer.commit(batches)
            except StoreAway as error:
                raise StoreAway(str(error), kept=broken.kept or error.kept) from error

    async def write(self, change: Callable[[Connection], T]) -> T:
        """Runs ``change`` in a transaction of its own, fenced as every other. Raises Superseded and StoreAway."""
        return await self._written(lambda: self._writer.run(change), self._commit_timeout_s)

    async def look(self, query: Callable[[Connection], T]) -> T:
        """Runs a query that belongs to no ``Reader`` in the reading thread. Raises as ``read``."""
        return await self.read(lambda reader: reader.page(query))

    async def read(self, query: Callable[[Reader], T]) -> T:
        """Runs a query in the reading thread. Raises Unavailable where the database fails."""
        try:
            return await self._reads.call(lambda: query(self._reader), READ_TIMEOUT_S)
        except SQLAlchemyError as error:
            raise Unavailable(diagnose(error, self._engine.url)) from error
        except Hangs as error:
            raise Unavailable(f"the database at {shown(self._engine.url)} hangs: {error}") from error

    async def _written(self, function: Callable[[], T], timeout_s: float) -> T:
        try:
            return await self._writes.call(function, timeout_s)
        except Hangs as error:
            raise StoreAway(f"the database at {shown(self._engine.url)} hangs: {error}", kept=error.begun) from error

    def close(self) -> None:
        """Waits for what is being written, unless it hangs, then closes the connections. Blocks; may be repeated."""
        if self._closed:
            return
        self._closed = True
        self._writes.close(self._writer.close)
        self._reads.close(lambda: None)
        self._engine.dispose()
