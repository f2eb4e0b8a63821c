"""What the agent keeps and says does not grow with how long it runs, or with what is written to the kernel log."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import tracemalloc

import pytest

from tests.support.sensing import BUS, Judge, gpu

pytestmark = pytest.mark.slow

KINDS = 29
"""So many different XIDs were told of in the 800,000 lines that a monitor elsewhere wrote."""


def _live(judge: Judge, hours: int) -> int:
    """Hours of a troubled node, a poll every six minutes: what is held in memory after them, in bytes."""
    for hour in range(hours):
        judge.lines(*(f"NVRM: Xid (PCI:{BUS}): {13 + (hour + line) % KINDS}, pid={line}" for line in range(20)))
        for _ in range(10):
            judge.clock.advance(359.0)
            judge.polls(1, gpu(temperature_margin_c=hour % 30 - 5))
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


GROWTH = """
import tracemalloc
from tests.support.sensing import Judge
from tests.unit.agent.sensors.test_sensor_memory import _live
judge = Judge()
tracemalloc.start()
days = _live(judge, 100)
print(_live(judge, 200) - days)
"""
"""In a process of its own: what else runs in the test's would be counted too."""


def test_sensor_memory_does_not_grow_with_uptime() -> None:
    done = subprocess.run([sys.executable, "-c", GROWTH], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * 1024


def test_xid_storm_logs_little_and_counts_every_line(caplog: pytest.LogCaptureFixture) -> None:
    judge = Judge()
    storm = [f"NVRM: Xid (PCI:{BUS}): {200 + number}, pid=1" for number in range(KINDS)]
    with caplog.at_level(logging.DEBUG):
        updates = sum(judge.assessor.process_kernel_lines(storm, judge.now()) for _ in range(2000))
    assert updates <= 16
    assert len(judge.keys()) <= KINDS
    assert set(judge.assessor.xid_history.totals.values()) == {2000}
    assert len(caplog.records) <= KINDS
