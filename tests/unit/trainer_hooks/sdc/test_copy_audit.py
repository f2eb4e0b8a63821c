"""Audits of copies: a copy that differs from its source is never sealed, and changed state accuses no rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.clock import ManualClock
from everstep.ids import Version
from everstep.vocabulary import AuditKind, AuditRole
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.digests.digest import combined_digest
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.copy_audit import CopyAudit
from everstep_trainer.sdc.presets import AuditOptions
from everstep_trainer.slots.copy import CopyResult, HostMover, SlotTargets
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.lone_rank import LoneRank, lone_rank


@pytest.fixture
def rank(program_forks: ForkPool) -> Iterator[LoneRank]:
    with lone_rank(program_forks) as rank:
        yield rank


class AuditedCopies:
    """A rank that stores two steps, both of them candidates. A test may change the copy of the second one."""

    def __init__(self, rank: LoneRank, *, audit: bool = True) -> None:
        spec = generation(1)
        self.rank = rank
        self.model = nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 1).to(torch.bfloat16))
        self.reported: list[Mismatch] = []
        self.snapshots = Snapshotter(
            rank.client,
            TrackedState({"model": self.model}),
            spec,
            spec.roster[0],
            HashStore(),
            lambda _: None,
            options=SnapshotOptions(copy_audits=AuditOptions(share=1.0) if audit else None),
            on_mismatch=self.reported.append,
        )

    def step(self, number: int) -> None:
        self.snapshots.wait()
        self.snapshots.update_versions(None, number)
        self.snapshots.begin(number)
        self.snapshots.wait()
        assert self.snapshots._last is not None
        assert self.snapshots._last.done.wait(60)

    def restore(self) -> Version | None:
        self.snapshots.close(finish=True)
        spec = generation(2, restore=RestoreRule())
        again = nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 1).to(torch.bfloat16))
        state = TrackedState({"model": again})
        return Restoration(self.rank.client, spec, spec.roster[0], HashStore()).fill(state).version


def tamper(monkeypatch: pytest.MonkeyPatch, with_sources: bool) -> None:
    """Make each copy flip a bit of its result, or of the state itself if ``with_sources``."""
    run = HostMover.run

    def wrong(mover: HostMover, targets: Any, sources: Any, digests: Any, **more: Any) -> CopyResult:
        result = run(mover, targets, sources, digests, **more)
        (sources if with_sources else targets)[0].detach().view(torch.uint8).view(-1)[3] ^= 64
        if with_sources:
            targets[0].view(torch.uint8).view(-1)[3] ^= 64
        return result

    monkeypatch.setattr(HostMover, "run", wrong)


def test_right_copies_are_sealed(rank: LoneRank) -> None:
    copied = AuditedCopies(rank)
    for number in (1, 2):
        copied.step(number)
    assert copied.restore() == Version(1, 2)
    assert not copied.reported


def test_wrong_copy_is_reported_and_not_restored(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = AuditedCopies(rank)
    copied.step(1)
    tamper(monkeypatch, with_sources=False)
    copied.step(2)
    (found,) = copied.reported
    assert (found.audit, found.role, found.step) == (AuditKind.CHECKPOINT, AuditRole.OWNER, 2)
    assert found.original != found.digest
    assert copied.restore() == Version(1, 1)


def test_state_changed_during_its_copy_accuses_no_rank(rank: LoneRank, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = AuditedCopies(rank)
    copied.step(1)
    tamper(monkeypatch, with_sources=True)
    copied.step(2)
    assert not copied.reported
    assert copied.restore() == Version(1, 1)


@pytest.mark.parametrize(
    ("options", "is_on_gpu", "audited"),
    [
        (AuditOptions(share=0.1), False, [1, 7]),
        (AuditOptions(share=0.1), True, [1, 2, 3, 4, 5, 6, 7, 8]),
        (AuditOptions(interval=3), True, [1, 4, 7]),
    ],
)
def test_copies_are_audited_within_the_share(options: AuditOptions, is_on_gpu: bool, audited: list[int]) -> None:
    clock = ManualClock()
    audit = CopyAudit(0, options, lambda _: None, clock)
    tensor, found = torch.ones(3), []
    for step in range(1, 9):
        clock.advance(1.0)
        if audit.begin(step, is_on_gpu=is_on_gpu):
            found.append(step)
            clock.advance(0.7)
            copied = CopyResult({}, before=combined_digest([tensor]))
            assert audit.is_right(Version(1, step), copied, SlotTargets([tensor]), lambda: tensor)
    assert found == audited
