"""Run one controller's part in the leader election: watch the lease, take it when allowed, and renew it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from sqlalchemy import Engine

from everstep.clock import Clock
from everstep_controller.leadership.lease import (
    LeaseTenure,
    LeaseView,
    Resignation,
    StandbyContacts,
    StandbyReport,
    reason_to_lead,
)
from everstep_controller.leadership.takeover_gate import TakeoverGate
from everstep_controller.runtime.startup_state import KnownRecords
from everstep_controller.store.database_errors import DatabaseUnavailable, LeadershipLost, LeaseResigned
from everstep_controller.store.leases import LeaseSession, claim
from everstep_controller.store.rows import LoadedState
from everstep_controller.store.threads import CallTimeout, DatabaseStore, DatabaseThread

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.1
"""Seconds between reads of the lease. A leader's death is noticed this soon, for ten small statements per second."""
STARTUP_LEASE_S = 30.0
"""Extra seconds of the first lease: restoring a large fleet keeps the event loop from renewing it. A leader that dies
meanwhile is still noticed by its released lock."""
OUTAGE_LOOK_INTERVAL_S = 0.5
"""Seconds between reads of the lease while the database is unavailable."""
CONTACT_WRITE_INTERVAL_S = 2.0
"""Seconds between writes of a standby's count of persistent nodes, while there are any."""

CheckStandbys = Callable[[StandbyReport], Awaitable[Resignation | None]]
"""Returns a leader's conclusion from the reports of standbys."""


class ElectedState(NamedTuple):
    """The state that a new leader starts from, and its tenure."""

    loaded: LoadedState
    known_records: KnownRecords
    tenure: LeaseTenure


