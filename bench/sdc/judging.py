"""Judge the statements about differences with the controller's own judgement, every rank on a node of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from everstep_controller.core.health import audits
from everstep_controller.core.health.control_group import has_common_cause
from everstep_controller.core.state import Accusation
from everstep_trainer.sdc.audit import Mismatch

from everstep.wire.v1.training import AuditStatement

REPLICA_DIGEST = "replica_digest"
"""The comparison of all parameters across replicas."""


class Outcome(StrEnum):
    """What a judgement says of the rank that it names. The first ones weigh most."""

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
    """``rank``: the one that is named; None if nobody is."""

    link: str
    step: int
    outcome: Outcome
    rank: int | None


def node_of(rank: int) -> str:
    """Return the node of a rank."""
    return f"n{rank}"


def judge_all(statements: Iterable[Statement], world_size: int | None = None) -> list[Judgement]:
    """Return one judgement per case; one for an audit of a step in which the program is the cause.

    Args:
        statements: Those of all ranks.
        world_size: The number of ranks; None: up to the last one that is named.
    """
    steps: dict[tuple[str, int], list[AuditStatement]] = defaultdict(list)
    for one in statements:
        said = one.mismatch
        statement = AuditStatement(job="bench", at=0.0, generation=1, rank=one.rank, **msgspec.structs.asdict(said))
        steps[str(said.link), said.step].append(statement)
    return [judgement for said in steps.values() for judgement in _judge_step(said, world_size)]


def _judge_step(statements: list[AuditStatement], world_size: int | None) -> list[Judgement]:
    """Judge the statements of one audit in one step."""
    cases: dict[tuple[int, str], list[AuditStatement]] = defaultdict(list)
    for one in statements:
        cases[one.owner, one.unit].append(one)
    world_size = world_size or 1 + max(max(one.owner, one.rank) for one in statements)
    judged = [(case[0], audits.judge(case, {one.rank: node_of(one.rank) for one in case})) for case in cases.values()]
    accusations = [
        Accusation(rank, node_of(rank), isinstance(judgement, audits.Tied))
        for some, judgement in judged
        if (rank := audits.accused_rank(judgement, some.owner)) is not None
    ]
    if has_common_cause(accusations, world_size, world_size):
        return [Judgement(str(statements[0].link), statements[0].step, Outcome.PROGRAM, None)]
    return [_name(some, judgement) for some, judgement in judged]


def _name(some: AuditStatement, judgement: audits.AuditJudgement) -> Judgement:
    outcome, rank = Outcome.INCONCLUSIVE, None
    match judgement:
        case audits.OwnerConvicted():
            outcome, rank = Outcome.CONVICTED, some.owner
        case audits.OwnerStrike():
            outcome, rank = Outcome.STRIKE, some.owner
        case audits.AuditorStrike(rank=auditor):
            outcome, rank = Outcome.AUDITOR_STRIKE, auditor
        case audits.Suspicion(names_owner=True):
            outcome, rank = Outcome.SUSPICION, some.owner
        case audits.Suspicion():
            outcome = Outcome.UNNAMED_SUSPICION
        case audits.Tied():
            outcome = Outcome.TIE
    return Judgement(str(some.link), some.step, outcome, rank)


def judge_replicas(digests: list[int], step: int) -> Judgement:
    """Return the judgement of parameters that differ between replicas: a strict majority names the other one."""
    most = max(set(digests), key=digests.count)
    others = [rank for rank, one in enumerate(digests) if one != most]
    if 2 * len(others) >= len(digests) or len(others) != 1:
        return Judgement(REPLICA_DIGEST, step, Outcome.TIE, None)
    return Judgement(REPLICA_DIGEST, step, Outcome.CONVICTED, others[0])
