"""Decide who may take the lease, how long a leader may rely on it, and when it resigns. Pure: facts are arguments."""

from __future__ import annotations

import msgspec

from everstep.clock import Clock
from everstep.errors import Unavailable
from everstep_controller.store.rows import LeaseView, StandbyReport

# ---- lease
# The lease is one row in the database, in the database's time, beside an advisory lock that the leader's session holds.
# A dead leader's session releases the lock, and a standby follows at its next read. A leader that is paused or cut off
# keeps the lock, and is followed when the lease expires. Writes are safe because every transaction checks the epoch
# (``everstep_controller.store.writer``).

SAFETY_SHARE = 0.1
"""Share of the lease that a leader gives up early: far more than the speeds of two clocks differ (0.1% at worst)."""


def reason_to_lead(lease: LeaseView, name: str, *, database_was_unavailable: bool) -> str:
    """Return why ``name`` may take the lease ("" if not). After an outage the old leader may return first."""
    if not lease.holder:
        return "no controller has led before"
    if lease.successor not in ("", name):
        return ""
    if lease.is_lock_free and lease.holder == name:
        return "this controller held it before its restart"
    if database_was_unavailable:
        return ""
    if lease.is_lock_free:
        return f"the database session of {lease.holder} has ended"
    if lease.expires_in_s <= 0:
        return f"the lease of {lease.holder} expired {-lease.expires_in_s:.1f} s ago"
    return ""


class NotLeadingError(Unavailable):
    """This controller does not lead. ``leader`` is the leader's address, or empty if unknown."""

    def __init__(self, message: str, leader: str = "") -> None:
        super().__init__(message, 0.2)
        self.leader = leader


class LeaseTenure:
    """A leader's knowledge of its own lease, by its monotonic clock.

    The leader may answer while no other controller can have taken its lease; a renewal counts from the moment of its
    request. While the database is unavailable none can take the lease either, so each failed renewal extends the tenure
    if renewals follow one another without a gap. A process that was paused has a gap, and must renew first. Whether the
    database is unavailable to others too is unknown here (see ``everstep_controller.leadership.leader_checks``).
    """

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._certain_s = lease_s * (1 - SAFETY_SHARE)
        self._until = clock.monotonic()
        self._outage_since: float | None = None

    def start(self, requested_at: float, extra_s: float) -> None:
        """Record that the lease was requested at ``requested_at`` (monotonic), ``extra_s`` longer than usual."""
        self._until = requested_at + extra_s + self._certain_s

    def begin_renewal(self) -> float:
        """Note and return the time of a renewal request. A longer lease is cut to the usual length."""
        now = self._clock.monotonic()
        self._until = min(self._until, now + self._certain_s)
        return now

    def confirm_renewal(self, requested_at: float) -> None:
        """Record that the database renewed the lease as requested at ``requested_at``."""
        self._until = requested_at + self._certain_s
        self._outage_since = None

    def fail_renewal(self) -> None:
        """Record that the database could not be reached."""
        now = self._clock.monotonic()
        if self._outage_since is None:
            self._outage_since = now
        if now < self._until:
            self._until = now + self._certain_s

    def outage_s(self) -> float | None:
        """Return the seconds since renewals began to fail, or None if the last one succeeded."""
        return None if self._outage_since is None else self._clock.monotonic() - self._outage_since

    def is_certain(self) -> bool:
        """Return whether this controller may answer as the leader now."""
        return self._clock.monotonic() < self._until

    def check(self) -> None:
        """Raise NotLeadingError if this controller may not answer as the leader."""
        if not self.is_certain():
            raise NotLeadingError("this controller is no longer certain to lead: ask another one, or try again")


# ---- resignation
# A leader renews its lease as long as it reaches the database, even if none of its nodes reaches the leader. Standbys
# detect this: nodes contact them persistently, and they write down how many. Missed heartbeats alone prove nothing,
# because a fleet that is down contacts no controller.

CUT_OFF_RATIO = 10
"""A leader is cut off if one standby has this many times as many contacting nodes as the leader hears. If both reach a
part of the fleet, moving helps some nodes at the cost of others."""
MIN_CHECKS = 4
"""Minimum number of consecutive checks that must agree, whatever time they take."""
MAX_DOUBLINGS = 6
"""Each resignation within an hour doubles the delay, up to 64 times, because moving did not help."""
PARTITION_FACTOR = 2.0
"""A partition is reported after this many resignation delays: contacts from before a failover count for a while."""


class Resignation(msgspec.Struct, frozen=True):
    """A decision that this leader gives its lease to ``successor``."""

    successor: str
    sentence: str


