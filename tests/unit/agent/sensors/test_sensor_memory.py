"""Bounds on the memory of the sensor process, for long runs and busy kernel logs."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc

import pytest

from tests.support.agents.sensors import BUS, TimedAssessor, gpu

pytestmark = pytest.mark.slow

KINDS = 29
"""So many different XIDs were told of in the 800,000 lines that a monitor elsewhere wrote."""


def _live(judge: TimedAssessor, hours: int) -> int:
    """Return the bytes in use after hours of a troubled node, with a poll every six minutes."""
    for hour in range(hours):
        judge.lines(*(f"NVRM: Xid (PCI:{BUS}): {13 + (hour + line) % KINDS}, pid={line}" for line in range(20)))
        for _ in range(10):
            judge.clock.advance(359.0)
            judge.polls(1, gpu(temperature_margin_c=hour % 30 - 5))
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


GROWTH = """
import tracemalloc
from tests.support.agents.sensors import TimedAssessor
from tests.unit.agent.sensors.test_sensor_memory import _live
judge = TimedAssessor()
tracemalloc.start()
days = _live(judge, 100)
print(_live(judge, 200) - days)
"""
"""In a process of its own: what else runs in the test's would be counted too."""


def test_sensor_memory_does_not_grow_with_uptime() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * 1024
