"""Whether nodes reach the controller that leads, or one that stands by: when a leader gives its lease up for that.

A leader renews its lease as long as it reaches the database. Where none of its nodes reaches it, nothing is decided,
and no rule of the lease sees that. The standbys do: nodes insist at their doors
(``everstep_controller.leadership.lease``), and they write
down how many. Silence alone proves nothing: a fleet that is down, or cut off from everybody, is at nobody's door.

Pure: the time and what is known are arguments.
"""

from __future__ import annotations

import msgspec

from everstep.clock import Clock
from everstep.errors import Unavailable

# ---- lease
# Who leads: what a standby may conclude from the lease, and what a leader may still believe of its own.
#
# The lease is one row in the database, in the database's time, beside an advisory lock that the leader's session holds.
# A dead leader's session ends with it, and its lock with that: it is followed within a look of its standbys. A leader
# that is stopped, or cut off, keeps the lock, and is followed when the lease expires. Neither is what makes writes
# safe:
# that is the epoch, which every transaction checks (``everstep_controller.store.writer``).

SAFETY_SHARE = 0.1
"""Of the lease that a leader gives up early: far more than two clocks differ in their speed (a 1000th, at worst)."""


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """One look at the lease.

    ``epoch``: of the lease. ``newest``: of the newest life over this database, larger where that had no lease.
    ``free``: nobody held the lock of ``epoch``. ``expires_in_s``: by the database's clock; negative when it is over.
    ``heir``: for whom its holder gave it up a moment ago; empty where that was not so, or another leads since.
    """

    epoch: int
    newest_epoch: int
    holder: str
    address: str
    expires_in_s: float
    is_lock_free: bool
    successor: str = ""


def reason_to_lead(lease: LeaseView, name: str, *, database_was_away: bool) -> str:
    """Why this controller may take the lease; empty when another one has it.

    Args:
        name: of the one who asks.
        patient: the database itself was away a moment ago: its leader gets the time to come back first, for it may
            have decided things in memory that nobody else knows.
    """
    if not lease.holder:
        return "nobody has led before"
    if lease.successor not in ("", name):
        return ""
    if lease.is_lock_free and lease.holder == name:
        return "it was this one's, in the life before"
    if database_was_away:
        return ""
    if lease.is_lock_free:
        return f"the session of {lease.holder} is gone"
    if lease.expires_in_s <= 0:
        return f"the lease of {lease.holder} expired {-lease.expires_in_s:.1f} s ago"
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
    database is away for the others too is not known here (``everstep_controller.leadership.leader_checks``).
    """

    def __init__(self, clock: Clock, lease_s: float) -> None:
        self._clock = clock
        self._certain_s = lease_s * (1 - SAFETY_SHARE)
        self._until = clock.monotonic()
        self._absent_since: float | None = None

    def start(self, asked_at: float, extra_s: float) -> None:
        """The lease was taken, ``more_s`` longer than usual, as was asked for at ``asked_at`` (monotonic)."""
        self._until = asked_at + extra_s + self._certain_s

    def begin_renewal(self) -> float:
        """The database is asked now to renew the lease; when that is. A longer one ends with it, answered or not."""
        now = self._clock.monotonic()
        self._until = min(self._until, now + self._certain_s)
        return now

    def confirm_renewal(self, asked_at: float) -> None:
        """The database has renewed the lease, as it was asked to at ``asked_at``."""
        self._until = asked_at + self._certain_s
        self._absent_since = None

    def fail_renewal(self) -> None:
        """The database could not be asked."""
        now = self._clock.monotonic()
        if self._absent_since is None:
            self._absent_since = now
        if now < self._until:
            self._until = now + self._certain_s

    def outage_s(self) -> float | None:
        """For how long the lease could not be renewed; None where it was, at the last try."""
        return None if self._absent_since is None else self._clock.monotonic() - self._absent_since

    def is_certain(self) -> bool:
        """Whether this controller may answer as the leader now."""
        return self._clock.monotonic() < self._until

    def check(self) -> None:
        """Raises NotLeading where it may not."""
        if not self.is_certain():
            raise NotLeading("this controller led, and cannot be sure that it still does: ask another one, or again")


CUT_OFF_RATIO = 10
"""A leader is deaf where so many times the nodes that it hears are at one other controller's door. Where both hear a
part of the fleet neither place is right for all, and moving helps some at the cost of others."""
MIN_LOOKS = 4
"""Looks at which it must have been so, however long they took."""
MAX_DOUBLINGS = 6
"""A leader that follows one which resigned within the hour waits twice as long before it does so too, and so on, up to
64 times: moving did not help, so the network changes faster than anybody can follow."""
PARTITION_FACTOR = 2.0
"""So many times as long as before a resignation before a split is told: after a failover knocks of before count on for
a while."""


class StandbyReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the database holds beside the lease.

    ``knocks``: controllers that stand by and were knocked at in the last seconds, by how many nodes. ``resignations``:
    how many leaders in a row gave the lease up, each within an hour of the one before; 0 where the last is longer ago.
    """

    contacts: dict[str, int] = {}
    resignations: int = 0


