"""A leader that cannot reach the database does not know whether it is away for everybody: its agents may find out.

Where it is, training needs this leader. Where only this one is cut off, another one has taken the lease, and agents
that stay here are lost there. Agents reach both, also where the two do not reach one another. So a few of them are
asked to look at the other controllers; what they bring is believed for its proof, and never for who brings it.
"""

from __future__ import annotations

import asyncio
import logging
import math

from everstep.bearer_tokens import epoch_proof, proves_epoch
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.wire.v1.agent import Succession
from everstep_controller.api.credentials import Keyring
from everstep_controller.config import ControllerSettings
from everstep_controller.core.effects import AuditEntry
from everstep_controller.leadership.lease import Notice, Reach, Resignation, Tenure, Told
from everstep_controller.runtime.commit_buffer import Absence
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.transaction import Transaction, new_trace
from everstep_controller.store.database_errors import Superseded

ASKED_A_SECOND = 16
"""Agents that are asked in each second: one that reaches the other controller is enough, and a whole fleet would be a
load to the controllers that stand by."""
REASON = "the lease cannot be renewed"


class Doubt:
    """What one leadership over a lease asks of its agents.

    Args:
        epoch: by which it leads.
    """

    def __init__(self, tenure: Tenure, keyring: Keyring, clock: Clock, epoch: int) -> None:
        self._tenure = tenure
        self._keyring = keyring
        self._clock = clock
        self._epoch = epoch
        self._second = -math.inf
        self._asked = 0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def unsure_of(self) -> int:
        """What the answer to a beat asks: this leader's epoch, or 0 for nothing."""
        if self._tenure.absent_s() is None:
            return 0
        second = math.floor(self._clock.monotonic())
        if second != self._second:
            self._second, self._asked = second, 0
        self._asked += 1
        return self._epoch if self._asked <= ASKED_A_SECOND else 0

    def hear(self, said: Succession) -> None:
        """What an agent found. Without a proof, or where nothing is in doubt, it is passed over."""
        higher = said.epoch > self._epoch and self._tenure.absent_s() is not None
        if higher and not self._over.done() and proves_epoch(self._keyring.secrets, said.epoch, said.proof):
            error = Superseded(f"the database is out of reach, and another controller leads by epoch {said.epoch}")
            self._over.set_exception(error)

    async def superseded(self) -> None:
        """Waits until it is shown that another controller leads. Raises Superseded then."""
        await asyncio.shield(self._over)

    def absence(self, now: float) -> Absence | None:
        """The database's, as the lease tells of it; ``now`` in the loop's seconds."""
        absent_s = self._tenure.absent_s()
        return Absence(since=now - absent_s, reason=REASON) if absent_s is not None else None

    def shown(self) -> dict[str, object]:
        """What ``/readyz`` tells of this leadership: fields of ``Succession``."""
        return {"epoch": self._epoch, "proof": epoch_proof(self._keyring.secrets[0], self._epoch)}


# ---- elsewhere
# What a leader does about nodes that come to other controllers: it tells of it, and gives its lease up for it.

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