class LeaseCandidate:
    """One controller's database session, from standing by to the end of the tenure that follows.

    Args:
        name: unique name of this controller.
        address: where others reach this controller, stored as a hint; empty for none.
        lease_s: seconds that the lease lasts.
        renew_s: seconds between renewals.
        takeover_gate: closed while the lease is taken. The caller opens it once this controller leads.
        contacts: nodes that contacted this standby.
        resigned_before: this controller gave up the lease because nodes did not reach it, so others go first.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        *,
        name: str,
        address: str,
        lease_s: float,
        renew_s: float,
        takeover_gate: TakeoverGate,
        contacts: StandbyContacts,
        resigned_before: bool = False,
    ) -> None:
        self._session = LeaseSession(engine)
        self._lane = DatabaseThread("lease", self._session.abort)
        self._engine = engine
        self._clock = clock
        self._name = name
        self._address = address
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._takeover_gate = takeover_gate
        self._contacts = contacts
        self._resigned_before = resigned_before
        self._vacant_since: float | None = None
        self._write_contacts_at = 0.0
        self._patient_until = 0.0
        self._outage = ""
        self.leader: LeaseView | None = None
        self.first_look_done = asyncio.Event()

    async def wait_for_lease(self, store: DatabaseStore, known_records: Callable[[], KnownRecords]) -> ElectedState:
        """Stand by until this controller leads. Pass the records read ahead in ``known_records``."""
        while True:
            seen = await self._wait_for_reason()
            self._takeover_gate.close()
            try:
                won = await self._take_lease(seen, store, known_records())
            except LeadershipLost as error:
                log.info("the lease was not taken: %s", error)
                won = None
            except (DatabaseUnavailable, CallTimeout) as error:
                self._note_outage(str(error))
                won = None
            if won is not None:
                return won
            self._takeover_gate.open()
            await asyncio.sleep(LOOK_INTERVAL_S)

    async def renew_until_lost(self, epoch: int, tenure: LeaseTenure, check_standbys: CheckStandbys) -> None:
        """Renew the lease until it is lost. ``check_standbys`` runs after each renewal.

        Raises:
            LeadershipLost: another controller has the lease.
            LeaseResigned: ``check_standbys`` asked to give the lease up.
        """
        asked_at = self._clock.monotonic()
        while True:
            await asyncio.sleep(max(0.0, asked_at + self._renew_s - self._clock.monotonic()))
            asked_at = tenure.begin_renewal()
            try:
                told = await self._lane.call(lambda: self._renew(epoch), self._renew_s)
                tenure.confirm_renewal(asked_at)
                self._note_recovery()
                if (resignation := await check_standbys(told)) is not None:
                    await self._resign(epoch, resignation)
            except (DatabaseUnavailable, CallTimeout) as error:
                tenure.fail_renewal()
                self._note_outage(str(error))

    async def close(self) -> None:
        """End the session, which frees the lease's lock at once."""
        await asyncio.to_thread(self._lane.close, self._session.close)
        self._engine.dispose()

    def _renew(self, epoch: int) -> StandbyReport:
        # A broken session loses the lock, and a standby that reads the lease holds the lock for a moment.
        self._session.lock_epoch(epoch)
        self._session.renew(epoch, self._lease_s)
        return self._session.read_standby_report()

    async def _resign(self, epoch: int, resignation: Resignation) -> None:
        """Record the resignation.

        The lease stays ours until the session ends, when this controller no longer answers.
        """
        await self._lane.call(lambda: self._session.resign(epoch, resignation.successor), self._renew_s)
        raise LeaseResigned(resignation.sentence)

    async def _wait_for_reason(self) -> LeaseView:
        """Wait until this controller has a reason to lead."""
        while True:
            seen = await self._read_lease()
            if seen is not None:
                reason = reason_to_lead(
                    seen, self._name, database_was_away=self._clock.monotonic() < self._patient_until
                )
                if reason and not self._yields_to_successor():
                    log.info("taking the lease: %s", reason)
                    return seen
                if not reason:
                    self._vacant_since = None
                    self._note_leader(seen)
                await self._write_contacts()
            self.first_look_done.set()
            await asyncio.sleep(OUTAGE_LOOK_INTERVAL_S if seen is None else LOOK_INTERVAL_S)

    def _yields_to_successor(self) -> bool:
        """Return whether to wait with a free lease. Another standby would take it within one read of the lease."""
        now = self._clock.monotonic()
        if self._vacant_since is None:
            self._vacant_since = now
        waits = self._resigned_before and now < self._vacant_since + self._lease_s
        return waits and not self._contacts.count_persistent()

    async def _write_contacts(self) -> None:
        """Write the contacts if due. A failed write is repeated at the next time."""
        now = self._clock.monotonic()
        if now < self._write_contacts_at:
            return
        self._write_contacts_at = now + CONTACT_WRITE_INTERVAL_S
        if nodes := self._contacts.count_persistent():
            with contextlib.suppress(DatabaseUnavailable, CallTimeout):
                await self._lane.call(lambda: self._session.write_contacts(self._name, nodes), self._lease_s)

    async def _read_lease(self) -> LeaseView | None:
        """Return the lease, or None while the database is unavailable, which includes a database that is read-only."""
        try:
            seen = await self._lane.call(self._session.read, self._lease_s)
            if self._outage:
                await self._lane.call(self._session.try_writing, self._lease_s)
        except (DatabaseUnavailable, CallTimeout) as error:
            self._note_outage(str(error))
            return None
        if self._outage:
            self._patient_until = self._clock.monotonic() + self._lease_s
            self._note_recovery()
        return seen

    async def _take_lease(self, seen: LeaseView, store: DatabaseStore, known: KnownRecords) -> ElectedState | None:
        """Take the epoch's lock before its lease: a reader of the epoch must never find the lock free while we live."""
        epoch = seen.newest_epoch + 1
        if not await self._lane.call(lambda: self._session.lock_epoch(epoch), self._lease_s):
            await self._lane.call(lambda: self._session.end_silent_holder(epoch, self._lease_s), self._lease_s)
            return None
        if not seen.is_lock_free and seen.holder != self._name:
            await self._lane.call(lambda: self._session.end_sessions_of(seen.holder), self._lease_s)
        tenure = LeaseTenure(self._clock, self._lease_s)
        asked_at, first_s = self._clock.monotonic(), self._lease_s + STARTUP_LEASE_S
        speaking = asyncio.create_task(self._keep_lock_alive(epoch), name="lease")
        try:
            loaded = await store.take_over(
                expected=seen.newest_epoch,
                claim=claim(self._name, self._address, first_s, is_lock_free=seen.is_lock_free),
                row_versions=known.row_versions,
            )
        finally:
            speaking.cancel()
        tenure.start(asked_at, STARTUP_LEASE_S)
        return ElectedState(loaded, known, tenure)

    async def _keep_lock_alive(self, epoch: int) -> None:
        """Keep the session active while the lease is taken: other standbys wait while the lock's holder is active."""
        while True:
            await asyncio.sleep(self._renew_s)
            with contextlib.suppress(DatabaseUnavailable, CallTimeout):
                await self._lane.call(lambda: self._touch_lock(epoch), self._renew_s)

    def _touch_lock(self, epoch: int) -> None:
        self._session.lock_epoch(epoch)  # as in _renew
        self._session.touch()

    def _note_leader(self, seen: LeaseView) -> None:
        if self.leader is None or self.leader.epoch != seen.epoch:
            log.info("standing by: %s leads (epoch %d)", seen.holder, seen.epoch)
        self.leader = seen

    def _note_outage(self, reason: str) -> None:
        if not self._outage:
            log.warning("the lease cannot be asked for: %s", reason)
        self._outage = reason

    def _note_recovery(self) -> None:
        if self._outage:
            log.info("the lease can be asked for again")
        self._outage = ""
