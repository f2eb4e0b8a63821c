from __future__ import annotations

import logging

import pytest

from everstep.clock import ManualClock
from everstep.log_lines import MAX_CHARACTERS, LogThrottle, SafeFormatter

log = logging.getLogger("throttled")


def test_log_throttle_counts_lines_beyond_the_burst(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    clock = ManualClock(monotonic=1000.0)
    say = LogThrottle(log, clock.monotonic, burst=2)
    for number in range(100):
        say(logging.INFO, "%s is refused", f"peer {number}")
    assert caplog.messages == ["peer 0 is refused", "peer 1 is refused"]
    clock.advance(10.0)
    say(logging.INFO, "%s is refused", "peer 100")
    assert caplog.messages[2:] == ["98 lines like the next one were left out of the log", "peer 100 is refused"]
    clock.advance(10.0)
    say(logging.INFO, "%s is refused", "peer 101")
    assert caplog.messages[4:] == ["peer 101 is refused"]


def test_log_throttle_shortens_long_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    LogThrottle(log, ManualClock().monotonic)(logging.WARNING, "%s", "x" * 10_000)
    (message,) = caplog.messages
    assert message == "x" * MAX_CHARACTERS + "... (10000 characters)"


def test_log_throttle_ignores_lines_below_the_log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    say = LogThrottle(log, ManualClock().monotonic, burst=1)
    say(logging.INFO, "not shown")
    say(logging.WARNING, "shown")
    assert caplog.messages == ["shown"]


def test_launcher_lines_have_no_controls() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "node %s", ("\x9b2J\u202e",), None)
    assert SafeFormatter("everstep-launch: %(message)s").format(record) == "everstep-launch: node \ufffd2J\ufffd"
