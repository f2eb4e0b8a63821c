"""How many steps apart snapshots are, so that training does not stand still for them for long.

Each rank measures for how long a snapshot holds up its training, and how long a step is (stopwatch.py). All take the
same pace, that of the rank that needs the slowest, from the same step on, without a collective: steps are counted in
windows of WINDOW. In a window's first quarter each rank says what it would have needed in the window before; in the
second rank 0 decides for the next window; from the third on all read that. Ranks are in lock step, and each has done
what it had to before it begins its next snapshot, at most MOST steps later: so whoever reads finds it written.

What the controller announces is stored at any pace, about twice a second.
"""

from __future__ import annotations

import logging
from math import ceil
from statistics import median
from typing import Protocol

log = logging.getLogger(__name__)

SHARE = 0.1
"""Of the training's time that may go by blocked by snapshots before they come less often."""
WORTH_S = 0.02
"""A snapshot that blocks for less than this comes with every step: a lost step costs more than it saves."""
SLACK = 0.8
"""Of SHARE, where they come more often again, so that a pace between two does not change in every window."""
NO_TIME_S = 1e-6
WINDOW = 64
MOST = 8
"""Steps apart, at most. A quarter of a window is twice as long."""


class Store(Protocol):
    """What is used of a generation's store."""

    def add(self, key: str, amount: int, /) -> int: ...

    def check(self, keys: list[str], /) -> bool: ...

    def get(self, key: str, /) -> bytes: ...

    def set(self, key: str, value: str, /) -> None: ...


def wanted(blocked_s: float, step_s: float, now: int) -> int:
    """Steps from one snapshot to the next, so that training is held up for SHARE of its time at most.

    Args:
        blocked_s: by each snapshot.
        step_s: a step without that.
        now: how many steps apart they are.
    """
    if blocked_s < WORTH_S:
        return 1

    def apart(share: float) -> int:
        return max(1, ceil(min(MOST, blocked_s * (1 - share) / (share * max(step_s, NO_TIME_S)))))

    needed = apart(SHARE)
    return needed if needed >= now else min(now, apart(SHARE * SLACK))


class Pace:
    """One rank's, in one generation. ``every``: fixed by the user; nothing is measured or told then.

    ``step_ends``, ``took`` and ``due`` are for the training thread, ``agree`` for the copier.
    """

    def __init__(self, store: Store, rank: int, every: int | None) -> None:
        self._store = store
        self._rank = rank
        self._fixed = every
        self._paces = [(0, 1)]
        """From which window on, the last one and the one before."""
        self._wishes: dict[int, int] = {}
        self._steps: list[float] = []
        self._blocked: list[float] = []
        self._window = 0
        self._done: set[tuple[str, int]] = set()

    @property
    def fixed(self) -> bool:
        """Whether the user chose it, so that nobody needs to measure."""
        return self._fixed is not None

    def every(self, step: int) -> int:
        """How many steps apart regular snapshots are at ``step``."""
        if self._fixed is not None:
            return self._fixed
        return next(every for window, every in reversed(self._paces) if window <= step // WINDOW)

    def due(self, step: int) -> bool:
        """Whether every rank stores this step. The same on all of them."""
        return step % self.every(step) == 0

    # --- the training thread

    def step_ends(self, step: int) -> None:
        """``step`` is finished; before anything is begun for it."""
        if not self.fixed and step // WINDOW != self._window:
            self._wish(step)

    def took(self, step_s: float, blocked_s: float | None) -> None:
        """A step took so long; and where a snapshot was begun in it, that held up training for so long beside."""
        self._steps.append(step_s)
        if blocked_s is not None:
            self._blocked.append(blocked_s)

    def _wish(self, step: int) -> None:
        if self._blocked and self._steps:
            now = self.every(step)
            self._wishes = {step // WINDOW: wanted(median(self._blocked), median(self._steps), now)}
        self._steps, self._blocked, self._window = [], [], step // WINDOW

    # --- the copier thread

    def agree(self, step: int) -> None:
        """After each snapshot, before the next one may begin. Raises what the store raises."""
        if self._fixed is not None:
            return
        window, at = divmod(step, WINDOW)
        quarter = 4 * at // WINDOW
        if quarter == 0 and self._first("wish", window):
            wish = self._wishes.get(window, 1)
            if wish > 1:
                self._store.add(_wish_key(window, wish), 1)
        if quarter == 1 and self._rank == 0 and self._first("decide", window):
            asked = [apart for apart in range(2, MOST + 1) if self._store.check([_wish_key(window, apart)])]
            self._store.set(_pace_key(window + 1), str(max(asked, default=1)))
        if quarter >= 2 and self._first("take", window) and self._store.check([_pace_key(window + 1)]):
            self._take(window + 1, int(self._store.get(_pace_key(window + 1))))

    def _first(self, what: str, window: int) -> bool:
        known = (what, window) in self._done
        self._done = {done for done in self._done if done[1] >= window} | {(what, window)}
        return not known

    def _take(self, window: int, every: int) -> None:
        before = self.every((window - 1) * WINDOW)
        self._paces = [(0, before), (window, every)]
        if self._rank != 0 or every == before:
            return
        if every > 1:
            message = "snapshots hold up the training for over %.0f %% of its time: one in %d steps from step %d on"
            log.warning(message, 100 * SHARE, every, window * WINDOW)
        else:
            log.info("a snapshot fits under each step again, from step %d on", window * WINDOW)


def _wish_key(window: int, every: int) -> str:
    return f"pace/{window}/wish/{every}"


def _pace_key(window: int) -> str:
    return f"pace/{window}"
