"""Judge mismatches by the controller's own rules, with every rank on a node of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from everstep.wire.v1.training import AuditStatement
from everstep_controller.core.judgement import audits
from everstep_controller.core.judgement.control_group import has_common_cause
from everstep_controller.core.state import Accusation
from everstep_trainer.sdc.audit import Mismatch

REPLICA_DIGEST = "replica_digest"
"""The comparison of all parameters across replicas."""


class Outcome(StrEnum):
    """The outcome of a judgement for the rank that it names, the gravest first."""

    CONVICTED = "convicted"
    STRIKE = "strike"
    AUDITOR_STRIKE = "auditor strike"
    SUSPICION = "suspicion"
    UNNAMED_SUSPICION = "suspicion of an unknown rank"
    TIE = "tie"
    INCONCLUSIVE = "inconclusive"
    PROGRAM = "program"


@dataclass(frozen=True)
class Statement:
    """A mismatch with the rank that stated it."""

    rank: int
    mismatch: Mismatch


@dataclass(frozen=True)
class Judgement:
    """The judgement of one audit. ``rank``: the named rank, or None."""

    audit: str
    step: int
    outcome: Outcome
    rank: int | None


def node_of(rank: int) -> str:
    """Return the node of a rank."""
    return f"n{rank}"


def judge_all(statements: Iterable[Statement], world_size: int | None = None) -> list[Judgement]:
    """Return one judgement for each case, or one for an audited step if the program is the cause.

    Args:
        statements: The statements of all ranks.
        world_size: The number of ranks. None: up to the highest rank in the statements.
    """
    steps: dict[tuple[str, int], list[AuditStatement]] = defaultdict(list)
    for stated in statements:
        found = stated.mismatch
        fields = msgspec.structs.asdict(found)
        statement = AuditStatement(job="bench", at=0.0, generation=1, rank=stated.rank, **fields)
        steps[str(found.audit), found.step].append(statement)
    return [judgement for of_step in steps.values() for judgement in _judge_step(of_step, world_size)]


def _judge_step(statements: list[AuditStatement], world_size: int | None) -> list[Judgement]:
    """Judge the statements of one audit in one step."""
    cases: dict[tuple[int, str], list[AuditStatement]] = defaultdict(list)
    for statement in statements:
        cases[statement.owner, statement.unit].append(statement)
    world_size = world_size or 1 + max(max(statement.owner, statement.rank) for statement in statements)
    judged = [(case[0], audits.judge(case, {s.rank: node_of(s.rank) for s in case})) for case in cases.values()]
    accusations = [
        Accusation(rank, node_of(rank), isinstance(judgement, audits.Tied))
        for first, judgement in judged
        if (rank := audits.accused_rank(judgement, first.owner)) is not None
    ]
    if has_common_cause(accusations, world_size, world_size):
        return [Judgement(str(statements[0].audit), statements[0].step, Outcome.PROGRAM, None)]
    return [_name(first, judgement) for first, judgement in judged]


def _name(statement: AuditStatement, judgement: audits.AuditJudgement) -> Judgement:
    outcome, rank = Outcome.INCONCLUSIVE, None
    match judgement:
        case audits.OwnerConvicted():
            outcome, rank = Outcome.CONVICTED, statement.owner
        case audits.OwnerStrike():
            outcome, rank = Outcome.STRIKE, statement.owner
        case audits.AuditorStrike(rank=auditor):
            outcome, rank = Outcome.AUDITOR_STRIKE, auditor
        case audits.Suspicion(names_owner=True):
            outcome, rank = Outcome.SUSPICION, statement.owner
        case audits.Suspicion():
            outcome = Outcome.UNNAMED_SUSPICION
        case audits.Tied():
            outcome = Outcome.TIE
    return Judgement(str(statement.audit), statement.step, outcome, rank)


def judge_replicas(digests: list[int], step: int) -> Judgement:
    """Return the judgement of parameters that differ between replicas: a strict majority names the other replica."""
    most = max(set(digests), key=digests.count)
    others = [rank for rank, digest in enumerate(digests) if digest != most]
    if 2 * len(others) >= len(digests) or len(others) != 1:
        return Judgement(REPLICA_DIGEST, step, Outcome.TIE, None)
    return Judgement(REPLICA_DIGEST, step, Outcome.CONVICTED, others[0])
