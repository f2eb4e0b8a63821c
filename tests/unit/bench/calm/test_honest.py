"""Honest programs judged by the controller's rules."""

from __future__ import annotations

import pytest

from bench.calm.__main__ import QUICK
from bench.calm.audited_training import Record, train
from bench.calm.hang_programs import HANGS
from bench.calm.honest_judge import judge
from bench.calm.honest_programs import HONEST
from bench.calm.programs import PROGRAMS
from everstep.vocabulary import AuditKind, AuditRole
from everstep_trainer.sdc.audit import Mismatch


def contradiction(rank: int, step: int) -> Mismatch:
    return Mismatch(
        audit=AuditKind.UPDATE,
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


@pytest.mark.slow
def test_honest_program_trains_to_its_end_under_audits() -> None:
    record = train("plain", "standard")
    assert record.failure == ""
    assert record.steps == 40
    assert record.statements == {}


def test_programs_are_described_and_named_once() -> None:
    assert len(PROGRAMS) >= 40
    assert len(HONEST) >= 37
    names = [*PROGRAMS, *HANGS]  # a rank finds its program by the name alone
    assert len(set(names)) == len(names)
    sentences = [
        *(program.sentence for program in PROGRAMS.values()),
        *(program.sentence for program in HONEST.values()),
    ]
    assert all(sentence.endswith(".") for sentence in sentences)
    assert set(QUICK) <= {f"calm/{name}" for name in PROGRAMS}


def test_program_under_audits_keeps_all_else() -> None:
    plain, audited = PROGRAMS["adversarial_pair"], PROGRAMS["adversarial_pair_under_standard"]
    assert audited.options == ("--sdc", "standard")
    assert (audited.train, audited.effects) == (plain.train, plain.effects)
