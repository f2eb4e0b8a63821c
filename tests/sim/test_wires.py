"""The simulated network keeps what TCP keeps, and no more."""

from __future__ import annotations

import random
from typing import Any

from tests.sim.timeline import Timeline
from tests.sim.wires import Line, Wires


class Ear:
    """Hears what comes on which line, and when it ends."""

    def __init__(self) -> None:
        self.heard: list[tuple[Line, Any]] = []

    def received(self, line: Line, frame: Any) -> None:
        self.heard.append((line, frame))

    def closed(self, line: Line) -> None:
        self.heard.append((line, "closed"))


def _network() -> tuple[Timeline, Wires, Ear]:
    timeline = Timeline()
    return timeline, Wires(timeline, random.Random(1)), Ear()


def _connect(wires: Wires, there: Ear) -> Line:
    line = wires.connect("n1", "c1", Ear(), lambda _: there)
    wires.timeline.run(wires.timeline.now + 1.0)
    return line


def test_wire_delivers_frames_before_the_close_of_connection() -> None:
    timeline, wires, there = _network()
    old = _connect(wires, there)
    old.lag_s[0] = 5.0
    old.send(0, "late")
    old.close(0)
    new = _connect(wires, there)
    new.send(0, "early")
    timeline.run(20.0)
    assert there.heard == [(new, "early"), (old, "late"), (old, "closed")]


def test_closed_receiver_gets_no_frame_in_flight() -> None:
    timeline, wires, there = _network()
    line = _connect(wires, there)
    line.lag_s[0] = 5.0
    line.send(0, "late")
    line.close(1)
    timeline.run(20.0)
    assert there.heard == []


def test_cut_wire_delivers_in_order_once_mended() -> None:
    timeline, wires, there = _network()
    line = _connect(wires, there)
    wires.cut("n1", "c1")
    line.send(0, "first")
    line.close(0)
    timeline.run(10.0)
    assert there.heard == []
    wires.mend("n1", "c1")
    timeline.run(20.0)
    assert [frame for _, frame in there.heard] == ["first", "closed"]


def test_power_loss_drops_unsent_frames_silently() -> None:
    timeline, wires, there = _network()
    line = _connect(wires, there)
    line.send(0, "on its way")
    wires.cut("n1", "c1")
    line.send(0, "not sent")
    wires.lose_power("n1")
    wires.mend("n1", "c1")
    timeline.run(20.0)
    assert [frame for _, frame in there.heard] == ["on its way"]


def test_reset_connection_closes_both_ends() -> None:
    timeline, wires, there = _network()
    line = _connect(wires, there)
    line.send(0, "on its way")
    line.reset()
    timeline.run(20.0)
    assert [frame for _, frame in there.heard] == ["closed"]
