"""The newest output is kept in bounded files, and a bad disk loses lines without a wait."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from everstep.layout.kept_output import OLDER, last_lines
from everstep_trainer.launch.output import kept_files
from everstep_trainer.launch.output.kept_files import KeptFiles, LineCollector


def test_progress_bar_is_kept_as_its_last_state() -> None:
    lines = LineCollector()
    assert lines.feed(b"\r 10%\r 20%") == []
    assert lines.feed(b"\r 90%") == []
    assert lines.feed(b"\r100%\nwindows\r\nplain\npart") == [b"100%", b"windows", b"plain"]
    assert lines.rest() == [b"part"]
    assert lines.rest() == []


def test_full_file_becomes_the_older_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_files, "MAX_FILE_BYTES", 60)
    files = KeptFiles(tmp_path)
    for number in range(20):
        files.append("a.log", [b"line %d" % number], 5.0)
    files.end()
    path = tmp_path / "a.log"
    assert {each.name for each in tmp_path.iterdir()} == {"a.log", f"a.log{OLDER}"}
    assert all(each.stat().st_size <= 60 and each.stat().st_mode & 0o077 == 0 for each in tmp_path.iterdir())
    assert [line.text for line in last_lines([("a", path)], 3)] == ["line 17", "line 18", "line 19"]


def test_unwritable_folder_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = KeptFiles(tmp_path / "missing")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            files.append("a.log", [b"line"], 5.0)
        files.end()
    (message,) = caplog.messages
    assert message.startswith("output of ranks is not kept for `everstep logs`: [Errno 2]")


def test_slow_disk_loses_lines_and_says_how_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "a.log")  # opening it for writing waits for a reader
    monkeypatch.setattr(kept_files, "MAX_WAITING_BYTES", 40)
    files = KeptFiles(tmp_path)
    for number in range(5):
        files.append("a.log", [b"line %d" % number], 5.0)
    with (tmp_path / "a.log").open("rb") as reader:
        files.append("a.log", [], 5.0)
        first = reader.read(13)
        while files._waiting_bytes:
            files._thread.join(0.01)
        files.append("a.log", [b"last"], 5.0)
        files.end()
        rest = reader.read()
    assert first + rest == b"".join(
        b"5.000 " + line
        for line in (b"line 0\n", b"line 1\n", b"line 2\n", b"(2 lines of ranks are left out here)\n", b"last\n")
    )