class LeadershipNotice(msgspec.Struct, frozen=True):
    """A notice to people, written to the event log."""

    kind: str
    sentence: str


class _Streak:
    """How long a condition has held at every check."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._checks = 0

    def lasted_s(self, now: float, *, is_true: bool) -> float:
        """Add one check. Return 0.0 if the condition is false or was checked too rarely."""
        if not is_true:
            self._since = None
            return 0.0
        if self._since is None:
            self._since, self._checks = now, 0
        self._checks += 1
        return now - self._since if self._checks >= MIN_CHECKS else 0.0


def is_cut_off(recent_nodes: int, contacts: int) -> bool:
    """Return whether ``contacts`` nodes reach a standby while hardly any reach this leader."""
    return contacts > 0 and recent_nodes * CUT_OFF_RATIO <= contacts


class LeaderReachability:
    """Evaluates whether nodes reach this leader, during one leadership.

    The leader resigns after being cut off for ``after_s`` without a break, longer after earlier resignations. After a
    gap of ``gap_s`` between checks the streaks restart, because the process or the database was unavailable.
    """

    def __init__(self, after_s: float, gap_s: float) -> None:
        self._after_s = after_s
        self._gap_s = gap_s
        self._checked_at: float | None = None
        self._restart_streaks()
        self._partitioned = False

    def _restart_streaks(self) -> None:
        self._cut_off, self._contacted, self._uncontacted = _Streak(), _Streak(), _Streak()

    def evaluate(self, now: float, recent_nodes: int, report: StandbyReport) -> Resignation | LeadershipNotice | None:
        """Evaluate one check: ``recent_nodes`` were heard recently. Call this after each renewal of the lease."""
        if self._checked_at is not None and now - self._checked_at > self._gap_s:
            self._restart_streaks()
        self._checked_at = now
        successor, contacting_nodes = max(report.contacts.items(), key=lambda one: (one[1], one[0]), default=("", 0))
        cut_off_s = self._cut_off.lasted_s(now, is_true=is_cut_off(recent_nodes, contacting_nodes))
        contacted_s = self._contacted.lasted_s(now, is_true=contacting_nodes > 0)
        uncontacted_s = self._uncontacted.lasted_s(now, is_true=contacting_nodes == 0)
        observed = (
            f"{contacting_nodes} node{'' if contacting_nodes == 1 else 's'} kept contacting standby {successor} while "
            "this leader received messages from"
        )
        if cut_off_s >= self._after_s * 2 ** min(report.resignations, MAX_DOUBLINGS):
            sentence = (
                f"for {cut_off_s:.0f} s {observed} {recent_nodes or 'none'}: this controller's network is suspected. "
                f"It resigns in favour of {successor}; no node is declared lost meanwhile"
            )
            return Resignation(successor, sentence)
        if contacted_s >= PARTITION_FACTOR * self._after_s and not self._partitioned:
            self._partitioned = True
            sentence = (
                f"{observed} {recent_nodes}: either this controller's network is at fault, or these nodes lack its "
                "address; no node is declared lost meanwhile"
            )
            return LeadershipNotice("controller.partition_suspected", sentence)
        if uncontacted_s >= self._after_s and self._partitioned:
            self._partitioned = False
            sentence = "nodes no longer keep contacting a standby controller"
            return LeadershipNotice("controller.partition_cleared", sentence)
        return None


# ---- contacts of a standby
# An agent that starts or loses its session tries its addresses in turn. It contacts a standby once, or for as long as
# no controller leads. An agent that does not reach the leader contacts the standby again and again.

CONTACT_GAP_S = 10.0
"""Maximum seconds between two contacts of a streak: agents wait some seconds for an address."""


class StandbyContacts:
    """Nodes that contacted this standby recently. A node counts after ``persistent_after_s`` of repeated contacts."""

    def __init__(self, clock: Clock, persistent_after_s: float) -> None:
        self._clock = clock
        self._persistent_after_s = persistent_after_s
        self._contacts: dict[str, tuple[float, float]] = {}

    def record(self, node: str) -> None:
        """Record a contact of an authenticated node."""
        now = self._clock.monotonic()
        since, last = self._contacts.get(node, (now, now))
        self._contacts[node] = (since if now - last <= CONTACT_GAP_S else now, now)

    def count_persistent(self) -> int:
        """Return the number of nodes that contact this standby persistently."""
        now = self._clock.monotonic()
        self._contacts = {
            node: contact for node, contact in self._contacts.items() if now - contact[1] <= CONTACT_GAP_S
        }
        return sum(last - since >= self._persistent_after_s for since, last in self._contacts.values())
