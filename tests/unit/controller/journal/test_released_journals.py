"""A journal that an older release wrote is read and decided again; what cannot be read says who can read it."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from everstep_controller.core.events import Event, ReportArrived
from everstep_controller.journal.recorder import MAGIC, Beginning, read_segment, segments
from everstep_controller.journal.replay import replay

from everstep.errors import MalformedMessage
from everstep.wire.v1.training import AnyReport
from tests.support.journaled import FORMAT, JournaledFleet, everything

RELEASED = Path(__file__).parents[3] / "released" / "journals"
FIRST = RELEASED / "1.journal"
EVENTS_OF_1 = 94


def kinds(segment: Path) -> set[str]:
    """Events and reports in it, by name."""
    _, entries = read_segment(segment)
    return {
        type(entry.event.body if isinstance(entry.event, ReportArrived) else entry.event).__name__ for entry in entries
    }


def every_kind() -> set[str]:
    return {kind.__name__ for kind in (*get_args(Event), *get_args(AnyReport)) if kind is not ReportArrived}


def written(path: Path, *frames: Any, magic: bytes = MAGIC) -> Path:
    """A segment of these frames."""
    bodies = [frame if isinstance(frame, bytes) else msgspec.msgpack.encode(frame) for frame in frames]
    path.write_bytes(magic + zlib.compress(b"".join(len(body).to_bytes(4, "big") + body for body in bodies)))
    return path


def beginning_of(segment: Path) -> Beginning:
    return read_segment(segment)[0]


def test_a_journal_of_the_present_format_is_kept() -> None:
    assert (RELEASED / f"{FORMAT}.journal").exists()


def test_what_is_kept_would_hold_every_event_and_report_that_there_is(tmp_path: Path) -> None:
    fleet = JournaledFleet(tmp_path)
    everything(fleet)
    fleet.journal.close()
    (segment,) = segments(tmp_path)
    assert every_kind() - kinds(segment) == set()


def test_the_first_format_is_read_to_its_end_and_decided_again() -> None:
    recording = replay(FIRST)
    steps = list(recording.steps)
    assert (recording.version, len(steps)) == ("0.1.0", EVENTS_OF_1)
    assert kinds(FIRST) <= every_kind()
    told = [line for step in steps for line in step.then]
    assert any("verdict n2-1 (evict)" in line for line in told)
    assert any("job.finished" in line for line in told)
    assert sum(bool(step.now) for step in steps) > EVENTS_OF_1 / 2


def test_the_command_shows_what_an_older_release_recorded() -> None:
    command = [sys.executable, "-m", "everstep.cli.main", "replay", str(FIRST), "--node", "n2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode in (0, 1), done.stderr
    assert "written by everstep 0.1.0" in done.stdout
    assert "verdict n2-1 (evict)" in done.stdout


def test_a_newer_format_is_refused_with_what_to_do(tmp_path: Path) -> None:
    newer = written(tmp_path / "newer.journal", beginning_of(FIRST), magic=b"everstep-journal 73\n")
    with pytest.raises(MalformedMessage, match=r"of format 73, and this release .* reads format 1: replay it with"):
        replay(newer)
    command = [sys.executable, "-m", "everstep_controller.main", "replay", str(newer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "of format 73" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_event_that_is_not_known_is_refused_where_it_comes(tmp_path: Path) -> None:
    beginning, entries = read_segment(FIRST)
    first = next(entries)
    unknown = msgspec.msgpack.encode([first.at, {"type": "MoonRose", "trace": "t"}, [], []])
    recording = replay(written(tmp_path / "odd.journal", beginning, first, unknown))
    assert next(recording.steps).what == "ControllerStarted"
    with pytest.raises(MalformedMessage, match=r"event 2 of .* written by everstep 0\.1\.0, is not understood"):
        next(recording.steps)


def test_a_state_that_is_not_understood_names_the_release_that_wrote_it(tmp_path: Path) -> None:
    old = Beginning(version="0.0.7", at=1.0, state=msgspec.Raw(msgspec.msgpack.encode({"nodes": 3})))
    with pytest.raises(MalformedMessage, match=r"everstep 0\.0\.7, whose state this release .* replay it with that"):
        replay(written(tmp_path / "old.journal", old))
    with pytest.raises(MalformedMessage, match=r"how .* begins is not understood"):
        replay(written(tmp_path / "odd.journal", next(read_segment(FIRST)[1])))
