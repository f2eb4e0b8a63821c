"""What a leader does about nodes that come to other controllers: it tells of it, and gives its lease up for it."""

from __future__ import annotations

import asyncio
import logging

from controller.config import ControllerSettings
from controller.core.effects import AuditEntry
from controller.loop import FleetLoop
from controller.reach import Notice, Reach, Resignation, Told
from controller.transaction import Transaction, new_trace
from everstep.clock import Clock
from everstep.errors import EverstepError

log = logging.getLogger(__name__)

BEATS = 3.0
"""A node was heard lately if it was within so many beats, or a third of ``resign_after_s``."""


class Elsewhere:
    """One leadership's watch over the doors of the others. ``told``: what was found there last."""

    def __init__(self, settings: ControllerSettings, loop: FleetLoop, clock: Clock) -> None:
        self.told = Told()
        self._loop = loop
        self._clock = clock
        self._after_s = settings.resign_after_s
        self._lately_s = max(settings.resign_after_s / 3, BEATS * settings.heartbeat_interval_s)
        self._patience_s = settings.lease_renew_s
        self._reach = Reach(settings.resign_after_s, settings.lease_s)

    async def look(self, told: Told) -> Resignation | None:
        """What follows from what standbys have written down; a resignation is in the audit log when this returns."""
        self.told = told
        if not self._after_s:
            return None
        heard = self._heard() if told.knocks else 0
        found = self._reach.look(self._clock.monotonic(), heard, told)
        if isinstance(found, Notice):
            log.warning("%s", found.sentence)
            await self._written(found.kind, found.sentence)
        elif isinstance(found, Resignation) and await self._written("controller.resigned", found.sentence):
            return found
        return None

    async def _written(self, kind: str, sentence: str) -> bool:
        """Whether it is in the audit log. The lease is not renewed meanwhile."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._loop.submit(lambda tx, now: _note(tx, now, kind, sentence))
        except (EverstepError, TimeoutError) as error:
            log.warning("%s is not in the audit log: %s", kind, error or "the database takes its time")
            return False
        return True

    def _heard(self) -> int:
        """Nodes that were heard lately."""
        since = self._loop.now() - self._lately_s
        return sum(live.pulse.heard_at >= since for live in self._loop.state.live_nodes.values())


def _note(tx: Transaction, now: float, kind: str, sentence: str) -> None:
    tx.note(AuditEntry(kind=kind, sentence=sentence, at=now, trace=new_trace()))
