"""The chain of audits: intervals from costs, the order of calls, and the steps after which all work was checked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from everstep.clock import ManualClock
from everstep.vocabulary import AuditKind
from everstep_trainer.base.core_contention import CoreContention
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.cost_meter import StepCost
from everstep_trainer.sdc.presets import MAX_INTERVAL, AuditOptions, audit_options
from everstep_trainer.sdc.schedule import FIRST_AGREEMENT_STEP, FIRST_INTERVAL, WARMUP_STEPS, AuditSchedule

SETUP = AuditSetup(
    rank=0,
    world_size=1,
    nodes=(),
    device=torch.device("cpu"),
    objects={},
    has_replica_per_rank=True,
    report=lambda mismatch: None,
)


def test_preset_gives_audits_with_shares() -> None:
    assert not audit_options("off")
    standard = audit_options("standard")
    assert sum(options.share for kind, options in standard.items() if kind is not AuditKind.CHECKPOINT) < 0.0301
    assert AuditKind.PEER_REPLAY in audit_options("light")


def test_audits_change_a_preset_one_by_one() -> None:
    changes = {"peer_replay": {"interval": 10}, "gradient_norm": None, "gradient_buffer": None, "state": {"share": 0.1}}
    options = audit_options("light", changes)
    assert options == {AuditKind.PEER_REPLAY: AuditOptions(interval=10), AuditKind.STATE: AuditOptions(share=0.1)}


@pytest.mark.parametrize("audits", [{"gpu": None}, {"state": {"shares": 0.1}}, {"state": {"share": 2.0}}])
def test_wrong_audit_options_are_refused(audits: dict[str, dict[str, float] | None]) -> None:
    with pytest.raises(ValueError, match=r"audit|share"):
        audit_options("light", audits)


def measured(rank_costs: Sequence[StepCost], steps: int = 30) -> list[int]:
    """Return the intervals of all ranks after steps of one second, in which an audit costs each rank something else."""
    kind = AuditKind.STATE
    ranks = [AuditSchedule({kind: AuditOptions(share=0.01)}, first_update=1) for _ in rank_costs]
    for step in range(1, steps):
        for schedule, cost in zip(ranks, rank_costs, strict=True):
            costs = dict.fromkeys(schedule.due_audits(step), cost)
            schedule.record_step(step, 1.0 + sum(cost.work_s for cost in costs.values()), costs, costs)
    largest = [max(values) for values in zip(*(schedule.measures() for schedule in ranks), strict=True)]
    return [interval for schedule in ranks for interval in schedule.adopt(largest, steps)]


@pytest.mark.parametrize(("due_s", "interval"), [(0.01, 1), (0.1, 10), (20.0, MAX_INTERVAL), (0.0, 1)])
def test_interval_keeps_cost_within_share(due_s: float, interval: int) -> None:
    assert measured([StepCost(due_s, 0.0)]) == [interval]


def test_audit_on_full_cores_costs_each_rank_of_its_core(tmp_path: Path) -> None:
    contention = CoreContention(4, ManualClock(), cores=2, statistics=tmp_path / "missing")
    schedule = AuditSchedule({AuditKind.STATE: AuditOptions(share=0.01)}, 1, contention)
    for step in range(1, 30):
        schedule.record_step(step, 1.1, {AuditKind.STATE: StepCost(0.1, 0.0)}, [AuditKind.STATE])
    assert schedule.adopt(schedule.measures(), 30) == [20]


def test_wait_of_each_audit_is_that_of_its_last_rank() -> None:
    kind = AuditKind.STATE
    ranks = [AuditSchedule({kind: AuditOptions(share=0.01)}, first_update=1) for _ in range(2)]
    for step in range(1, 30):
        for rank, schedule in enumerate(ranks):
            wait_s = 0.0 if (step + rank) % 2 else 0.5  # the ranks come last in turn
            schedule.record_step(step, 1.02, {kind: StepCost(0.02, wait_s)}, [kind])
    largest = [max(values) for values in zip(*(schedule.measures() for schedule in ranks), strict=True)]
    assert [schedule.adopt(largest, 30) for schedule in ranks] == [[2], [2]]


def test_warm_up_steps_are_not_measured() -> None:
    assert measured([StepCost(1.0, 0.0)], steps=1 + WARMUP_STEPS) == [FIRST_INTERVAL]


class _CountingAudit(Audit):
    kind = AuditKind.STATE

    def __init__(self, rounds: int) -> None:
        super().__init__(SETUP)
        self._rounds = rounds
        self.calls: list[tuple[str, int, bool]] = []
        self.skips: set[int] = set()
        self.out: set[int] = set()
        self.needed_steps: set[int] = set()

    def is_needed(self, step: int) -> bool:
        return step in self.needed_steps

    def compared_part(self, turn: int) -> int | None:
        step = self.calls[-1][1]
        return None if step in self.skips else turn

    @property
    def left_out(self) -> set[int]:
        return self.out

    @property
    def rounds(self) -> int:
        return self._rounds

    def begin_step(self, step: int, *, due: bool) -> None:
        self.calls.append(("begin", step, due))

    def before_update(self, step: int, *, due: bool) -> None:
        self.calls.append(("before", step, due))

    def after_update(self, step: int, *, due: bool) -> None:
        self.calls.append(("after", step, due))


def _run(chain: AuditChain, steps: range) -> None:
    for step in steps:
        chain.begin_step(step)
        chain.before_update(step)
        chain.before_update(step)  # a second optimizer
        chain.step_finished(step)


def test_chain_calls_a_audit_if_it_is_due_or_needed() -> None:
    audit = _CountingAudit(rounds=0)
    audit.needed_steps = {4}
    chain = AuditChain([audit], {AuditKind.STATE: AuditOptions(interval=4)}, SETUP, 1, lambda step: None)
    _run(chain, range(1, 5))
    points = ["begin", "before", "after"]
    assert audit.calls == [(point, 2, True) for point in points] + [(point, 4, False) for point in points]
    assert audit.previous_update == 3


def test_due_audit_waits_for_a_step_with_an_update() -> None:
    """Gradients are accumulated over eight steps of the run, and the interval is eight, too."""
    audit = _CountingAudit(rounds=1)
    chain = AuditChain([audit], {AuditKind.STATE: AuditOptions(interval=8)}, SETUP, 1, lambda step: None)
    for step in range(1, 81):
        chain.begin_step(step)
        if step % 8 == 0:
            chain.before_update(step)
        chain.step_finished(step)
    assert [step for point, step, due in audit.calls if point == "after" and due] == [16, 80]
    assert [step for point, step, due in audit.calls if point == "begin" and due] == [*range(9, 17), *range(73, 81)]


def test_clean_rotations_are_reported_by_their_start() -> None:
    clean: list[int] = []
    audit = _CountingAudit(rounds=3)
    chain = AuditChain([audit], {AuditKind.STATE: AuditOptions(interval=2)}, SETUP, 1, clean.append, rotations=1)
    _run(chain, range(1, 8))  # due in 2, 4 and 6
    assert clean == [1]
    chain.record_mismatch()
    _run(chain, range(8, 12))  # due in 8 and 10
    assert clean == [1]
    _run(chain, range(12, 13))
    assert clean == [1, 7]


def test_steps_are_clean_after_several_rotations() -> None:
    clean: list[int] = []
    audit = _CountingAudit(rounds=2)
    chain = AuditChain([audit], {AuditKind.STATE: AuditOptions(interval=2)}, SETUP, 1, clean.append, rotations=2)
    _run(chain, range(1, 8))  # due in 2, 4 and 6: the second part was audited once
    assert clean == []
    _run(chain, range(8, 9))
    assert clean == [1], "each part was audited twice in 2, 4, 6 and 8"


def test_audit_that_compared_nothing_is_not_clean() -> None:
    clean: list[int] = []
    audit = _CountingAudit(rounds=2)
    audit.skips = {2, 3, 5}
    chain = AuditChain([audit], {AuditKind.STATE: AuditOptions(interval=1)}, SETUP, 1, clean.append, rotations=1)
    _run(chain, range(1, 7))  # compared in 4 and 6
    assert clean == [3]


def test_part_that_cannot_be_audited_is_not_waited_for() -> None:
    clean: list[int] = []
    audit = _CountingAudit(rounds=2)
    chain = AuditChain([audit], {AuditKind.STATE: AuditOptions(interval=1)}, SETUP, 1, clean.append, rotations=1)
    audit.out = {1}
    _run(chain, range(1, 4))
    assert clean == [1], "the first part was compared in step 2"
    audit.out = {0, 1}
    _run(chain, range(4, 7))
    assert clean == [1], "nothing vouches for later steps"


def test_ranks_adopt_an_interval_at_the_agreement() -> None:
    audit = _CountingAudit(rounds=0)
    chain = AuditChain([audit], {AuditKind.STATE: AuditOptions(share=1.0)}, SETUP, 1, lambda step: None)
    _run(chain, range(1, FIRST_AGREEMENT_STEP + 2))
    audit.calls.clear()
    _run(chain, range(FIRST_AGREEMENT_STEP + 2, FIRST_AGREEMENT_STEP + 5))
    assert all(due for _, _, due in audit.calls)
