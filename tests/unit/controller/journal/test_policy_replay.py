"""Another policy over the recorded past: by node, over all segments, without what people ordered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy
from everstep_controller.journal import policy_replay
from everstep_controller.journal.policy_replay import replay_with_policy
from everstep_controller.journal.recorder import Journal, segments

from everstep.errors import NotFound
from everstep.wire.v1.operator_history import PolicyTrialResult
from tests.support.core_fleet import START
from tests.support.findings import xid
from tests.support.journaled import JournaledFleet


def _tried(fleet: JournaledFleet, folder: Path, **knobs: object) -> PolicyTrialResult:
    fleet.journal.close()
    changed: CorePolicy = msgspec.structs.replace(fleet.policy, **knobs)
    return replay_with_policy(folder, changed, START)


def _evicts_n2(fleet: JournaledFleet) -> None:
    fleet.start(4, 2)
    fleet.seal(5)
    fleet.raise_finding("n2", xid())
    fleet.advance(8.0, "n1", "n3", "n4", "n5", "n6")


def test_trial_of_same_policy_shows_no_difference(tmp_path: Path) -> None:
    fleet = JournaledFleet(tmp_path)
    _evicts_n2(fleet)
    told = _tried(fleet, tmp_path, eviction_count=1)
    assert (told.evictions, told.added_evictions, told.avoided_evictions, told.gaps) == (1, (), (), ())


def test_trial_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing is recorded"):
        replay_with_policy(tmp_path / "nothing", CorePolicy(), START)


def test_trial_ignores_operator_orders(tmp_path: Path) -> None:
    fleet = JournaledFleet(tmp_path)
    fleet.start(4, 1)
    fleet.seal(5)
    fleet.order(OperatorAction.EVICT, node="n2")
    told = _tried(fleet, tmp_path)
    assert (told.evictions, told.added_evictions, told.avoided_evictions) == (0, (), ())


def test_trial_carries_diverging_state_across_segments(tmp_path: Path) -> None:
    """Under a budget of one n3 is not evicted for what happened in the first segment, nor in those that follow."""
    fleet = JournaledFleet(tmp_path, segment_bytes=1)
    _evicts_n2(fleet)
    asyncio.run(fleet.journal.drain())
    fleet.raise_finding("n3", xid(48))
    fleet.advance(8.0, "n1", "n4", "n5", "n6")
    told = _tried(fleet, tmp_path, eviction_count=1)
    assert len(segments(tmp_path)) > 1
    assert told.evictions == 1
    assert told.added_evictions == ()
    assert [line.split()[1] for line in told.avoided_evictions] == ["n3-1"]
    assert told.gaps == ()


def test_span_begins_at_since_after_a_quiet_end_of_segment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment whose newest event is older than ``since`` is continued by the next: nothing between was missed."""

    def segment(begins_at: float, *events: float, is_continuation: bool) -> SimpleNamespace:
        steps = [SimpleNamespace(at=at, is_operator_order=True) for at in events]
        state = SimpleNamespace(epoch=1)
        return SimpleNamespace(begins_at=begins_at, is_continuation=is_continuation, events=steps, state=state)

    recorded = {
        "000000000050000": segment(50.0, 50.0, 100.0, is_continuation=False),
        "000000000160000": segment(160.0, 170.0, is_continuation=True),
    }
    monkeypatch.setattr(policy_replay, "segments", lambda folder: [folder / name for name in recorded])
    monkeypatch.setattr(policy_replay, "replay", lambda path, *_: recorded[path.name])
    told = replay_with_policy(tmp_path, CorePolicy(), 150.0)
    assert [(span.begins_at, span.ends_at) for span in told.spans] == [(150.0, 170.0)]


def test_trial_reports_gap_between_controller_runs(tmp_path: Path) -> None:
    fleet = JournaledFleet(tmp_path)
    _evicts_n2(fleet)
    fleet.journal.close()
    newest = fleet.now
    fleet.journal = Journal(tmp_path, max_bytes=1 << 30, keep_s=86400.0)
    fleet.now = newest + 600.0
    fleet.raise_finding("n3", xid(48))
    told = _tried(fleet, tmp_path)
    ((begin, end),) = told.gaps
    assert end == newest + 600.0
    assert newest - 8.0 <= begin <= newest
