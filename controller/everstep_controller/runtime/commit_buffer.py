"""Making decisions durable; while the database is away, keeping them in memory and writing them when it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from everstep.errors import Unavailable
from everstep_controller.store.database_errors import DatabaseUnavailable
from everstep_controller.store.rows import Batch

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 1.0

Commit = Callable[[Batch], Awaitable[None]]
"""Writes a batch: durable on return. StoreAway where the database cannot be used at present."""


class DatabaseOutage(msgspec.Struct):
    """That the database is away: since when (the loop's seconds), why by the newest try, and what waits for it."""

    since: float
    reason: str
    buffered_bytes: int = 0


class CommitBuffer:
    """Belongs to the loop, which has at most one call of ``keep`` under way.

    While the database is away it tries again by itself; once a try has succeeded, the next ``keep`` writes what is
    left and ends the absence. ``wake`` is called when there is reason for that, or for an end.

    Args:
        limit_bytes: about how much may wait in memory.

    Attributes:
        away: None while everything that was decided is durable.
    """

    def __init__(self, commit: Commit, *, now: Callable[[], float], wake: Callable[[], None], limit_bytes: int) -> None:
        self._commit = commit
        self._now = now
        self._wake = wake
        self._limit_bytes = limit_bytes
        self._waiting = Batch()
        self._retrying: asyncio.Task[None] | None = None
        self.outage: DatabaseOutage | None = None

    @property
    def retry_finished(self) -> bool:
        """Whether a try has come to its end: ``keep`` would end the absence, or raise what ended the tries."""
        return self._retrying is not None and self._retrying.done()

    async def write(self, batch: Batch) -> bool:
        """True when the batch, and whatever waited, is durable. False while it waits in memory.

        Raises what ``commit`` raises beside StoreAway; nothing may be answered after that.
        """
        if self.outage is not None and not self.retry_finished:
            self._add(batch)
            return False
        if self._retrying is not None:
            self._retrying.result()
        self._add(batch)
        batch, self._waiting = self._waiting, Batch()
        try:
            if batch:
                await self._commit(batch)
        except DatabaseUnavailable as error:
            self._restore_failed(batch, error)
            self._begin_outage(str(error))
            return False
        self._end_outage()
        return True

    def check_room(self) -> None:
        """Raises Unavailable where as much waits as may."""
        away = self.outage
        if away is not None and away.buffered_bytes >= self._limit_bytes:
            raise Unavailable(
                f"the database has been away for {self._now() - away.since:.0f} s and "
                f"{away.buffered_bytes >> 20} MiB of "
                f"decisions wait for it: nothing more is taken until it is back ({away.reason})"
            )

    def close(self) -> None:
        """Ends the tries; what waits is lost, and nobody was told that it was not."""
        if self._retrying is not None:
            self._retrying.cancel()

    def _add(self, batch: Batch) -> None:
        self._waiting.merge(batch)
        if self.outage is not None:
            self.outage.buffered_bytes += batch.approximate_bytes()
            if self.outage.buffered_bytes >= self._limit_bytes:  # the sum counts documents that were replaced since
                self.outage.buffered_bytes = self._waiting.approximate_bytes()

    def _restore_failed(self, batch: Batch, error: DatabaseUnavailable) -> None:
        """What a failed try leaves to us goes before what has come meanwhile."""
        if not error.is_batch_kept:
            batch.merge(self._waiting)
            self._waiting = batch

    def _begin_outage(self, reason: str) -> None:
        if self.outage is None:
            self.outage = DatabaseOutage(since=self._now(), reason=reason)
            log.error("the database is away; running jobs regroup from memory, nothing is acknowledged: %s", reason)
        self.outage.reason = reason
        self.outage.buffered_bytes = self._waiting.approximate_bytes()
        self._retrying = asyncio.create_task(self._retry(), name="database")
        self._retrying.add_done_callback(lambda _task: self._wake())

    def _end_outage(self) -> None:
        if self.outage is not None:
            log.info("the database is back after %.1f s; all is written", self._now() - self.outage.since)
        self.outage = self._retrying = None

    async def _retry(self) -> None:
        """Writes what waits, again and again, until that has succeeded once."""
        wait_s = FIRST_RETRY_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, MAX_RETRY_S)
            batch, self._waiting = self._waiting, Batch()
            try:
                await self._commit(batch)
                return
            except DatabaseUnavailable as error:
                self._restore_failed(batch, error)
                if self.outage is not None:
                    self.outage.reason = str(error)
