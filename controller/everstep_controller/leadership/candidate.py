"""One controller's part in the choice of a leader: it watches the lease, takes it when it may, and renews it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from sqlalchemy import Engine

from everstep.clock import Clock
from everstep_controller.leadership.lease import Knocks, Resignation, Seen, Tenure, Told, reason_to_lead
from everstep_controller.leadership.takeover_gate import Threshold
from everstep_controller.runtime.startup_state import Known
from everstep_controller.store.database_errors import Resigned, StoreAway, Superseded
from everstep_controller.store.leases import LeaseSession, claim
from everstep_controller.store.rows import Loaded
from everstep_controller.store.threads import Hangs, Lane, Store

log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Seconds between two looks at the lease: how soon a leader's death is seen, for ten small statements a second."""
STARTING_S = 30.0
"""What the first lease is longer by: restoring a large fleet keeps the event loop from renewing it. A leader that dies
meanwhile is missed by its lock as ever."""
ABSENT_S = 0.5
"""The same while the database is away."""
TELL_S = 2.0
"""Seconds between two times that a standby writes down how many nodes insist on it, while any does."""

Watch = Callable[[Told], Awaitable[Resignation | None]]
"""What a leader concludes from what standbys have written down."""


class Won(NamedTuple):
    """What a leader starts from, and how long it leads."""

    loaded: Loaded
    known: Known
    tenure: Tenure


