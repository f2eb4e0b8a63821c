"""Whether nodes reach the controller that leads, or one that stands by: when a leader gives its lease up for that.

A leader renews its lease as long as it reaches the database. Where none of its nodes reaches it, nothing is decided,
and no rule of the lease sees that. The standbys do: nodes insist at their doors (``controller.knocks``), and they write
down how many. Silence alone proves nothing: a fleet that is down, or cut off from everybody, is at nobody's door.

Pure: the time and what is known are arguments.
"""

from __future__ import annotations

import msgspec

NEARLY_NONE = 10
"""A leader is deaf where so many times the nodes that it hears are at one other controller's door. Where both hear a
part of the fleet neither place is right for all, and moving helps some at the cost of others."""
LEAST_LOOKS = 4
"""Looks at which it must have been so, however long they took."""
MOST_DOUBLINGS = 6
"""A leader that follows one which resigned within the hour waits twice as long before it does so too, and so on, up to
64 times: moving did not help, so the network changes faster than anybody can follow."""
SPLIT_AFTER = 2.0
"""So many times as long as before a resignation before a split is told: after a failover knocks of before count on for
a while."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """What the database holds beside the lease.

    ``knocks``: controllers that stand by and were knocked at in the last seconds, by how many nodes. ``resignations``:
    how many leaders in a row gave the lease up, each within an hour of the one before; 0 where the last is longer ago.
    """

    knocks: dict[str, int] = {}
    resignations: int = 0


class Resignation(msgspec.Struct, frozen=True):
    """This leader is to give its lease up for ``heir``."""

    heir: str
    sentence: str


class Notice(msgspec.Struct, frozen=True):
    """Something that people should know: a line of the audit log."""

    kind: str
    sentence: str


class _Streak:
    """For how long something has been so at every look."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._looks = 0

    def lasted_s(self, now: float, *, holds: bool) -> float:
        """One look more; 0.0 where it is not so, or was not looked at often enough."""
        if not holds:
            self._since = None
            return 0.0
        if self._since is None:
            self._since, self._looks = now, 0
        self._looks += 1
        return now - self._since if self._looks >= LEAST_LOOKS else 0.0


def is_deaf(heard: int, knocks: int) -> bool:
    """Whether nodes reach another controller, at whose door ``knocks`` of them are, and nearly none this one, which
    heard ``heard`` of them lately."""
    return knocks > 0 and heard * NEARLY_NONE <= knocks


class Reach:
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

    def patience_s(self, resignations: int) -> float:
        """How long this leader must be deaf before it resigns."""
        return float(self._after_s * 2 ** min(resignations, MOST_DOUBLINGS))

    def look(self, now: float, heard: int, told: Told) -> Resignation | Notice | None:
        """What follows from one look; call it after each renewal of the lease.

        Args:
            now: monotonic seconds.
            heard: nodes that this leader has heard in the last seconds.
        """
        if self._looked_at is not None and now - self._looked_at > self._gap_s:
            self._begin_anew()
        self._looked_at = now
        heir, knocks = max(told.knocks.items(), key=lambda one: (one[1], one[0]), default=("", 0))
        deaf_s = self._deaf.lasted_s(now, holds=is_deaf(heard, knocks))
        apart_s = self._apart.lasted_s(now, holds=knocks > 0)
        together_s = self._together.lasted_s(now, holds=knocks == 0)
        if deaf_s >= self.patience_s(told.resignations):
            return Resignation(heir, _resigns(heir, knocks, heard, deaf_s))
        if apart_s >= SPLIT_AFTER * self._after_s and not self._split:
            self._split = True
            return Notice("controller.split", _split(heir, knocks, heard))
        if together_s >= self._after_s and self._split:
            self._split = False
            return Notice("controller.split_over", "no node insists any more on a controller that stands by")
        return None


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


def _resigns(heir: str, knocks: int, heard: int, lasted_s: float) -> str:
    return (
        f"for {lasted_s:.0f} s {_nodes(knocks)} came again and again to {heir}, which stands by, and this leader heard "
        f"{heard or 'none'}: the network before this controller is suspected, nobody is judged by the silence, and the "
        f"lease goes to {heir}"
    )


def _split(heir: str, knocks: int, heard: int) -> str:
    return (
        f"{_nodes(knocks)} came again and again to {heir}, which stands by, and this leader hears {heard}: the network "
        "before this controller is suspected, or nodes that were not told its address; what befalls them waits"
    )
