"""Making decisions durable; while the database is away, keeping them in memory and writing them when it is back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import msgspec

from everstep.errors import Unavailable
from everstep_controller.store.database_errors import StoreAway
from everstep_controller.store.rows import Batch

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 1.0

Commit = Callable[[Batch], Awaitable[None]]
"""Writes a batch: durable on return. StoreAway where the database cannot be used at present."""


class Absence(msgspec.Struct):
    """That the database is away: since when (the loop's seconds), why by the newest try, and what waits for it."""

    since: float
    reason: str
    bytes: int = 0


class Keeper:
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
        self.away: Absence | None = None

    @property
    def ready(self) -> bool:
        """Whether a try has come to its end: ``keep`` would end the absence, or raise what ended the tries."""
        return self._retrying is not None and self._retrying.done()

    async def keep(self, batch: Batch) -> bool:
        """True when the batch, and whatever waited, is durable. False while it waits in memory.

        Raises what ``commit`` raises beside StoreAway; nothing may be answered after that.
        """
        if self.away is not None and not self.ready:
            self._add(batch)
            return False
        if self._retrying is not None:
            self._retrying.result()
        self._add(batch)
        batch, self._waiting = self._waiting, Batch()
        try:
            if batch:
                await self._commit(batch)
        except StoreAway as error:
            self._take_back(batch, error)
            self._begin_absence(str(error))
            return False
        self._end_absence()
        return True

    def check_room(self) -> None:
        """Raises Unavailable where as much waits as may."""
        away = self.away
        if away is not None and away.bytes >= self._limit_bytes:
            raise Unavailable(
                f"the database has been away for {self._now() - away.since:.0f} s and {away.bytes >> 20} MiB of "
                f"decisions wait for it: nothing more is taken until it is back ({away.reason})"
            )

    def close(self) -> None:
        """Ends the tries; what waits is lost, and nobody was told that it was not."""
        if self._retrying is not None:
            self._retrying.cancel()

    def _add(self, batch: Batch) -> None:
        self._waiting.absorb(batch)
        if self.away is not None:
            self.away.bytes += batch.size()
            if self.away.bytes >= self._limit_bytes:  # the sum counts documents that were replaced since
                self.away.bytes = self._waiting.size()

    def _take_back(self, batch: Batch, error: StoreAway) -> None:
        """What a failed try leaves to us goes before what has come meanwhile."""
        if not error.kept:
            batch.absorb(self._waiting)
            self._waiting = batch

    def _begin_absence(self, reason: str) -> None:
        if self.away is None:
            self.away = Absence(since=self._now(), reason=reason)
            log.error("the database is away; running jobs regroup from memory, nothing is acknowledged: %s", reason)
        self.away.reason = reason
        self.away.bytes = self._waiting.size()
        self._retrying = asyncio.create_task(self._retry(), name="database")
        self._retrying.add_done_callback(lambda _task: self._wake())

    def _end_absence(self) -> None:
        if self.away is not None:
            log.info("the database is back after %.1f s; all is written", self._now() - self.away.since)
        self.away = self._retrying = None

    async def _retry(self) -> None:
        """Writes what waits, again and again, until that has succeeded once."""
        wait_s = FIRST_RETRY_S
        while True:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_RETRY_S)
            batch, self._waiting = self._waiting, Batch()
            try:
                await self._commit(batch)
                return
            except StoreAway as error:
                self._take_back(batch, error)
                if self.away is not None:
                    self.away.reason = str(error)
