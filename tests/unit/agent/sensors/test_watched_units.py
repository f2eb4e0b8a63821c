from __future__ import annotations

from collections.abc import Callable, Sequence

from everstep_agent.drivers.commands import at_once
from everstep_agent.sensors.units import UNITS_EVERY, SystemdUnitSensor


class Systemd:
    """A systemd with one unit, and the number of times that it was asked."""

    def __init__(self) -> None:
        self.state, self.asked = "active", 0

    def show(self, units: Sequence[str]) -> str:
        self.asked += 1
        return f"LoadState=loaded\nActiveState={self.state}\n"


def test_no_unit_to_watch_asks_nothing() -> None:
    systemd = Systemd()
    sensor = SystemdUnitSensor((), systemd.show, at_once)
    assert sensor.poll() == ()
    assert systemd.asked == 0


def test_unit_that_was_active_is_stopped() -> None:
    systemd = Systemd()
    systemd.state = "inactive"
    sensor = SystemdUnitSensor(("a.service",), systemd.show, at_once)
    seen = []
    for systemd.state in ("inactive", "active", "inactive"):
        seen += [sensor.poll()[0].is_stopped for _ in range(UNITS_EVERY)][:1]
    assert seen == [0, 0, 1]


def test_hanging_systemctl_is_not_asked_twice() -> None:
    started: list[Callable[[], None]] = []
    sensor = SystemdUnitSensor(("a.service",), Systemd().show, started.append)
    assert [sensor.poll() for _ in range(2 * UNITS_EVERY)] == [()] * 2 * UNITS_EVERY
    assert len(started) == 1
    started[0]()
    assert sensor.poll()[0].is_active == 1
