"""A different policy on the recorded past: by node, over all segments, without operators' orders."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from everstep.errors import NotFound
from everstep.wire.v1.operator_history import PolicyTrialResult
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy
from everstep_controller.journal import policy_replay
from everstep_controller.journal.policy_replay import replay_with_policy
from everstep_controller.journal.recorder import segments
from tests.support.fleet.core_fleet import START
from tests.support.fleet.findings import xid
from tests.support.fleet.journaled_fleet import JournaledFleet


def _tried(fleet: JournaledFleet, folder: Path, **knobs: Any) -> PolicyTrialResult:
    fleet.journal.close()
    return replay_with_policy(folder, fleet.policy.with_values(**knobs), START)


def _evicts_n2(fleet: JournaledFleet) -> None:
    fleet.start(4, 2)
    fleet.seal(5)
    fleet.raise_finding("n2", xid())
    fleet.advance(8.0, "n1", "n3", "n4", "n5", "n6")


def test_trial_of_same_policy_shows_no_difference(tmp_path: Path) -> None:
    fleet = JournaledFleet(tmp_path)
    _evicts_n2(fleet)
    result = _tried(fleet, tmp_path, budget={"count": 1})
    assert (result.evictions, result.added_evictions, result.avoided_evictions, result.gaps) == (1, (), (), ())


def test_trial_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="nothing is recorded"):
        replay_with_policy(tmp_path / "nothing", CorePolicy(), START)


def test_trial_ignores_operator_orders(tmp_path: Path) -> None:
    fleet = JournaledFleet(tmp_path)
    fleet.start(4, 1)
    fleet.seal(5)
    fleet.order(OperatorAction.EVICT, node="n2")
    result = _tried(fleet, tmp_path)
    assert (result.evictions, result.added_evictions, result.avoided_evictions) == (0, (), ())


def test_trial_carries_diverging_state_across_segments(tmp_path: Path) -> None:
    """With a budget of one, n3 is evicted neither for the first segment's faults nor for later ones."""
    fleet = JournaledFleet(tmp_path, segment_bytes=1)
    _evicts_n2(fleet)
    asyncio.run(fleet.journal.drain())
    fleet.raise_finding("n3", xid(48))
    fleet.advance(8.0, "n1", "n4", "n5", "n6")
    result = _tried(fleet, tmp_path, budget={"count": 1})
    assert len(segments(tmp_path)) > 1
    assert result.evictions == 1
    assert result.added_evictions == ()
    assert [line.split()[1] for line in result.avoided_evictions] == ["n3-1"]
    assert result.gaps == ()


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
    result = replay_with_policy(tmp_path, CorePolicy(), 150.0)
    assert [(span.begins_at, span.ends_at) for span in result.spans] == [(150.0, 170.0)]
