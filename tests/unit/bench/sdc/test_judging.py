"""The bench judges with the controller's rules, including that of the control group."""

from __future__ import annotations

from everstep_trainer.sdc.audit import Mismatch

from bench.sdc.judging import Judgement, Outcome, Statement, judge_all
from everstep.vocabulary import AuditLink, AuditRole


def _own(rank: int, unit: str = "layers.0", step: int = 4) -> Statement:
    said = Mismatch(
        link=AuditLink.MATMUL, step=step, unit=unit, owner=rank, role=AuditRole.OWNER, original="a", digest="b"
    )
    return Statement(rank, said)


def test_one_rank_that_contradicts_itself_has_a_strike() -> None:
    assert judge_all([_own(2)], 4) == [Judgement("matmul", 4, Outcome.STRIKE, 2)]


def test_half_of_the_ranks_at_once_are_the_program() -> None:
    assert judge_all([_own(0), _own(3, "layers.1")], 4) == [Judgement("matmul", 4, Outcome.PROGRAM, None)]


def test_ranks_that_differ_in_other_steps_are_judged_apart() -> None:
    judged = judge_all([_own(0), _own(3, step=8)], 4)
    assert [(one.step, one.outcome) for one in judged] == [(4, Outcome.STRIKE), (8, Outcome.STRIKE)]
