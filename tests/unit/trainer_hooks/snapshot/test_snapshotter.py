"""One rank's snapshots and restores over a real vault: kept versions, refused versions, and failures that training
survives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.errors import NotRestorable
from everstep.ids import Version
from everstep.layout.slot_header import SlotState
from everstep.vocabulary import FindingKind
from everstep.wire.v1.training import FindingRaised, JobSpec, RestoreRule, VersionSealed
from everstep_trainer.slots.copy import SnapshotSources
from everstep_trainer.snapshot import snapshotter as module
from everstep_trainer.snapshot.job import SnapshotPhase
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.ranks.lone_rank import LoneRank, lone_rank


@pytest.fixture
def rank(program_forks: ForkPool) -> Iterator[LoneRank]:
    with lone_rank(program_forks) as made:
        yield made


@pytest.mark.promise("committed-stays", "training-independent")
def test_five_slots_keep_newest_committed_and_candidate(rank: LoneRank) -> None:
    snapshots = rank.snapshotter(1)
    for step in range(1, 10):
        rank.step(snapshots, step)
    snapshots.wait()
    assert {Version(1, 1), Version(1, 8)} <= rank.sealed(), "the first version is kept, with no word from anybody"
    snapshots.update_versions(Version(1, 1), 11)
    for step in range(10, 19):
        rank.step(snapshots, step)
    snapshots.wait()
    assert {Version(1, 1), Version(1, 11), Version(1, 17)} <= rank.sealed(), "11 may be committed, or not"
    snapshots.update_versions(Version(1, 11), 20)
    for step in range(19, 29):
        rank.step(snapshots, step)
    snapshots.close(finish=True)
    assert {v.step for v in rank.sealed()} == {11, 20, 26, 27, 28}


@pytest.mark.promise("restore-clean")
def test_audited_version_stays_and_is_restored(rank: LoneRank) -> None:
    """Later versions are committed meanwhile; a conviction bars them all."""
    audited, job = Version(1, 1), JobSpec(job=JOB, sdc="standard")
    snapshots = rank.snapshotter(1, job=job)
    rank.step(snapshots, 1)
    snapshots.wait()
    for candidate in range(10, 60, 10):
        committed = Version(1, max(1, candidate - 10))
        snapshots.update_versions(committed, candidate, (audited, Version(1, 10)) if candidate > 10 else (audited,))
        for step in range(candidate - 8, candidate + 2):
            rank.step(snapshots, step)
    snapshots.wait()
    assert {audited, Version(1, 10), Version(1, 40), Version(1, 50)} <= rank.sealed()
    snapshots.close(finish=True)
    rule = RestoreRule(floor=audited, ceiling=audited, pinned=(audited,))
    result = rank.restore(2, rule)
    assert (result.version, result.step) == (audited, 1)
    assert rank.model.weight.unique().tolist() == [1.0]
    again = rank.snapshotter(2, job=job, rule=rule, restored=audited)
    for step in range(2, 9):
        rank.step(again, step)
    again.close(finish=True)
    assert audited in rank.sealed(), "for the next conviction"


def test_small_snapshot_is_sealed_before_the_update(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copier is woken when training reaches its update, not when the snapshot is copied."""
    monkeypatch.setattr("everstep_trainer.snapshot.snapshotter.COPIER_POLL_S", 3600.0)
    snapshots = rank.snapshotter(1, job=JobSpec(job=JOB, digest_interval=0))

    def is_sealed(step: int) -> bool:
        return Version(1, step) in rank.sealed()

    for step in (1, 2, 3):
        rank.step(snapshots, step)
        snapshots.wait()
        until(partial(is_sealed, step), f"step {step} is sealed")
    snapshots.close(finish=True)


def test_two_slots_keep_only_committed_and_candidate(rank: LoneRank) -> None:
    reports: list[VersionSealed] = []
    snapshots = rank.snapshotter(1, reports.append, options=SnapshotOptions(slots=2))
    for step in range(1, 6):
        rank.step(snapshots, step)
    until(lambda: rank.sealed() == {Version(1, 1)}, "the first version is stored, with no word from anybody")
    snapshots.update_versions(Version(1, 1), 7)
    for step in range(6, 10):
        rank.step(snapshots, step)
    until(lambda: rank.sealed() == {Version(1, 1), Version(1, 7)}, "the candidate is stored")
    snapshots.update_versions(Version(1, 1), 11)  # some rank had heard of 7 too late: it never will be committed
    for step in range(10, 13):
        rank.step(snapshots, step)
    until(lambda: rank.sealed() == {Version(1, 1), Version(1, 11)}, "the next one takes its place")
    snapshots.update_versions(Version(1, 11), 14)
    for step in range(13, 16):
        rank.step(snapshots, step)
    snapshots.close(finish=True)
    assert rank.sealed() == {Version(1, 11), Version(1, 14)}
    assert [(r.version.step, r.commit_candidate) for r in reports] == [(step, True) for step in (1, 7, 11, 14)]
    assert rank.view().slots == 2
    assert rank.restore(2, RestoreRule(floor=Version(1, 11))).version == Version(1, 14)


