"""The network: connections that keep their order, and everything that can go wrong with them.

A connection is what TCP makes of a lossy network: frames arrive in order or not at all, and what is lost is sent again
and so comes later. Repeats come from above: whoever got no answer asks again. A partition may cut one direction only;
then one end hears nothing and the other does not notice.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from tests.sim.timeline import Timeline

RETRANSMIT_S = 0.2
"""How much later a frame comes whose packet was lost (Linux: least retransmission time-out)."""


class End(Protocol):
    """One end of a connection."""

    def received(self, line: Line, frame: Any) -> None: ...
    def closed(self, line: Line) -> None: ...


class Wires:
    """Who can reach whom now, and how fast. Directions are (from, to); ``*`` stands for everybody."""

    def __init__(self, timeline: Timeline, rng: random.Random) -> None:
        self.timeline = timeline
        self.rng = rng
        self.delay_s = 0.0005
        self.loss = 0.0
        self._cut: dict[tuple[str, str], int] = {}
        self._slow: dict[str, float] = {}
        self.lines: list[Line] = []

    # --- faults ------------------------------------------------------------------------------------------------------

    def cut(self, source: str, target: str) -> None:
        """Nothing goes from ``source`` to ``target`` until it is mended as often as it was cut."""
        self._cut[source, target] = self._cut.get((source, target), 0) + 1

    def mend(self, source: str, target: str) -> None:
        left = self._cut.get((source, target), 0) - 1
        if left > 0:
            self._cut[source, target] = left
        else:
            self._cut.pop((source, target), None)

    def slow(self, name: str, extra_s: float) -> None:
        """Everything from or to ``name`` takes ``extra_s`` longer (0: as before)."""
        self._slow[name] = extra_s

    def heal(self) -> None:
        self._cut.clear()
        self._slow.clear()
        self.loss = 0.0

    def passes(self, source: str, target: str) -> bool:
        if not self._cut:
            return True
        return not any(pair in self._cut for pair in ((source, target), (source, "*"), ("*", target)))

    def quiet(self) -> bool:
        """Whether everybody reaches everybody."""
        return not self._cut

    def connected(self, one: str, other: str) -> bool:
        return self.passes(one, other) and self.passes(other, one)

    def transit_s(self, source: str, target: str) -> float:
        """How long one frame takes, retransmissions included."""
        base = self.delay_s * (0.5 + self.rng.random())
        while self.loss and self.rng.random() < self.loss:
            base += RETRANSMIT_S
        if self._slow:
            base += self._slow.get(source, 0.0) + self._slow.get(target, 0.0)
        return base

    # --- connections -------------------------------------------------------------------------------------------------

    def connect(self, here: str, there: str, end: End, accept: Callable[[Line], End | None]) -> Line:
        """Begins to connect. ``accept`` is asked at the other end; None there refuses, and ``closed`` follows here."""
        line = Line(self, (here, there))
        line.ends[0] = end
        self.lines = [old for old in self.lines if not old.over]
        self.lines.append(line)

        def arrive() -> None:
            if line.over:
                return
            other = accept(line)
            if other is None:
                line.reset()
            else:
                line.ends[1] = other
                line.flush(0)

        if self.connected(here, there):
            self.timeline.after(self.transit_s(here, there), arrive)
        return line


class Line:
    """One connection between ``names[0]``, who opened it, and ``names[1]``. Sides are 0 and 1."""

    def __init__(self, wires: Wires, names: tuple[str, str]) -> None:
        self.wires = wires
        self.names = names
        self.ends: list[End | None] = [None, None]
        self.over = False
        self._arrives = [0.0, 0.0]
        self._held: list[list[Any]] = [[], []]

    def send(self, side: int, frame: Any) -> None:
        """From ``side`` to the other; a frame into a cut waits there, and comes when the cut is mended."""
        if self.over:
            return
        if self._held[side] or not self._open(side):
            self._held[side].append(frame)
            self.wires.timeline.after(RETRANSMIT_S, lambda: self.flush(side))
            return
        self._carry(side, frame)

    def _open(self, side: int) -> bool:
        if self.ends[1 - side] is None:
            return False
        source, target = self.names if side == 0 else self.names[::-1]
        return self.wires.passes(source, target)

    def _carry(self, side: int, frame: Any) -> None:
        source, target = self.names if side == 0 else self.names[::-1]
        timeline = self.wires.timeline
        due = max(self._arrives[side], timeline.now + self.wires.transit_s(source, target))
        self._arrives[side] = due
        timeline.at(due, lambda: self._arrive(side, frame))

    def _arrive(self, side: int, frame: Any) -> None:
        end = self.ends[1 - side]
        if not self.over and end is not None:
            end.received(self, frame)

    def flush(self, side: int) -> None:
        """Sends what waited, where the way is free again."""
        if self.over or not self._held[side]:
            return
        if not self._open(side):
            self.wires.timeline.after(RETRANSMIT_S, lambda: self.flush(side))
            return
        held, self._held[side] = self._held[side], []
        for frame in held:
            self._carry(side, frame)

    def close(self, side: int) -> None:
        """``side`` hangs up, or its process died: the other end hears of it, if the network lets it."""
        if self.over:
            return
        self.over = True
        other = self.ends[1 - side]
        source, target = self.names if side == 0 else self.names[::-1]
        if other is not None and self.wires.passes(source, target):
            self.wires.timeline.after(self.wires.transit_s(source, target), lambda: other.closed(self))

    def vanish(self) -> None:
        """One end lost its power: nobody hears of it."""
        self.over = True

    def reset(self) -> None:
        """Something in between ended it; both ends hear of it."""
        if self.over:
            return
        self.over = True
        for end in self.ends:
            if end is not None:
                self.wires.timeline.after(self.wires.delay_s, lambda end=end: end.closed(self))  # type: ignore[misc]
