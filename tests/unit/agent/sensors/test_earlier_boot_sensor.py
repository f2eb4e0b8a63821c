from __future__ import annotations

from pathlib import Path

import pytest

from everstep.clock import ManualClock
from everstep_agent.drivers.commands import at_once
from everstep_agent.drivers.samples import EARLIER_BOOT_S, EarlierBoot
from everstep_agent.sensors.earlier_boot import EarlierBootSensor


def sensor(tmp_path: Path) -> EarlierBootSensor:
    return EarlierBootSensor(tmp_path, ManualClock(), tmp_path, lambda: ("a line",), at_once)


def test_records_are_given_once(tmp_path: Path) -> None:
    earlier = sensor(tmp_path)
    assert [earlier.poll(uptime_s) for uptime_s in (None, 60.0, 61.0)] == [
        None,
        EarlierBoot(log_lines=("a line",)),
        None,
    ]


@pytest.mark.parametrize("uptime_s", [EARLIER_BOOT_S, 100 * EARLIER_BOOT_S])
def test_machine_that_runs_for_long_reads_nothing(tmp_path: Path, uptime_s: float) -> None:
    earlier = sensor(tmp_path)
    assert [earlier.poll(uptime_s), earlier.poll(1.0)] == [None, None]
