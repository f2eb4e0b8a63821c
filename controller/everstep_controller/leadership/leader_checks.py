"""A leader that cannot reach the database does not know whether it is away for everybody: its agents may find out.

Where it is, training needs this leader. Where only this one is cut off, another one has taken the lease, and agents
that stay here are lost there. Agents reach both, also where the two do not reach one another. So a few of them are
asked to look at the other controllers; what they bring is believed for its proof, and never for who brings it.
"""

from __future__ import annotations

import asyncio
import logging
import math

from everstep.bearer_tokens import epoch_proof, is_epoch_proof
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.wire.v1.agent import LeadershipProof
from everstep_controller.api.credentials import Keyring
from everstep_controller.config import ControllerSettings
from everstep_controller.core.effects import AuditEntry
from everstep_controller.leadership.lease import (
    LeaderReachability,
    LeadershipNotice,
    Resignation,
    StandbyReport,
    Tenure,
)
from everstep_controller.runtime.commit_buffer import DatabaseOutage
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.transaction import Transaction, new_trace
from everstep_controller.store.database_errors import Superseded

CHECKS_PER_SECOND = 16
"""Agents that are asked in each second: one that reaches the other controller is enough, and a whole fleet would be a
load to the controllers that stand by."""
OUTAGE_REASON = "the lease cannot be renewed"


class EpochCheck:
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
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def unconfirmed_epoch(self) -> int:
        """What the answer to a beat asks: this leader's epoch, or 0 for nothing."""
        if self._tenure.outage_s() is None:
            return 0
        second = math.floor(self._clock.monotonic())
        if second != self._second:
            self._second, self._asked = second, 0
        self._asked += 1
        return self._epoch if self._asked <= CHECKS_PER_SECOND else 0

    def take_proof(self, proof: LeadershipProof) -> None:
        """What an agent found. Without a proof, or where nothing is in doubt, it is passed over."""
        higher = proof.epoch > self._epoch and self._tenure.outage_s() is not None
        if higher and not self._superseded.done() and is_epoch_proof(self._keyring.secrets, proof.epoch, proof.proof):
            error = Superseded(f"the database is out of reach, and another controller leads by epoch {proof.epoch}")
            self._superseded.set_exception(error)

    async def wait_superseded(self) -> None:
        """Waits until it is shown that another controller leads. Raises Superseded then."""
        await asyncio.shield(self._superseded)

    def database_outage(self, now: float) -> DatabaseOutage | None:
        """The database's, as the lease tells of it; ``now`` in the loop's seconds."""
        absent_s = self._tenure.outage_s()
        return DatabaseOutage(since=now - absent_s, reason=OUTAGE_REASON) if absent_s is not None else None

    def proof_fields(self) -> dict[str, object]:
        """What ``/readyz`` tells of this leadership: fields of ``Succession``."""
        return {"epoch": self._epoch, "proof": epoch_proof(self._keyring.secrets[0], self._epoch)}


# ---- elsewhere
# What a leader does about nodes that come to other controllers: it tells of it, and gives its lease up for it.

log = logging.getLogger(__name__)

RECENT_HEARTBEATS = 3.0
"""A node was heard lately if it was within so many beats, or a third of ``resign_after_s``."""


class StandbyWatch:
    """One leadership's watch over the doors of the others. ``told``: what was found there last."""

    def __init__(self, settings: ControllerSettings, loop: FleetLoop, clock: Clock) -> None:
        self.report = StandbyReport()
        self._loop = loop
        self._clock = clock
        self._after_s = settings.resign_after_s
        self._lately_s = max(settings.resign_after_s / 3, RECENT_HEARTBEATS * settings.heartbeat_interval_s)
        self._patience_s = settings.lease_renew_s
        self._reachability = LeaderReachability(settings.resign_after_s, settings.lease_s)

    async def check(self, report: StandbyReport) -> Resignation | None:
        """What follows from what standbys have written down; a resignation is in the audit log when this returns."""
        self.report = report
        if not self._after_s:
            return None
        heard = self._recently_heard() if report.contacts else 0
        found = self._reachability.evaluate(self._clock.monotonic(), heard, report)
        if isinstance(found, LeadershipNotice):
            log.warning("%s", found.sentence)
            await self._write_audit(found.kind, found.sentence)
        elif isinstance(found, Resignation) and await self._write_audit("controller.resigned", found.sentence):
            return found
        return None

    async def _write_audit(self, kind: str, sentence: str) -> bool:
        """Whether it is in the audit log. The lease is not renewed meanwhile."""
        try:
            async with asyncio.timeout(self._patience_s):
                await self._loop.submit(lambda tx, now: _note(tx, now, kind, sentence))
        except (EverstepError, TimeoutError) as error:
            log.warning("%s is not in the audit log: %s", kind, error or "the database takes its time")
            return False
        return True

    def _recently_heard(self) -> int:
        """Nodes that were heard lately."""
        since = self._loop.now() - self._lately_s
        return sum(live.heartbeats.last_seen_at >= since for live in self._loop.state.node_runtime.values())


def _note(tx: Transaction, now: float, kind: str, sentence: str) -> None:
    tx.add_audit_entry(AuditEntry(kind=kind, sentence=sentence, at=now, trace=new_trace()))
