"""Honest programs before the controller's judge."""

from __future__ import annotations

import pytest
from everstep_trainer.sdc.audit import Mismatch

from bench.calm.audited_training import Record, train
from bench.calm.honest_judge import judge
from everstep.vocabulary import AuditLink, AuditRole


def contradiction(rank: int, step: int) -> Mismatch:
    return Mismatch(
        link=AuditLink.UPDATE,
        step=step,
        unit="update of model.weight",
        owner=rank,
        role=AuditRole.OWNER,
        original="a",
        digest="b",
    )


def test_judge_strikes_and_evicts_a_rank_that_contradicts_itself() -> None:
    record = Record({step: [(1, contradiction(1, step))] for step in (4, 8)}, steps=8)
    sentence = judge(record)
    assert sentence.strikes >= 1
    assert sentence.evictions == 1
    assert "rank 1" in sentence.words


def test_judge_does_nothing_without_statements() -> None:
    sentence = judge(Record(steps=8))
    assert (sentence.strikes, sentence.evictions, sentence.failed, sentence.regroups) == (0, 0, False, 0)


@pytest.mark.slow
def test_honest_program_trains_to_its_end_under_audits() -> None:
    record = train("plain", "standard")
    assert record.failure == ""
    assert record.steps == 40
    assert record.statements == {}
