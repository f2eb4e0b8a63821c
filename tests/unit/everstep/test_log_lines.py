from __future__ import annotations

import errno
import io
import json
import logging

import pytest

from everstep.clock import ManualClock
from everstep.log_lines import JsonLineFormatter, LogThrottle, SafeFormatter, StderrHandler

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


def test_launcher_lines_have_no_controls() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "node %s", ("\x9b2J\u202e",), None)
    assert SafeFormatter("everstep-launch: %(message)s").format(record) == "everstep-launch: node \ufffd2J\ufffd"


def test_json_line_has_the_fields_for_search() -> None:
    record = logging.makeLogRecord({"name": "agent", "levelname": "INFO", "msg": "rank %d", "args": (3,)})
    record.node, record.trace = "n1", "t1"
    line = json.loads(JsonLineFormatter().format(record))
    assert line["message"] == "rank 3"
    assert (line["node"], line["trace"], line["level"]) == ("n1", "t1", "info")
    assert line["at"].endswith("+00:00")


def test_json_lines_take_names_of_files_in_any_encoding() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "reading %s", ("gr\udcc3\udcb6\udcdfe",), None)
    assert json.loads(JsonLineFormatter().format(record))["message"] == "reading grö\ufffde"


class FullFile(io.StringIO):
    """A file on a disk that may be full."""

    is_full = False

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_lines_that_a_full_disk_lost_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    file = FullFile()
    monkeypatch.setattr("sys.stderr", file)
    handler = StderrHandler()

    def write(line: str, *, is_full: bool) -> None:
        file.is_full = is_full
        handler.handle(logging.LogRecord("x", logging.INFO, "", 0, line, (), None))

    write("first", is_full=False)
    write("second", is_full=True)
    write("third", is_full=True)
    write("fourth", is_full=False)
    write("fifth", is_full=False)
    assert file.getvalue().splitlines() == [
        "first",
        "",
        "2 lines before this one could not be written: [Errno 28] No space left on device",
        "fourth",
        "fifth",
    ]
