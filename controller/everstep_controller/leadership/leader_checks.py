"""Let agents find out whether another controller leads while this leader cannot reach the database.

If the database is down for all, training needs this leader. If only this leader is cut off, another controller has
taken the lease, and agents that stay here are lost there. Agents reach both controllers, so a few of them query the
others. A response counts because of its proof, not because of its sender.
"""

from __future__ import annotations

import asyncio
import logging
import math

from everstep.bearer_tokens import epoch_proof, is_epoch_proof
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.wire.v1.agent import LeadershipProof
from everstep_controller.auth.credentials import Keyring
from everstep_controller.config import ControllerSettings
from everstep_controller.core.effects import EventLogEntry
from everstep_controller.leadership.lease import LeaderReachability, LeaseTenure, Resignation
from everstep_controller.runtime.loop import FleetLoop
from everstep_controller.runtime.transaction import Transaction, new_trace
from everstep_controller.store.database_errors import DatabaseOutage, LeadershipLost
from everstep_controller.store.rows import StandbyReport

CHECKS_PER_SECOND = 16
"""Agents asked per second. One that reaches the other controller is enough; a whole fleet would overload standbys."""
OUTAGE_REASON = "the lease cannot be renewed"


class EpochCheck:
    """Asks agents about other leaders, during the leadership of ``epoch``."""

    def __init__(self, tenure: LeaseTenure, keyring: Keyring, clock: Clock, epoch: int) -> None:
        self._tenure = tenure
        self._keyring = keyring
        self._clock = clock
        self._epoch = epoch
        self._second = -math.inf
        self._asked = 0
        self._superseded: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def unconfirmed_epoch(self) -> int:
        """Return the epoch that a heartbeat's answer asks the agent to check, or 0 for none."""
        if self._tenure.outage_s() is None:
            return 0
        second = math.floor(self._clock.monotonic())
        if second != self._second:
            self._second, self._asked = second, 0
        self._asked += 1
        return self._epoch if self._asked <= CHECKS_PER_SECOND else 0

    def take_proof(self, proof: LeadershipProof) -> None:
        """Take an agent's finding. A finding without valid proof, or while the database is available, is ignored."""
        higher = proof.epoch > self._epoch and self._tenure.outage_s() is not None
        if higher and not self._superseded.done() and is_epoch_proof(self._keyring.secrets, proof.epoch, proof.proof):
            text = f"the database is out of reach, and another controller leads with epoch {proof.epoch}"
            self._superseded.set_exception(LeadershipLost(text))

    async def wait_superseded(self) -> None:
        """Wait until an agent proves that another controller leads, then raise LeadershipLost."""
        await asyncio.shield(self._superseded)

    def database_outage(self, now: float) -> DatabaseOutage | None:
        """Return the database's outage as seen by the lease; ``now`` in the loop's seconds."""
        absent_s = self._tenure.outage_s()
        return DatabaseOutage(since=now - absent_s, reason=OUTAGE_REASON) if absent_s is not None else None

    def proof_fields(self) -> dict[str, object]:
        """Return this leadership's fields in ``/readyz``: fields of ``LeadershipProof``."""
        return {"epoch": self._epoch, "proof": epoch_proof(self._keyring.secrets[0], self._epoch)}


log = logging.getLogger(__name__)

RECENT_HEARTBEATS = 3.0
"""A node was heard recently if it was heard within this many heartbeats, or a third of ``resign_after_s``."""


class StandbyMonitor:
    """One leadership's watch over nodes that contact standbys. ``report`` is the latest report."""

    def __init__(self, settings: ControllerSettings, loop: FleetLoop, clock: Clock) -> None:
        self.report = StandbyReport()
        self._loop = loop
        self._clock = clock
        resign_after_s = settings.leadership.resign_after_s
        self._after_s = resign_after_s
        self._recent_s = max(resign_after_s / 3, RECENT_HEARTBEATS * settings.heartbeat_interval_s)
        self._patience_s = settings.leadership.lease_renew_s
        self._reachability = LeaderReachability(resign_after_s, settings.leadership.lease_s)

    async def check(self, report: StandbyReport) -> Resignation | None:
        """Return a resignation if the standbys' report demands one; it is in the event log when this method returns."""
        self.report = report
        if not self._after_s:
            return None
        recent_nodes = 0
        if report.contacts:
            since = self._loop.now() - self._recent_s
            nodes = self._loop.state.node_runtime.values()
            recent_nodes = sum(node.heartbeats.last_seen_at >= since for node in nodes)
        found = self._reachability.evaluate(self._clock.monotonic(), recent_nodes, report)
        if isinstance(found, Resignation):
            return found if await self._write_event("controller.resigned", found.sentence) else None
        if found is not None:
            log.warning("%s", found.sentence)
            await self._write_event(found.kind, found.sentence)
        return None

    async def _write_event(self, kind: str, sentence: str) -> bool:
        """Return whether the entry was written to the event log. The lease is not renewed meanwhile."""

        def note(tx: Transaction, now: float) -> None:
            tx.add_event_log_entry(EventLogEntry(kind=kind, sentence=sentence, at=now, trace=new_trace()))

        try:
            async with asyncio.timeout(self._patience_s):
                await self._loop.submit(note)
        except (EverstepError, TimeoutError) as error:
            log.warning("%s could not be written to the event log: %s", kind, error or "the database is slow")
            return False
        return True