class Candidate:
    """A database session for one stay as standby and the tenure that follows it.

    Args:
        name: of this controller, unlike any other's.
        address: where others reach it, told as a hint; empty for none.
        lease_s, renew_s: how long the lease holds, and how often its holder renews it.
        threshold: closed while the lease is taken. Who goes on from there opens it.
        knocks: nodes that were sent on.
        goes_last: this one gave the lease up, since nodes did not reach it: any other may have it first.
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
        threshold: Threshold,
        knocks: Knocks,
        goes_last: bool = False,
    ) -> None:
        self._session = LeaseSession(engine)
        self._lane = Lane("lease", self._session.abort)
        self._engine = engine
        self._clock = clock
        self._name = name
        self._address = address
        self._lease_s = lease_s
        self._renew_s = renew_s
        self._threshold = threshold
        self._knocks = knocks
        self._goes_last = goes_last
        self._vacant_since: float | None = None
        self._tell_at = 0.0
        self._patient_until = 0.0
        self._away = ""
        self.leader: Seen | None = None
        self.looked = asyncio.Event()

    async def elected(self, store: Store, known: Callable[[], Known]) -> Won:
        """Stands by until this controller leads; what it starts from. ``known``: what it has read ahead by then."""
        while True:
            seen = await self._turn()
            self._threshold.close()
            try:
                won = await self._take(seen, store, known())
            except Superseded as error:
                log.info("the lease was not taken: %s", error)
                won = None
            except (StoreAway, Hangs) as error:
                self._note_away(str(error))
                won = None
            if won is not None:
                return won
            self._threshold.open()
            await asyncio.sleep(LOOK_S)

    async def renewing(self, epoch: int, tenure: Tenure, watch: Watch) -> None:
        """Keeps the lease for as long as it lasts. Raises Superseded when another controller has it, and Resigned when
        ``watch``, which is asked after each renewal, would have it given up."""
        asked_at = self._clock.monotonic()
        while True:
            await asyncio.sleep(max(0.0, asked_at + self._renew_s - self._clock.monotonic()))
            asked_at = tenure.asks()
            try:
                told = await self._lane.call(lambda: self._renew(epoch), self._renew_s)
                tenure.renewed(asked_at)
                self._note_back()
                if (resignation := await watch(told)) is not None:
                    await self._resign(epoch, resignation)
            except (StoreAway, Hangs) as error:
                tenure.unreachable()
                self._note_away(str(error))

    async def close(self) -> None:
        """Ends the session: whoever waits for the lease may have it at once."""
        await asyncio.to_thread(self._lane.close, self._session.close)
        self._engine.dispose()

    def _renew(self, epoch: int) -> Told:
        self._session.hold(epoch)  # it is lost with a session that broke; a standby that looks has it for a moment
        self._session.renew(epoch, self._lease_s)
        return self._session.told()

    async def _resign(self, epoch: int, resignation: Resignation) -> None:
        """The lease stays ours until this session ends, when nothing is answered here any more."""
        await self._lane.call(lambda: self._session.resign(epoch, resignation.heir), self._renew_s)
        raise Resigned(resignation.sentence)

    async def _turn(self) -> Seen:
        """Waits until there is a reason to lead."""
        while True:
            seen = await self._look()
            if seen is not None:
                reason = reason_to_lead(seen, self._name, patient=self._clock.monotonic() < self._patient_until)
                if reason and not self._lets_others_first():
                    log.info("taking the lease: %s", reason)
                    return seen
                if not reason:
                    self._vacant_since = None
                    self._note_leader(seen)
                await self._tell_knocks()
            self.looked.set()
            await asyncio.sleep(ABSENT_S if seen is None else LOOK_S)

    def _lets_others_first(self) -> bool:
        """The lease may be had. Whoever else stands by has it within a look; nobody does if it is still there later."""
        now = self._clock.monotonic()
        if self._vacant_since is None:
            self._vacant_since = now
        waits = self._goes_last and now < self._vacant_since + self._lease_s
        return waits and not self._knocks.insistent()

    async def _tell_knocks(self) -> None:
        """Nothing depends on it here: what cannot be written is written the next time."""
        now = self._clock.monotonic()
        if now < self._tell_at:
            return
        self._tell_at = now + TELL_S
        if nodes := self._knocks.insistent():
            with contextlib.suppress(StoreAway, Hangs):
                await self._lane.call(lambda: self._session.tell(self._name, nodes), self._lease_s)

    async def _look(self) -> Seen | None:
        """None while the database is away. It is back when it can be written, as its leader has to."""
        try:
            seen = await self._lane.call(self._session.look, self._lease_s)
            if self._away:
                await self._lane.call(self._session.try_writing, self._lease_s)
        except (StoreAway, Hangs) as error:
            self._note_away(str(error))
            return None
        if self._away:
            self._patient_until = self._clock.monotonic() + self._lease_s
            self._note_back()
        return seen

    async def _take(self, seen: Seen, store: Store, known: Known) -> Won | None:
        """The lock of the epoch to come first: who sees that epoch must never find its lock free while we live."""
        epoch = seen.newest + 1
        if not await self._lane.call(lambda: self._session.hold(epoch), self._lease_s):
            await self._lane.call(lambda: self._session.end_silent_holder(epoch, self._lease_s), self._lease_s)
            return None
        if not seen.free and seen.holder != self._name:
            await self._lane.call(lambda: self._session.end_sessions_of(seen.holder), self._lease_s)
        tenure = Tenure(self._clock, self._lease_s)
        asked_at, first_s = self._clock.monotonic(), self._lease_s + STARTING_S
        speaking = asyncio.create_task(self._speaking(epoch), name="lease")
        try:
            loaded = await store.take_over(
                expected=seen.newest,
                claim=claim(self._name, self._address, first_s, free=seen.free),
                known=known.marks,
            )
        finally:
            speaking.cancel()
        tenure.began(asked_at, STARTING_S)
        return Won(loaded, known, tenure)

    async def _speaking(self, epoch: int) -> None:
        """While the lease is taken: other standbys wait for as long as the lock's holder says something."""
        while True:
            await asyncio.sleep(self._renew_s)
            with contextlib.suppress(StoreAway, Hangs):
                await self._lane.call(lambda: self._speak(epoch), self._renew_s)

    def _speak(self, epoch: int) -> None:
        self._session.hold(epoch)  # as in _renew
        self._session.speak()

    def _note_leader(self, seen: Seen) -> None:
        if self.leader is None or self.leader.epoch != seen.epoch:
            log.info("standing by: %s leads (epoch %d)", seen.holder, seen.epoch)
        self.leader = seen

    def _note_away(self, why: str) -> None:
        if not self._away:
            log.warning("the lease cannot be asked for: %s", why)
        self._away = why

    def _note_back(self) -> None:
        if self._away:
            log.info("the lease can be asked for again")
        self._away = ""
