"""The network: connections that keep their order, and everything that can go wrong with them.

A connection is what TCP makes of a lossy network: frames arrive in order or not at all, and what is lost is sent again
and so comes later. What was sent before a connection was given up comes after it, while the next one is in use already.
Repeats come from above: whoever got no answer asks again. A partition may cut one direction only;
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

    def lose_power(self, name: str) -> None:
        """What ``name`` has not sent yet is never sent; nobody hears that its connections ended."""
        for line in self.lines:
            if name in line.names:
                line.vanish(line.names.index(name))

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
            if not line.open(0):
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


_END: Any = object()
"""The frame that ends a side's stream."""


class Line:
    """One connection between ``names[0]``, who opened it, and ``names[1]``. Sides are 0 and 1.

    ``over``: nobody hears anything by it any more. ``lag_s``: how much later than others its frames arrive, by side.
    """

    def __init__(self, wires: Wires, names: tuple[str, str]) -> None:
        self.wires = wires
        self.names = names
        self.ends: list[End | None] = [None, None]
        self.over = False
        self.lag_s = [0.0, 0.0]
        self._hung_up = [False, False]
        self._arrives = [0.0, 0.0]
        self._held: list[list[Any]] = [[], []]

    def open(self, side: int) -> bool:
        """Whether ``side`` has not hung up, nor heard that the other one has."""
        return not self.over and not self._hung_up[side]

    def send(self, side: int, frame: Any) -> None:
        """From ``side`` to the other; a frame into a cut waits there, and comes when the cut is mended."""
        if self.open(side):
            self._send(side, frame)

    def _send(self, side: int, frame: Any) -> None:
        if self._held[side] or not self._passes(side):
            self._held[side].append(frame)
            self.wires.timeline.after(RETRANSMIT_S, lambda: self.flush(side))
            return
        self._carry(side, frame)

    def _passes(self, side: int) -> bool:
        if self.ends[1 - side] is None:
            return False
        source, target = self.names if side == 0 else self.names[::-1]
        return self.wires.passes(source, target)

    def _carry(self, side: int, frame: Any) -> None:
        source, target = self.names if side == 0 else self.names[::-1]
        timeline = self.wires.timeline
        transit_s = self.wires.transit_s(source, target) + self.lag_s[side]
        due = max(self._arrives[side], timeline.now + transit_s)
        self._arrives[side] = due
        timeline.at(due, lambda: self._arrive(side, frame))

    def _arrive(self, side: int, frame: Any) -> None:
        """What was sent before ``side`` hung up still comes, whatever other connection it has by then."""
        end = self.ends[1 - side]
        if not self.open(1 - side) or end is None:
            return
        if frame is not _END:
            end.received(self, frame)
            return
        self._hung_up[1 - side] = self.over = True
        end.closed(self)

    def flush(self, side: int) -> None:
        """Sends what waited, where the way is free again."""
        if self.over or not self._held[side]:
            return
        if not self._passes(side):
            self.wires.timeline.after(RETRANSMIT_S, lambda: self.flush(side))
            return
        held, self._held[side] = self._held[side], []
        for frame in held:
            self._carry(side, frame)

    def close(self, side: int) -> None:
        """``side`` hangs up, or its process died: the other end hears of it after all that was sent before."""
        if not self.open(side):
            return
        self._hung_up[side] = True
        if self._hung_up[1 - side] or self.ends[1 - side] is None:
            self.over = True
        else:
            self._send(side, _END)

    def vanish(self, side: int) -> None:
        """``side`` lost its power: nobody hears of it, and what had not left it is gone."""
        self._hung_up[side] = True
        self._held[side].clear()

    def reset(self) -> None:
        """Something in between ended it; both ends hear of it."""
        if self.over:
            return
        self.over = True
        for end in self.ends:
            if end is not None:
                self.wires.timeline.after(self.wires.delay_s, lambda end=end: end.closed(self))  # type: ignore[misc]
