"""The database away from the event loop: one thread that writes, one that reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from controller.store.diagnose import diagnose
from controller.store.records import Batch, Loaded
from controller.store.repository import Reader, Writer
from everstep.errors import Unavailable

T = TypeVar("T")


class Store:
    """Async access to the tables. The writing connection lives in its own thread, so commits never wait for reads.

    Args:
        commit_timeout_s: a commit that takes longer raises TimeoutError: a database that hangs is a database gone.
    """

    def __init__(self, engine: Engine, *, commit_timeout_s: float = 15.0) -> None:
        self._engine = engine
        self._commit_timeout_s = commit_timeout_s
        self._writes = ThreadPoolExecutor(1, thread_name_prefix="store-write")
        self._reads = ThreadPoolExecutor(1, thread_name_prefix="store-read")
        self._writer: Writer | None = None
        self._reader = Reader(engine)

    async def take_over(self) -> Loaded:
        """Fences earlier controllers off and reads everything a controller starts from."""

        def begin() -> Loaded:
            self._writer = Writer(self._engine)
            return self._writer.take_over()

        return await asyncio.get_running_loop().run_in_executor(self._writes, begin)

    async def commit(self, batch: Batch) -> None:
        """Writes the batch in one transaction; durable on return. Raises as ``Writer`` does, and TimeoutError."""
        assert self._writer is not None, "take_over comes first"
        writing = asyncio.get_running_loop().run_in_executor(self._writes, self._writer.commit, batch)
        await asyncio.wait_for(writing, self._commit_timeout_s)

    async def read(self, query: Callable[[Reader], T]) -> T:
        """Runs a query in the reading thread. Raises Unavailable where the database fails."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._reads, query, self._reader)
        except SQLAlchemyError as error:
            raise Unavailable(diagnose(error, self._engine.url)) from error

    def close(self) -> None:
        """Waits for what is being written, then closes the connections."""
        if self._writer is not None:
            self._writes.submit(self._writer.close)
        self._writes.shutdown()
        self._reads.shutdown()
        self._engine.dispose()
