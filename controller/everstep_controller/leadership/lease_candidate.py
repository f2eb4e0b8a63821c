"""Run one controller's part in the leader election: watch the lease, take it when allowed, and renew it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from sqlalchemy import Engine

from everstep.clock import Clock
from everstep_controller.leadership import lease
from everstep_controller.leadership.lease import LeaseTenure
from everstep_controller.leadership.takeover_gate import TakeoverGate
from everstep_controller.runtime.startup_state import NO_RECORDS, KnownRecords
from everstep_controller.store.database_errors import DatabaseUnavailable, LeadershipLost, LeaseResigned
from everstep_controller.store.leases import LeaseSession, claim
from everstep_controller.store.rows import LeaseView, LoadedState, StandbyReport
from everstep_controller.store.threads import CallTimeout, DatabaseStore, DatabaseThread

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1
"""Seconds between reads of the lease. A leader's death is noticed this soon, for ten small statements per second."""
STARTUP_LEASE_S = 30.0
"""Extra seconds of the first lease, because restoring a large fleet delays renewals."""
OUTAGE_LOOK_INTERVAL_S = 0.5
"""Seconds between reads of the lease while the database is unavailable."""
CONTACT_WRITE_INTERVAL_S = 2.0
"""Seconds between writes of a standby's count of persistent nodes, while there are any."""

CheckStandbys = Callable[[StandbyReport], Awaitable[lease.Resignation | None]]
"""Returns a leader's conclusion from the reports of standbys."""


class ElectedState(NamedTuple):
    """The state that a new leader starts from, and its tenure; None if no other controller can lead."""

    loaded: LoadedState
    known_records: KnownRecords = NO_RECORDS
    tenure: LeaseTenure | None = None