class Resignation(msgspec.Struct, frozen=True):
    """This leader is to give its lease up for ``heir``."""

    successor: str
    sentence: str


class LeadershipNotice(msgspec.Struct, frozen=True):
    """Something that people should know: a line of the audit log."""

    kind: str
    sentence: str


class _Streak:
    """For how long something has been so at every look."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._looks = 0

    def lasted_s(self, now: float, *, is_true: bool) -> float:
        """One look more; 0.0 where it is not so, or was not looked at often enough."""
        if not is_true:
            self._since = None
            return 0.0
        if self._since is None:
            self._since, self._looks = now, 0
        self._looks += 1
        return now - self._since if self._looks >= MIN_LOOKS else 0.0


def is_cut_off(recent_nodes: int, contacts: int) -> bool:
    """Whether nodes reach another controller, at whose door ``knocks`` of them are, and nearly none this one, which
    heard ``heard`` of them lately."""
    return contacts > 0 and recent_nodes * CUT_OFF_RATIO <= contacts


class LeaderReachability:
    """One leadership's looks at it.

    Args:
        after_s: how long it must have been deaf without a break, where no leader resigned lately.
        gap_s: looks further apart than this see nothing in between: this process was stopped, or the database away.
    """

    def __init__(self, after_s: float, gap_s: float) -> None:
        self._after_s = after_s
        self._gap_s = gap_s
        self._looked_at: float | None = None
        self._begin_anew()
        self._split = False

    def _begin_anew(self) -> None:
        self._deaf, self._apart, self._together = _Streak(), _Streak(), _Streak()

    def resign_delay_s(self, resignations: int) -> float:
        """How long this leader must be deaf before it resigns."""
        return float(self._after_s * 2 ** min(resignations, MAX_DOUBLINGS))

    def evaluate(self, now: float, recent_nodes: int, report: StandbyReport) -> Resignation | LeadershipNotice | None:
        """What follows from one look; call it after each renewal of the lease.

        Args:
            now: monotonic seconds.
            heard: nodes that this leader has heard in the last seconds.
        """
        if self._looked_at is not None and now - self._looked_at > self._gap_s:
            self._begin_anew()
        self._looked_at = now
        heir, knocks = max(report.contacts.items(), key=lambda one: (one[1], one[0]), default=("", 0))
        deaf_s = self._deaf.lasted_s(now, is_true=is_cut_off(recent_nodes, knocks))
        apart_s = self._apart.lasted_s(now, is_true=knocks > 0)
        together_s = self._together.lasted_s(now, is_true=knocks == 0)
        if deaf_s >= self.resign_delay_s(report.resignations):
            return Resignation(heir, _resignation_message(heir, knocks, recent_nodes, deaf_s))
        if apart_s >= PARTITION_FACTOR * self._after_s and not self._split:
            self._split = True
            return LeadershipNotice("controller.partition_suspected", _partition_message(heir, knocks, recent_nodes))
        if together_s >= self._after_s and self._split:
            self._split = False
            return LeadershipNotice(
                "controller.partition_cleared", "no node insists any more on a controller that stands by"
            )
        return None


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _resignation_message(heir: str, knocks: int, heard: int, lasted_s: float) -> str:
    return (
        f"for {lasted_s:.0f} s {_nodes(knocks)} came again and again to {heir}, which stands by, and this leader heard "
        f"{heard or 'none'}: the network before this controller is suspected, nobody is judged by the silence, and the "
        f"lease goes to {heir}"
    )


def _partition_message(heir: str, knocks: int, heard: int) -> str:
    return (
        f"{_nodes(knocks)} came again and again to {heir}, which stands by, and this leader hears {heard}: the network "
        "before this controller is suspected, or nodes that were not told its address; what befalls them waits"
    )


# ---- knocks
# Nodes that come to a controller that stands by, again and again: they may not reach the one that leads.
#
# An agent that starts, or lost its session, tries the addresses that it was given in turn: it knocks here once, or for
# as
# long as nobody leads. One that does not get through to the leader goes on knocking.

CONTACT_GAP_S = 10.0
"""Seconds between two knocks of a node that count as one stay: an agent waits for an address that says nothing for up
to seconds before it tries the next one."""


class StandbyContacts:
    """Who knocked lately, and since when. For the event loop's thread.

    Args:
        insistent_s: for so long a node must have come again and again to count.
    """

    def __init__(self, clock: Clock, persistent_after_s: float) -> None:
        self._clock = clock
        self._insistent_s = persistent_after_s
        self._stays: dict[str, tuple[float, float]] = {}

    def record(self, node: str) -> None:
        """A node that proved who it is was sent on."""
        now = self._clock.monotonic()
        since, last = self._stays.get(node, (now, now))
        self._stays[node] = (since if now - last <= CONTACT_GAP_S else now, now)

    def count_persistent(self) -> int:
        """How many different nodes come again and again."""
        now = self._clock.monotonic()
        self._stays = {node: stay for node, stay in self._stays.items() if now - stay[1] <= CONTACT_GAP_S}
        return sum(last - since >= self._insistent_s for since, last in self._stays.values())
