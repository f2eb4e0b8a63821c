"""Accounts of a job's GPU-hours: stepping, waiting for nodes, or standing still, with the cause of each lost hour."""

from __future__ import annotations

from collections import defaultdict

HOUR_S = 3600.0


class Accounts:
    """Node-seconds of one job that asks for ``nodes`` nodes. Times are seconds since the beginning."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.lost: dict[str, float] = defaultdict(float)
        self.trained = 0.0
        self.stops = 0
        self._at = 0.0
        self._seats = 0
        self._standing = "forming"
        self._short = "forming"

    @property
    def stepping(self) -> bool:
        return not self._standing

    def stop(self, at: float, cause: str, undone_s: float = 0.0) -> None:
        """The job stands still from ``at``, because of ``cause``; ``undone_s`` of its steps must be done again."""
        self._book(at)
        if not self._standing:
            self.stops += 1
            undone = min(undone_s * self._seats, self.trained)
            self.trained -= undone
            self.lost[cause] += undone
            self._standing = cause

    def step(self, at: float, seats: int, short: str = "") -> None:
        """It steps from ``at`` with so many nodes. ``short``: whose fault it is that there are no more."""
        self._book(at)
        self._standing, self._seats = "", seats
        self._short = short or self._short

    def close(self, at: float) -> None:
        self._book(at)

    def _book(self, at: float) -> None:
        passed, self._at = at - self._at, at
        if self._standing:
            self.lost[self._standing] += passed * self.nodes
            return
        self.trained += passed * self._seats
        if self._seats < self.nodes:
            self.lost[f"too few nodes ({self._short})"] += passed * (self.nodes - self._seats)

    def ratio(self) -> float:
        """Effective training time ratio: GPU time that brought the job forward, of all that it was given."""
        total = self.trained + sum(self.lost.values())
        return self.trained / total if total else 0.0

    def gpu_hours_lost(self, gpus_per_node: int) -> dict[str, float]:
        """By cause, most first."""
        hours = {cause: seconds * gpus_per_node / HOUR_S for cause, seconds in self.lost.items() if seconds > 0}
        return dict(sorted(hours.items(), key=lambda item: -item[1]))
