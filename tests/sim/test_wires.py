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


def test_what_was_sent_before_a_connection_was_given_up_comes_after_the_next_one_and_before_its_end() -> None:
    timeline, wires, there = _network()
    old = _connect(wires, there)
    old.lag_s[0] = 5.0
    old.send(0, "late")
    old.close(0)
    new = _connect(wires, there)
    new.send(0, "early")
    timeline.run(20.0)
    assert there.heard == [(new, "early"), (old, "late"), (old, "closed")]


def test_who_has_hung_up_hears_nothing_of_what_is_still_on_its_way() -> None:
    timeline, wires, there = _network()
    line = _connect(wires, there)
    line.lag_s[0] = 5.0
    line.send(0, "late")
    line.close(1)
    timeline.run(20.0)
    assert there.heard == []


def test_into_a_cut_nothing_goes_until_it_is_mended_and_then_everything_in_its_order() -> None:
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


def test_what_a_machine_had_not_sent_is_lost_with_its_power_and_nobody_hears_of_it() -> None:
    timeline, wires, there = _network()
    line = _connect(wires, there)
    line.send(0, "on its way")
    wires.cut("n1", "c1")
    line.send(0, "not sent")
    wires.lose_power("n1")
    wires.mend("n1", "c1")
    timeline.run(20.0)
    assert [frame for _, frame in there.heard] == ["on its way"]


def test_a_reset_connection_carries_nothing_more_and_both_ends_hear_of_it() -> None:
    timeline, wires, there = _network()
    line = _connect(wires, there)
    line.send(0, "on its way")
    line.reset()
    timeline.run(20.0)
    assert [frame for _, frame in there.heard] == ["closed"]
