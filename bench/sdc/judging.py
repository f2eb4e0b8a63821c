"""Judge the statements about differences with the controller's own judgement, every rank on a node of its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import msgspec
from everstep_controller.core.health import audits
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


def judge_all(statements: Iterable[Statement]) -> list[Judgement]:
    """Return one judgement per case."""
    cases: dict[tuple[str, int, int, str], list[AuditStatement]] = defaultdict(list)
    for one in statements:
        said = one.mismatch
        statement = AuditStatement(job="bench", at=0.0, generation=1, rank=one.rank, **msgspec.structs.asdict(said))
        cases[str(said.link), said.step, said.owner, said.unit].append(statement)
    return [_judge(case) for case in cases.values()]


def _judge(case: list[AuditStatement]) -> Judgement:
    some = case[0]
    outcome, rank = Outcome.INCONCLUSIVE, None
    match audits.judge(case, {one.rank: node_of(one.rank) for one in case}):
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
