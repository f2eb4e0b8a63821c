"""Decisions are recorded, and made again from the record."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.errors import ConfigurationError, MalformedMessage
from everstep.vocabulary import NodeState
from everstep_controller.core.checkpoints.placement import place_replicas
from everstep_controller.core.jobs import generations
from everstep_controller.core.transition import Transition
from everstep_controller.journal import recorder
from everstep_controller.journal.recorder import MAGIC, RETRY_S, Journal, read_segment, segments
from everstep_controller.journal.replay import HIDDEN_DIFFERENCE, ReplayedEvent, replay
from tests.support.fleet.core_fleet import ENTROPY, START, CoreFleet
from tests.support.fleet.findings import xid
from tests.support.fleet.journaled_fleet import JournaledFleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[JournaledFleet]:
    made = JournaledFleet(tmp_path / "journal")
    yield made
    made.journal.close()


def _incident(fleet: CoreFleet) -> None:
    fleet.start(4, 1)
    fleet.seal(5)
    fleet.advance(30.0, "n1", "n2", "n3", "n4", "n5")
    fleet.raise_finding("n2", xid())
    fleet.advance(8.0, "n1", "n3", "n4")
    fleet.lose_rank(1)


def _steps(directory: Path) -> list[ReplayedEvent]:
    return [step for path in segments(directory) for step in replay(path).events]


@pytest.mark.promise("replay")
def test_replay_reproduces_every_decision_without_heartbeats(fleet: JournaledFleet, tmp_path: Path) -> None:
    _incident(fleet)
    fleet.journal.close()
    steps = _steps(tmp_path / "journal")
    assert [line for step in steps for line in step.difference()] == []
    assert any("verdict n2-1 (evict)" in line for step in steps for line in step.replayed)
    assert any("node.suspect: n5" in line for step in steps for line in step.replayed)


def test_replay_shows_changed_decision(fleet: JournaledFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _incident(fleet)
    fleet.journal.close()

    def never(turn: Transition, node: str, finding: object, sentence: str) -> None:
        """Evict no node."""

    monkeypatch.setattr("everstep_controller.core.health.eviction.evict", never)
    different = [step for step in _steps(tmp_path / "journal") if step.differs]
    assert different
    assert any(line.startswith("-verdict n2-1 (evict)") for line in different[0].difference())


def test_replay_shows_changed_replica_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = JournaledFleet(tmp_path / "journal")
    fleet.start(12)
    fleet.journal.close()
    assert not any(step.differs for step in _steps(tmp_path / "journal"))
    place = place_replicas

    def otherwise(*asked: Any) -> dict[str, tuple[str, ...]]:
        placed = place(*asked)
        (first, first_copies), (second, second_copies) = list(placed.items())[-2:]
        return placed | {first: second_copies, second: first_copies}

    monkeypatch.setattr(generations, "place_replicas", otherwise)
    different = [step for step in _steps(tmp_path / "journal") if step.differs]
    assert different
    assert all(step.recorded == step.replayed and step.difference()[-1] == HIDDEN_DIFFERENCE for step in different)


def test_journal_omits_secrets_and_is_owner_only(fleet: JournaledFleet, tmp_path: Path) -> None:
    _incident(fleet)
    fleet.journal.close()
    found = segments(tmp_path / "journal")
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o700
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        beginning, entries = read_segment(path)
        recorded = bytes(beginning.state) + b"".join(msgspec.msgpack.encode(entry) for entry in entries)
        assert ENTROPY.encode() not in recorded


def test_new_segment_starts_with_full_state_without_secrets(tmp_path: Path) -> None:
    fleet = JournaledFleet(tmp_path / "journal", segment_bytes=2000)
    _incident(fleet)
    for step in range(6, 40):
        fleet.seal(step)
        asyncio.run(fleet.journal.drain())
        fleet.advance(3.0, "n1", "n3", "n4", "n5")
    fleet.journal.close()
    found = segments(tmp_path / "journal")
    assert len(found) > 1
    assert [step for path in found for step in replay(path).events if step.differs] == []
    beginning, _ = read_segment(found[-1])
    assert ENTROPY.encode() not in bytes(beginning.state)


def test_truncated_journal_replays_up_to_the_cut(fleet: JournaledFleet, tmp_path: Path) -> None:
    _incident(fleet)
    fleet.journal.close()
    path = segments(tmp_path / "journal")[0]
    whole = len(_steps(tmp_path / "journal"))
    path.write_bytes(path.read_bytes()[:-40])
    assert 0 < len(_steps(tmp_path / "journal")) < whole


def test_oldest_segments_are_deleted_first(tmp_path: Path) -> None:
    fleet = JournaledFleet(tmp_path / "journal", segment_bytes=1500, max_bytes=30_000)
    fleet.start(4)
    for step in range(5, 80):
        fleet.seal(step)
        asyncio.run(fleet.journal.drain())
        fleet.advance(3.0, "n1", "n2", "n3", "n4")
    fleet.journal.close()
    found = segments(tmp_path / "journal")
    assert sum(path.stat().st_size for path in found[:-1]) <= 30_000
    assert int(found[0].name[:15]) / 1000 > START


def test_journal_gap_on_full_disk_changes_no_decision(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "journal"
    fleet = JournaledFleet(folder, segment_bytes=1)
    fleet.start(4)
    asyncio.run(fleet.journal.drain())
    folder.rename(tmp_path / "before")
    fleet.now += 1.0  # the next segment has another name
    for step in range(5, 15):
        fleet.seal(step)
        asyncio.run(fleet.journal.drain())
    assert caplog.text.count("has a gap from here") == 1
    fleet.raise_finding("n2", xid())
    assert fleet.state.nodes["n2"].state is NodeState.QUARANTINED
    folder.mkdir()
    fleet.advance(RETRY_S + 1.0, "n1", "n3", "n4")
    fleet.journal.close()
    assert fleet.journal.gaps == 1
    assert _steps(folder)


@pytest.mark.parametrize(("entries", "gaps"), [(1, 0), (200, 1)])
def test_journal_buffers_state_but_drops_excess_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entries: int, gaps: int
) -> None:
    monkeypatch.setattr(recorder, "MAX_PENDING_BYTES", 4096)
    fleet = JournaledFleet(tmp_path / "journal", segment_bytes=1)
    fleet.start(4)
    asyncio.run(fleet.journal.drain())
    busy, free = threading.Event(), threading.Event()

    def block() -> None:
        busy.set()
        free.wait(60)

    fleet.journal._writing = fleet.journal._thread.submit(block)
    try:
        assert busy.wait(60)
        for step in range(5, 5 + entries):
            fleet.seal(step)
            fleet.journal.flush()
    finally:
        free.set()
    fleet.journal.close()
    assert fleet.journal.gaps == gaps


def test_invalid_journal_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.journal"
    wrong.write_bytes(b"something else")
    with pytest.raises(MalformedMessage, match="is not a journal: it does not begin with"):
        replay(wrong)
    wrong.write_bytes(MAGIC)
    with pytest.raises(MalformedMessage, match="ends before its first event"):
        replay(wrong)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match="cannot be created"):
        Journal(tmp_path / "file" / "journal", max_bytes=1, keep_s=1.0)


@pytest.mark.slow
def test_replay_command_prints_incident_without_differences(fleet: JournaledFleet, tmp_path: Path) -> None:
    _incident(fleet)
    fleet.journal.close()
    command = [sys.executable, "-m", "everstep.cli.main", "replay", str(tmp_path / "journal"), "--node", "n2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "verdict n2-1 (evict)" in done.stdout
    assert "all decisions are the same as recorded" in done.stdout
