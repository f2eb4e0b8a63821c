"""Commit decisions, and buffer them in memory while the database is unavailable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from everstep.errors import Unavailable
from everstep_controller.store.database_errors import DatabaseOutage, DatabaseUnavailable
from everstep_controller.store.rows import Batch

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
MAX_RETRY_S = 1.0

Commit = Callable[[Batch], Awaitable[None]]
"""Writes a batch; durable on return. Raises DatabaseUnavailable while the database cannot be used."""


class CommitBuffer:
    """Writes batches for the loop, which runs at most one call of ``write`` at a time.

    During an outage the buffer retries by itself. After a successful retry, the next ``write`` writes the rest and ends
    the outage. ``wake`` is called when the loop should call ``write``. ``outage`` is None while everything decided is
    durable. About ``limit_bytes`` may wait in memory.
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
        """Whether a retry has finished: ``write`` would end the outage, or raise the retry's error."""
        return self._retrying is not None and self._retrying.done()

    async def write(self, batch: Batch) -> bool:
        """Write a batch. Return True once it and all buffered batches are durable, False while they wait in memory.

        Raises the errors of ``commit`` except DatabaseUnavailable. After an error nothing may be answered.
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
        if self.outage is not None:
            outage_s = self._now() - self.outage.since
            log.info("the database is available again after %.1f s; all decisions are written", outage_s)
        self.outage = self._retrying = None
        return True

    def check_room(self) -> None:
        """Raise Unavailable if the buffer is full."""
        outage = self.outage
        if outage is not None and outage.buffered_bytes >= self._limit_bytes:
            raise Unavailable(
                f"the database has been unavailable for {self._now() - outage.since:.0f} s and "
                f"{outage.buffered_bytes >> 20} MiB of decisions wait for it: further requests are refused until it is "
                f"back ({outage.reason})"
            )

    def close(self) -> None:
        """Stop retrying. Buffered decisions are lost; none was acknowledged."""
        if self._retrying is not None:
            self._retrying.cancel()

    def _add(self, batch: Batch) -> None:
        self._waiting.merge(batch)
        if self.outage is not None:
            self.outage.buffered_bytes += batch.approximate_bytes()
            # The sum also counts documents that later ones replaced.
            if self.outage.buffered_bytes >= self._limit_bytes:
                self.outage.buffered_bytes = self._waiting.approximate_bytes()

    def _restore_failed(self, batch: Batch, error: DatabaseUnavailable) -> None:
        """Put a failed batch back before the batches that arrived meanwhile, if it is ours again."""
        if not error.is_batch_queued:
            batch.merge(self._waiting)
            self._waiting = batch

    def _begin_outage(self, reason: str) -> None:
        if self.outage is None:
            self.outage = DatabaseOutage(since=self._now(), reason=reason)
            log.error(
                "the database is unavailable; jobs can still regroup, but nothing is acknowledged until it is back: %s",
                reason,
            )
        self.outage.reason = reason
        self.outage.buffered_bytes = self._waiting.approximate_bytes()
        self._retrying = asyncio.create_task(self._retry(), name="database")
        self._retrying.add_done_callback(lambda _task: self._wake())

    async def _retry(self) -> None:
        """Write buffered batches repeatedly until one attempt succeeds."""
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
