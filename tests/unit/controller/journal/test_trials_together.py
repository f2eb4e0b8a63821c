"""A change of policy tried on the journals of several controllers: as on one that has all of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
from everstep_controller.journal.policy_replay import replay_with_policy
from everstep_controller.journal.recorder import Journal, segments

from everstep.errors import Conflict, EverstepError, NotFound, Unavailable
from everstep.policy_trial_results import FAILOVER_S, merge_results, recording_gaps
from everstep.vocabulary import Action, Decision, Verdict
from everstep.wire.v1.operator_history import PolicyTrialResult, RecordedSpan
from tests.support.core_fleet import START
from tests.support.findings import xid
from tests.support.journaled import JournaledFleet

A, B, C = "https://a:7700", "https://b:7700", "https://c:7700"


def _follow(fleet: JournaledFleet, folder: Path) -> None:
    """The controller whose journal is ``folder`` leads from now on."""
    fleet.journal.close()
    fleet.journal = Journal(folder, max_bytes=1 << 30, keep_s=86400.0)
    fleet.epoch += 1
    fleet.now += 1.0
    fleet.restart()
    fleet.hear(*(node for node in fleet.state.nodes))
    fleet.advance(3.0, *fleet.state.nodes)


def _past(tmp_path: Path) -> JournaledFleet:
    """a, b and a again lead; under each of them a node is evicted."""
    fleet = JournaledFleet(tmp_path / "a")
    fleet.start(6, 2)
    fleet.seal(5)
    fleet.raise_finding("n2", xid(79))
    for folder, node, number in (("b", "n3", 48), ("a", "n4", 95)):
        fleet.advance(8.0, *fleet.state.nodes)
        _follow(fleet, tmp_path / folder)
        fleet.raise_finding(node, xid(number))
    fleet.journal.close()
    return fleet


def _tried(fleet: JournaledFleet, folder: Path, since: float = START, **knobs: object) -> PolicyTrialResult:
    return replay_with_policy(folder, msgspec.structs.replace(fleet.policy, **knobs), since)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_merged_trials_equal_a_single_trial(tmp_path: Path, count: int) -> None:
    fleet = _past(tmp_path)
    (tmp_path / "all").mkdir()
    for segment in (*segments(tmp_path / "a"), *segments(tmp_path / "b")):
        shutil.copy(segment, tmp_path / "all")
    whole = _tried(fleet, tmp_path / "all", eviction_count=count)
    parts = {url: _tried(fleet, tmp_path / name, eviction_count=count) for url, name in ((A, "a"), (B, "b"))}
    told = merge_results(parts)
    assert sorted(told.avoided_evictions) == sorted(whole.avoided_evictions)
    assert (
        msgspec.structs.replace(told, avoided_evictions=whole.avoided_evictions) == whole
    )  # its lines have no time to be ordered by
    assert (whole.gaps, len(whole.avoided_evictions)) == ((), {1: 2, 2: 1, 4: 0}[count])


def test_unreachable_controller_is_reported_as_gap(tmp_path: Path) -> None:
    fleet = _past(tmp_path)
    told = merge_results({A: _tried(fleet, tmp_path / "a"), B: Unavailable("nobody answers")})
    assert (told.evictions, len(told.gaps)) == (2, 1)
    assert told.sentence.endswith("; https://b:7700 is not counted: nobody answers")


def test_controller_without_records_is_no_gap(tmp_path: Path) -> None:
    fleet = _past(tmp_path)
    parts = {A: _tried(fleet, tmp_path / "a"), B: _tried(fleet, tmp_path / "b"), C: NotFound("nothing is recorded")}
    assert merge_results(parts).sentence == "it would have evicted 3 times, as happened"


def test_shared_journal_counts_once(tmp_path: Path) -> None:
    fleet = _past(tmp_path)
    part = _tried(fleet, tmp_path / "a")
    assert merge_results({A: part, C: part}) == merge_results({A: part})


def test_eviction_seen_by_another_controller_is_no_difference() -> None:
    """A node that left later than it would have under the change, and once more."""
    words = {"sentence": "n3: XID 48", "action": Action.DRAIN, "evidence": (), "trace": "t"}
    verdict = Verdict(id="n3-1", node="n3", decision=Decision.EVICT, at=120.0, **words)  # type: ignore[arg-type]
    line = "verdict n3-1 (evict): n3: XID 48"
    parts = [
        PolicyTrialResult(
            since=at, events=1, evictions=1, spans=(RecordedSpan(begins_at=at, ends_at=at + 99.0, epoch=epoch),)
        )
        for epoch, at in ((1, 100.0), (2, 200.0))
    ]
    replace = msgspec.structs.replace
    told = merge_results(
        {A: replace(parts[0], added_evictions=(verdict,)), B: replace(parts[1], avoided_evictions=(line, line))}
    )
    assert (told.evictions, told.added_evictions, told.avoided_evictions) == (2, (), (line,))


def test_merge_without_records_raises_the_reason() -> None:
    none: dict[str, PolicyTrialResult | EverstepError] = {
        A: NotFound("nothing is recorded in a"),
        B: Conflict("set journal_dir"),
    }
    with pytest.raises(Conflict, match="set journal_dir"):
        merge_results(none)
    with pytest.raises(NotFound, match="nothing is recorded in a"):
        merge_results({A: none[A]})


@pytest.mark.parametrize(
    ("epoch", "later", "missing"), [(8, 1.0, False), (8, FAILOVER_S + 1.0, True), (9, 1.0, True), (7, 1.0, True)]
)
def test_quick_failover_is_no_gap_but_missing_epoch_is(epoch: int, later: float, missing: bool) -> None:
    first = RecordedSpan(begins_at=0.0, ends_at=100.0, epoch=7)
    second = RecordedSpan(begins_at=100.0 + later, ends_at=200.0 + later, epoch=epoch)
    assert recording_gaps((second, first)) == (((100.0, 100.0 + later),) if missing else ())
