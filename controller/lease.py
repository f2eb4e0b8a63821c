"""Who leads: what a standby may conclude from the lease, and what a leader may still believe of its own.

The lease is one row in the database, in the database's time, beside an advisory lock that the leader's session holds.
A dead leader's session ends with it, and its lock with that: it is followed within a look of its standbys. A leader
that is stopped, or cut off, keeps the lock, and is followed when the lease expires. Neither is what makes writes safe:
that is the epoch, which every transaction checks (``controller.store.writer``).
"""

from __future__ import annotations

import msgspec

from everstep.clock import Clock
from everstep.errors import Unavailable

SAFETY_SHARE = 0.1
"""Of the lease that a leader gives up early: far more than two clocks differ in their speed (a 1000th, at worst)."""


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the lease.

    ``epoch``: of the lease. ``newest``: of the newest life over this database, larger where that had no lease.
    ``free``: nobody held the lock of ``epoch``. ``expires_in_s``: by the database's clock; negative when it is over.
    ``heir``: for whom its holder gave it up a moment ago; empty where that was not so, or another leads since.
    """

    epoch: int
    newest: int
    holder: str
    address: str
    expires_in_s: float
    free: bool
    heir: str = ""


def reason_to_lead(seen: Seen, name: str, *, patient: bool) -> str:
    """Why this controller may take the lease; empty when another one has it.

    Args:
        name: of the one who asks.
        patient: the database itself was away a moment ago: its leader gets the time to come back first, for it may
            have decided things in memory that nobody else knows.
    """
    if not seen.holder:
        return "nobody has led before"
    if seen.heir not in ("", name):
        return ""
    if seen.free and seen.holder == name:
        return "it was this one's, in the life before"
    if patient:
        return ""
    if seen.free:
        return f"the session of {seen.holder} is gone"
    if seen.expires_in_s <= 0:
        return f"the lease of {seen.holder} expired {-seen.expires_in_s:.1f} s ago"
    return ""


class NotLeading(Unavailable):
    """This controller does not lead. ``leader``: the address of the one that does, empty where it is not known."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message, 0.2)
        self.leader = leader


class Tenure:
    """What a leader knows of its own lease by its own monotonic clock.

    It may answer as leader while its lease cannot have been taken: a renewal counts from the moment it was asked for.
    While the database is away nobody can take it either; then each failed renewal carries the leader on, as long as
    they follow one another without a gap. A process that was stopped has that gap, and must renew first. Whether the
    database is away for the others too is not known here (``controller.doubt``).
    """

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._certain_s = lease_s * (1 - SAFETY_SHARE)
        self._until = clock.monotonic()
        self._absent_since: float | None = None

    def began(self, asked_at: float, more_s: float) -> None:
        """The lease was taken, ``more_s`` longer than usual, as was asked for at ``asked_at`` (monotonic)."""
        self._until = asked_at + more_s + self._certain_s

    def asks(self) -> float:
        """The database is asked now to renew the lease; when that is. A longer one ends with it, answered or not."""
        now = self._clock.monotonic()
        self._until = min(self._until, now + self._certain_s)
        return now

    def renewed(self, asked_at: float) -> None:
        """The database has renewed the lease, as it was asked to at ``asked_at``."""
        self._until = asked_at + self._certain_s
        self._absent_since = None

    def unreachable(self) -> None:
        """The database could not be asked."""
        now = self._clock.monotonic()
        if self._absent_since is None:
            self._absent_since = now
        if now < self._until:
            self._until = now + self._certain_s

    def absent_s(self) -> float | None:
        """For how long the lease could not be renewed; None where it was, at the last try."""
        return None if self._absent_since is None else self._clock.monotonic() - self._absent_since

    def certain(self) -> bool:
        """Whether this controller may answer as the leader now."""
        return self._clock.monotonic() < self._until

    def check(self) -> None:
        """Raises NotLeading where it may not."""
        if not self.certain():
            raise NotLeading("this controller led, and cannot be sure that it still does: ask another one, or again")
