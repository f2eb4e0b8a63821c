"""The bench judges with the controller's rules, including that of the control group."""

from __future__ import annotations

from bench.sdc.judging import Judgement, Outcome, Statement, judge_all
from everstep.vocabulary import AuditKind, AuditRole
from everstep_trainer.sdc.audit import Mismatch


def _own(rank: int, unit: str = "layers.0", step: int = 4) -> Statement:
    mismatch = Mismatch(
        audit=AuditKind.MATMUL, step=step, unit=unit, owner=rank, role=AuditRole.OWNER, original="a", digest="b"
    )
    return Statement(rank, mismatch)


def test_one_rank_that_contradicts_itself_has_a_strike() -> None:
    assert judge_all([_own(2)], 4) == [Judgement("matmul", 4, Outcome.STRIKE, 2)]


def test_half_of_the_ranks_at_once_are_the_program() -> None:
    assert judge_all([_own(0), _own(3, "layers.1")], 4) == [Judgement("matmul", 4, Outcome.PROGRAM, None)]
