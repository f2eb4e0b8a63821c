"""Journal formats that are read, and the errors for others."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from everstep.errors import MalformedMessage
from everstep.wire.v1.training import AnyReport
from everstep_controller.core.events import Event, ReportArrived
from everstep_controller.journal.recorder import (
    MAGIC,
    SegmentStart,
    decode_state,
    encode_state,
    read_segment,
    segments,
)
from everstep_controller.journal.replay import replay
from tests.support.fleet.controllers import ControllerProcess
from tests.support.fleet.fleet_with_faults import FleetWithFaults
from tests.support.fleet.journaled_fleet import JournaledFleet, feed_every_event
from tests.support.processes.fork_pool import ForkPool

STORED_NAMES = """
    policy fleet nodes jobs node_runtime job_runtime probes blame_cases no_partner_until recent_losses sightings
    outbreaks deadlines queued_deadlines deadline_sequence reachable_nodes silent_nodes silence_counts silent_groups
    correlated_silence correlated_silence_ended_at unseen_nodes rejoin_window_ends_at rejoin_window_latest_at
    deferred_evictions node_shortages observer observer_lag_s observer_lag_at epoch database_outage
    database_outage_since job_by_node ignored_counts audit_counts
"""
"""Names in the stored state, the same in all releases: one that does not know a name reads the default instead."""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A segment with every kind of event in it."""
    directory = tmp_path_factory.mktemp("journal")
    fleet = JournaledFleet(directory)
    feed_every_event(fleet)
    fleet.journal.close()
    (segment,) = segments(directory)
    return segment


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


def beginning_of(segment: Path) -> SegmentStart:
    return read_segment(segment)[0]


def test_journal_holds_every_kind_of_event_and_report(recorded: Path) -> None:
    assert every_kind() - kinds(recorded) == set()


def test_state_is_stored_under_the_names_of_all_releases(tmp_path: Path) -> None:
    fleet = JournaledFleet(tmp_path)
    feed_every_event(fleet)
    fleet.journal.close()
    fleet.state.controller_lag.seconds, fleet.state.database.outage = 0.3, "the disk is full"
    stored = encode_state(fleet.state)
    assert sorted(msgspec.msgpack.decode(stored, strict=False)) == sorted(STORED_NAMES.split())
    restored = decode_state(stored)
    for name in set(fleet.state.__struct_fields__) - {"jobs"}:
        assert getattr(restored, name) == getattr(fleet.state, name), name


def test_newer_journal_format_is_refused_with_advice(recorded: Path, tmp_path: Path) -> None:
    newer = written(tmp_path / "newer.journal", beginning_of(recorded), magic=b"everstep-journal 73\n")
    with pytest.raises(MalformedMessage, match=r"of format 73, and this release .* reads format 1: replay it with"):
        replay(newer)
    command = [sys.executable, "-m", "everstep_controller.main", "replay", str(newer)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "of format 73" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_event_is_refused_at_its_position(recorded: Path, tmp_path: Path) -> None:
    beginning, entries = read_segment(recorded)
    first = next(entries)
    unknown = msgspec.msgpack.encode([first.at, {"type": "MoonRose", "trace": "t"}, [], []])
    recording = replay(written(tmp_path / "odd.journal", beginning, first, unknown))
    assert next(recording.events).event_name == "ControllerStarted"
    with pytest.raises(MalformedMessage, match=r"event 2 of .* written by everstep 0\.1\.0, cannot be read"):
        next(recording.events)


def test_unreadable_state_names_the_writing_release(recorded: Path, tmp_path: Path) -> None:
    old = SegmentStart(version="0.0.7", at=1.0, state=msgspec.Raw(msgspec.msgpack.encode({"nodes": 3})))
    with pytest.raises(
        MalformedMessage, match=r"everstep 0\.0\.7, and this release .* cannot read its state: replay it with that"
    ):
        replay(written(tmp_path / "old.journal", old))
    with pytest.raises(MalformedMessage, match=r"begins with data unknown to this release"):
        replay(written(tmp_path / "odd.journal", next(read_segment(recorded)[1])))


def _replayed(journal: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "everstep_controller.main", "replay", str(journal), "--differences"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_journal_of_killed_controller_replays_identically(program_forks: ForkPool, tmp_path: Path) -> None:
    settings, journal = tmp_path / "settings.toml", tmp_path / "journal"
    settings.write_text(f'journal_dir = "{journal}"\n')
    process = ControllerProcess(tmp_path, program_forks, arguments=("--settings", str(settings)))
    try:
        process.start()
        FleetWithFaults(process.ask, process)
        process.kill()
        process.start()
        process.terminate()
    finally:
        process.end()
    done = _replayed(journal)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all decisions are the same as recorded" in done.stdout
    assert len(list(journal.glob("*.journal"))) == 2