@dataclass(eq=False)
class LeaseCandidate:
    """One controller's database session, from standing by to the end of the tenure that follows."""

    engine: Engine
    clock: Clock
    _: KW_ONLY
    name: str  # unique name of this controller
    address: str  # where others reach this controller, stored as a hint; empty for none
    lease_s: float
    renew_s: float
    takeover_gate: TakeoverGate  # closed while the lease is taken. The caller opens it once this controller leads
    contacts: lease.StandbyContacts  # nodes that contacted this standby
    # This controller gave up the lease because nodes did not reach it, so others go first.
    resigned_before: bool = False

    def __post_init__(self) -> None:
        self._session = LeaseSession(self.engine)
        self._lane = DatabaseThread("lease", self._session.abort)
        self._vacant_since: float | None = None
        self._write_contacts_at = 0.0
        self._yield_until = 0.0
        self._outage = ""
        self.leader: LeaseView | None = None
        self.first_look_done = asyncio.Event()

    async def wait_for_lease(self, store: DatabaseStore, known_records: Callable[[], KnownRecords]) -> ElectedState:
        """Stand by until this controller leads. Pass the records read ahead in ``known_records``."""
        while True:
            seen = await self._wait_for_reason()
            self.takeover_gate.close()
            try:
                if (won := await self._take_lease(seen, store, known_records())) is not None:
                    return won
            except LeadershipLost as error:
                log.info("the lease was not taken: %s", error)
            except (DatabaseUnavailable, CallTimeout) as error:
                self._note_outage(str(error))
            self.takeover_gate.open()
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def renew_until_lost(self, epoch: int, tenure: LeaseTenure, check_standbys: CheckStandbys) -> None:
        """Renew the lease, then run ``check_standbys``, until LeadershipLost or, if that wants it, LeaseResigned."""
        requested_at = self.clock.monotonic()
        while True:
            await asyncio.sleep(max(0.0, requested_at + self.renew_s - self.clock.monotonic()))
            requested_at = tenure.begin_renewal()
            try:
                report = await self._lane.call(lambda: self._renew(epoch), self.renew_s)
                tenure.confirm_renewal(requested_at)
                self._note_recovery()
                if (resignation := await check_standbys(report)) is not None:
                    resign = functools.partial(self._session.resign, epoch, resignation.successor)
                    await self._lane.call(resign, self.renew_s)
                    # The lease stays ours until the session ends, after the last answer.
                    raise LeaseResigned(resignation.sentence)
            except (DatabaseUnavailable, CallTimeout) as error:
                tenure.fail_renewal()
                self._note_outage(str(error))

    async def close(self) -> None:
        """End the session, which frees the lease's lock at once."""
        await asyncio.to_thread(self._lane.close, self._session.close)
        self.engine.dispose()

    def _renew(self, epoch: int) -> StandbyReport:
        # A broken session loses the lock, and a standby that reads the lease holds the lock for a moment.
        self._session.lock_epoch(epoch)
        self._session.renew(epoch, self.lease_s)
        return self._session.read_standby_report()

    async def _wait_for_reason(self) -> LeaseView:
        """Wait until this controller has a reason to lead."""
        while True:
            seen = await self._read_lease()
            if seen is not None:
                was_unavailable = self.clock.monotonic() < self._yield_until
                reason = lease.reason_to_lead(seen, self.name, database_was_unavailable=was_unavailable)
                if reason and not self._yields_to_successor():
                    log.info("taking the lease: %s", reason)
                    return seen
                if not reason:
                    self._vacant_since = None
                    if self.leader is None or self.leader.epoch != seen.epoch:
                        log.info("standby: %s leads (epoch %d)", seen.holder, seen.epoch)
                    self.leader = seen
                await self._write_contacts()
            self.first_look_done.set()
            await asyncio.sleep(OUTAGE_LOOK_INTERVAL_S if seen is None else LOOK_INTERVAL_S)

    def _yields_to_successor(self) -> bool:
        """Return whether to wait with a free lease. Another standby would take it within one read of the lease."""
        now = self.clock.monotonic()
        if self._vacant_since is None:
            self._vacant_since = now
        waits = self.resigned_before and now < self._vacant_since + self.lease_s
        return waits and not self.contacts.count_persistent()

    async def _write_contacts(self) -> None:
        """Write the contacts if due. A failed write is repeated at the next time."""
        now = self.clock.monotonic()
        if now < self._write_contacts_at:
            return
        self._write_contacts_at = now + CONTACT_WRITE_INTERVAL_S
        if nodes := self.contacts.count_persistent():
            with contextlib.suppress(DatabaseUnavailable, CallTimeout):
                await self._lane.call(lambda: self._session.write_contacts(self.name, nodes), self.lease_s)

    async def _read_lease(self) -> LeaseView | None:
        """Return the lease, or None while the database is unavailable, which includes a database that is read-only."""
        try:
            seen = await self._lane.call(self._session.read, self.lease_s)
            if self._outage:
                await self._lane.call(self._session.try_writing, self.lease_s)
        except (DatabaseUnavailable, CallTimeout) as error:
            self._note_outage(str(error))
            return None
        if self._outage:
            self._yield_until = self.clock.monotonic() + self.lease_s
            self._note_recovery()
        return seen

    async def _take_lease(self, seen: LeaseView, store: DatabaseStore, known: KnownRecords) -> ElectedState | None:
        """Take the epoch's lock before its lease: a reader of the epoch must never find the lock free while we live."""
        epoch = seen.newest_epoch + 1
        if not await self._lane.call(lambda: self._session.lock_epoch(epoch), self.lease_s):
            await self._lane.call(lambda: self._session.end_silent_holder(epoch, self.lease_s), self.lease_s)
            return None
        if not seen.is_lock_free and seen.holder != self.name:
            await self._lane.call(lambda: self._session.end_sessions_of(seen.holder), self.lease_s)
        tenure = LeaseTenure(self.clock, self.lease_s)
        requested_at, first_s = self.clock.monotonic(), self.lease_s + STARTUP_LEASE_S
        speaking = asyncio.create_task(self._keep_lock_alive(epoch), name="lease")
        try:
            loaded = await store.take_over(
                expected=seen.newest_epoch,
                claim=claim(self.name, self.address, first_s, is_lock_free=seen.is_lock_free),
                row_versions=known.row_versions,
            )
        finally:
            speaking.cancel()
        tenure.start(requested_at, STARTUP_LEASE_S)
        return ElectedState(loaded, known, tenure)

    async def _keep_lock_alive(self, epoch: int) -> None:
        """Keep the session active while the lease is taken: other standbys wait while the lock's holder is active."""
        while True:
            await asyncio.sleep(self.renew_s)
            with contextlib.suppress(DatabaseUnavailable, CallTimeout):
                await self._lane.call(lambda: self._session.lock_epoch(epoch), self.renew_s)  # as in _renew
                await self._lane.call(self._session.touch, self.renew_s)

    def _note_outage(self, reason: str) -> None:
        if not self._outage:
            log.warning("the lease cannot be read or renewed: %s", reason)
        self._outage = reason

    def _note_recovery(self) -> None:
        if self._outage:
            log.info("the lease can be read and renewed again")
        self._outage = ""