@pytest.mark.promise("committed-stays")
def test_two_slots_keep_the_floor_until_the_next_commit(rank: LoneRank) -> None:
    choices = SnapshotOptions(slots=2)
    first = rank.snapshotter(1, options=choices)
    rank.step(first, 1)
    first.wait()
    first.update_versions(None, 2)
    rank.step(first, 2)
    first.close(finish=True)
    rule = RestoreRule(floor=Version(1, 1))
    second = rank.snapshotter(2, restored=Version(1, 2), rule=rule, options=choices)
    for step in (3, 4):
        rank.step(second, step)
    second.update_versions(None, 5)
    rank.step(second, 5)
    second.close(finish=True)
    assert rank.sealed() == {Version(1, 1), Version(2, 5)}


def test_snapshot_interval_stores_every_nth_and_candidates(rank: LoneRank) -> None:
    snapshots = rank.snapshotter(1, options=SnapshotOptions(interval=4))
    for step in range(1, 15):
        if step == 9:
            snapshots.update_versions(Version(1, 1), 10)
        rank.step(snapshots, step)
    assert snapshots.interval_at(14) == 4
    snapshots.close(finish=True, rescue_wait_s=None)
    assert {v.step for v in rank.sealed()} == {1, 4, 8, 10, 12}
    assert rank.restore(2, RestoreRule(floor=Version(1, 1))).version == Version(1, 12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"interval": 0}, "take 1"),
        ({"slots": 3}, "take 5"),
        ({"slots": 2, "interval": 2}, "leave out snapshot_every=2"),
        ({"budget": 0.0}, "snapshot_budget=0.0: take a share"),
        ({"budget": 1.0}, "snapshot_budget=1.0: take a share"),
    ],
)
def test_invalid_choices_are_refused_with_advice(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SnapshotOptions(**wrong)  # type: ignore[arg-type]


@pytest.mark.promise("committed-stays")
def test_candidate_sealed_before_its_notice_is_not_reported(rank: LoneRank) -> None:
    reports: list[VersionSealed] = []
    snapshots = rank.snapshotter(1, reports.append)
    for step in range(1, 6):
        rank.step(snapshots, step)
    snapshots.wait()
    snapshots.update_versions(Version(1, 1), 4)
    for step in range(6, 9):
        rank.step(snapshots, step)
    snapshots.close(finish=True)
    assert [r.version.step for r in reports] == [1]


@pytest.mark.promise("committed-stays")
def test_earlier_commit_is_kept_until_the_next_commit(rank: LoneRank) -> None:
    rank.steps(1, 6)
    snapshots = rank.snapshotter(2, restored=Version(1, 6), rule=RestoreRule(floor=Version(1, 4)))
    for step in range(7, 12):
        rank.step(snapshots, step)
    snapshots.wait()
    snapshots.update_versions(None, 13)
    for step in range(12, 17):
        rank.step(snapshots, step)
    snapshots.close(finish=True)
    assert rank.sealed() >= {Version(1, 4), Version(2, 13), Version(2, 15), Version(2, 16)}


@pytest.mark.promise("restored-is-whole")
def test_interrupted_write_is_not_restored(rank: LoneRank) -> None:
    rank.steps(1, 3)
    view, slot = rank.view(), rank.slot_of(Version(1, 3))
    header = view.header(slot)
    assert header is not None
    view.begin(slot, 0, Version(1, 4), view.manifest(slot), header.payload_bytes)
    assert view.header(slot).state is SlotState.FILLING  # type: ignore[union-attr]
    assert rank.restore(2, RestoreRule()).version == Version(1, 2)
    assert rank.model.weight.unique().tolist() == [2.0]


@pytest.mark.promise("restored-is-whole")
def test_corrupt_slot_is_reported_and_an_older_version_used(rank: LoneRank) -> None:
    rank.steps(1, 3)
    rank.damage(Version(1, 3))
    findings: list[FindingRaised] = []
    result = rank.restore(2, RestoreRule(floor=Version(1, 2)), findings)
    assert result.version == Version(1, 2)
    assert rank.model.weight.unique().tolist() == [2.0]
    assert [f.finding.kind for f in findings] == [FindingKind.SLOT_CORRUPT]
    assert findings[0].finding.subject == f"{JOB}/rank0/1:3"


@pytest.mark.promise("restore-floor")
def test_damaged_committed_version_is_not_replaced_by_older(rank: LoneRank) -> None:
    rank.steps(1, 3)
    rank.damage(Version(1, 3))
    with pytest.raises(NotRestorable, match="version 1:3 was committed"):
        rank.restore(2, RestoreRule(floor=Version(1, 3)))


def test_unfinished_generation_leaves_its_copy_unsealed(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    """The live state may already be changing, so its copy must not count."""
    entered, go_on = threading.Event(), threading.Event()
    copy = SnapshotSources.copy

    def slow_copy(*arguments: object, **more: object) -> object:
        entered.set()
        go_on.wait(60)
        return copy(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SnapshotSources, "copy", slow_copy)
    snapshots = rank.snapshotter(1, options=SnapshotOptions(overlap=True))
    rank.step(snapshots, 1)
    assert entered.wait(60)
    closing = threading.Thread(target=snapshots.close, args=(False,))
    closing.start()
    until(lambda: snapshots._last.copied.is_set(), "the wait is over")  # type: ignore[union-attr]
    go_on.set()
    closing.join(60)
    assert rank.sealed() == set()


@pytest.mark.parametrize("rows", [64, 16 << 10])
def test_small_share_is_copied_inline_and_large_in_a_thread(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    threads: list[threading.Thread] = []
    copy = SnapshotSources.copy

    def noted_copy(*arguments: object, **more: object) -> object:
        threads.append(threading.current_thread())
        return copy(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SnapshotSources, "copy", noted_copy)
    snapshots = rank.snapshotter(1)
    rank.model.weight = nn.Parameter(torch.zeros(rows, 64))
    for step in (1, 2, 3):
        rank.step(snapshots, step)
        if rows == 64 and step > 1:
            assert snapshots._last.copied.is_set()  # type: ignore[union-attr]
        snapshots.wait()
    snapshots.close(finish=True)
    assert {Version(1, 2), Version(1, 3)} <= rank.sealed()
    assert (threading.current_thread() in threads[1:]) == (rows == 64), "the first one may be planned yet"


@pytest.mark.parametrize("overlap", [None, True])
def test_exclusive_state_is_copied_before_the_next_step(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, overlap: bool | None
) -> None:
    go_on = threading.Event()
    copy = SnapshotSources.copy

    def slow_copy(self: SnapshotSources, *arguments: object, **more: object) -> object:
        go_on.wait(60)
        return copy(self, *arguments, **more)  # type: ignore[arg-type]

    spec = generation(1, ranks=[("n1", 0), ("n1", 1)], spec=JobSpec(job=JOB, nproc_per_node=2))
    store, choices = HashStore(), SnapshotOptions(overlap=overlap)
    stages = [TrackedState({"model": nn.ModuleDict({f"stage{number}": nn.Linear(8, 8)})}) for number in (0, 1)]
    first, second = (
        Snapshotter(rank.client, stage, spec, member, store, lambda _: None, options=choices)
        for stage, member in zip(stages, spec.roster, strict=True)
    )
    for snapshots in (first, second):  # what a stage alone holds is known when that is planned
        snapshots.begin(1)
    for snapshots in (first, second):
        snapshots.wait()
    monkeypatch.setattr(SnapshotSources, "copy", slow_copy)
    begun = threading.Thread(target=first.begin, args=(2,))
    begun.start()
    if overlap:
        begun.join(60)
        assert not begun.is_alive()
        assert not first._last.copied.is_set()  # type: ignore[union-attr]
    else:
        until(lambda: first._last.phase is SnapshotPhase.COPYING, "the copy has begun")  # type: ignore[union-attr]
        assert begun.is_alive()
    go_on.set()
    begun.join(60)
    first.wait()
    for snapshots in (first, second):
        snapshots.close(finish=True)
    assert Version(1, 2) in rank.sealed()


def test_rank_missing_from_the_plan_does_not_stop_training(
    rank: LoneRank, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "PLAN_WAIT_S", 0.05)
    spec = generation(1, ranks=[("n1", 0), ("n2", 0)], spec=JobSpec(job=JOB, max_nodes=2))
    state = TrackedState(rank.objects())
    snapshots = Snapshotter(rank.client, state, spec, spec.roster[0], HashStore(), lambda _: None)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            rank.step(snapshots, step)
        snapshots.wait()
    snapshots.close(finish=True)
    assert "no snapshot of step 1: it could not be planned in time" in caplog.text
