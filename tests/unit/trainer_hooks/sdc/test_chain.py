"""The chain of audits: intervals from costs, the order of calls, and steps after which all work was checked."""

from __future__ import annotations

import pytest
import torch
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.chain import AuditChain
from everstep_trainer.sdc.presets import MAX_INTERVAL, LinkOptions, link_options
from everstep_trainer.sdc.schedule import FIRST_AGREEMENT_STEP, FIRST_INTERVAL, WARMUP_STEPS, AuditSchedule

from everstep.vocabulary import AuditLink

SETUP = AuditSetup(
    rank=0,
    world_size=1,
    nodes=(),
    device=torch.device("cpu"),
    objects={},
    has_replica_per_rank=True,
    report=lambda mismatch: None,
)


def test_preset_gives_links_with_shares() -> None:
    assert not link_options("off")
    assert sum(one.share for one in link_options("standard").values()) < 0.0211
    assert AuditLink.PEER_REPLAY in link_options("light")


def test_links_change_a_preset_one_by_one() -> None:
    options = link_options("light", {"peer_replay": {"interval": 10}, "gradient_norm": None, "state": {"share": 0.1}})
    assert options == {AuditLink.PEER_REPLAY: LinkOptions(interval=10), AuditLink.STATE: LinkOptions(share=0.1)}


@pytest.mark.parametrize("links", [{"gpu": None}, {"state": {"shares": 0.1}}, {"state": {"share": 2.0}}])
def test_wrong_link_options_are_refused(links: dict[str, dict[str, float] | None]) -> None:
    with pytest.raises(ValueError, match=r"audit|share"):
        link_options("light", links)


@pytest.mark.parametrize(
    ("due_s", "idle_s", "interval"),
    [(0.01, 0.0, 1), (0.1, 0.0, 10), (0.1, 0.006, 24), (0.1, 0.02, MAX_INTERVAL), (0.0, 0.0, 1)],
)
def test_interval_keeps_cost_within_share(due_s: float, idle_s: float, interval: int) -> None:
    link = AuditLink.STATE
    schedule = AuditSchedule({link: LinkOptions(share=0.01)}, first_step=1)
    for step in range(1, 30):
        cost_s = due_s if schedule.is_due(link, step) else idle_s
        schedule.record_step(step, 1.0 + cost_s, {link: cost_s})
    assert schedule.proposals() == [interval]


def test_warm_up_steps_are_not_measured() -> None:
    schedule = AuditSchedule({AuditLink.STATE: LinkOptions(share=0.01)}, first_step=1)
    for step in range(1, 1 + WARMUP_STEPS):
        schedule.record_step(step, 1.0, {AuditLink.STATE: 1.0})
    assert schedule.proposals() == [FIRST_INTERVAL]


class _CountingAudit(Audit):
    link = AuditLink.STATE

    def __init__(self, rounds: int) -> None:
        super().__init__(SETUP)
        self._rounds = rounds
        self.calls: list[tuple[str, int, bool]] = []

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


def test_chain_calls_each_point_once_per_step() -> None:
    audit = _CountingAudit(rounds=0)
    chain = AuditChain([audit], {AuditLink.STATE: LinkOptions(interval=2)}, SETUP, 1, lambda step: None)
    _run(chain, range(1, 3))
    points = ["begin", "before", "after"]
    assert audit.calls == [(point, 1, True) for point in points] + [(point, 2, False) for point in points]


def test_clean_rotations_are_reported_by_their_start() -> None:
    clean: list[int] = []
    audit = _CountingAudit(rounds=3)
    chain = AuditChain([audit], {AuditLink.STATE: LinkOptions(interval=2)}, SETUP, 1, clean.append)
    _run(chain, range(1, 8))  # due in 1, 3, 5 and 7
    assert clean == [2]
    chain.record_mismatch()
    _run(chain, range(8, 13))  # due in 9 and 11
    assert clean == [2]
    _run(chain, range(13, 14))
    assert clean == [2, 8]


def test_ranks_adopt_an_interval_at_the_agreement() -> None:
    audit = _CountingAudit(rounds=0)
    chain = AuditChain([audit], {AuditLink.STATE: LinkOptions(share=1.0)}, SETUP, 1, lambda step: None)
    _run(chain, range(1, FIRST_AGREEMENT_STEP + 2))
    audit.calls.clear()
    _run(chain, range(FIRST_AGREEMENT_STEP + 2, FIRST_AGREEMENT_STEP + 5))
    assert all(due for _, _, due in audit.calls)
