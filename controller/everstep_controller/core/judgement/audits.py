"""Gather what ranks state about work whose results differ in an audit, and judge who computed wrongly.

A case is about one unit of work of one rank, its owner. The owner states the result that training used, and the result
of doing the work again. A peer, and an arbiter on another node, state what they got when they did it again. Each rank
states only its own results, and no node is convicted on the word of one other node.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

import msgspec

from everstep.ids import NodeId, Rank
from everstep.vocabulary import AuditKind, AuditRole
from everstep.wire.v1.training import AuditsClean, AuditStatement, GenerationSpec
from everstep_controller.core.checkpoints.commits import verify_audit_candidate
from everstep_controller.core.records import JobRecord, NodeRecord, node_kind
from everstep_controller.core.state import Accusation, AuditCase, AuditGroup, AuditKey, AuditRuntime, JudgedGroup
from everstep_controller.core.transition import Transition

MAX_CASES = 64
"""Maximum number of open cases of a job. An audit checks a few units of work, so that more say nothing new."""
MAX_STATEMENTS = 8
"""Maximum number of statements in a case; three ranks take part."""
MAX_JUDGED = 256
"""Number of judged cases of a job that are remembered."""
_COMPUTED_AGAIN = (AuditKind.MATMUL, AuditKind.PEER_REPLAY, AuditKind.UPDATE)
"""Kinds of audit whose witnesses compute the owner's work again. In the others they compare bytes that were sent."""
_ON_OWN_WORD = (AuditKind.STATE, AuditKind.CHECKPOINT)
"""Kinds of audit whose work cannot be done again: the owner compares bytes with what they were."""


# ---- judgement


class OwnerConvicted(msgspec.Struct, frozen=True, tag=True):
    """The owner computed wrongly: two others agree on another result, and the owner did not get theirs either."""

    sentence: str


class OwnerStrike(msgspec.Struct, frozen=True, tag=True):
    """The owner's own results differ from each other. ``strikes``: one for a fault that it did not repeat."""

    sentence: str
    strikes: int = 1


class AuditorStrike(msgspec.Struct, frozen=True, tag=True):
    """The peer, ``rank``, did the work again wrongly; the owner is cleared."""

    rank: Rank
    sentence: str


class Tied(msgspec.Struct, frozen=True, tag=True):
    """The results of two nodes differ, and no third node decides. ``ranks``: one on each."""

    ranks: tuple[Rank, Rank]
    sentence: str


class Inconclusive(msgspec.Struct, frozen=True, tag=True):
    """The statements name no one. ``is_incomplete``: some did not arrive, so that the work may be wrong."""

    sentence: str
    is_incomplete: bool = False


class Suspicion(msgspec.Struct, frozen=True, tag=True):
    """The owner's results stand out from those of other ranks, which proves nothing.

    ``names_owner``: False if results of some rank stand out, and it is not known of which one.
    """

    sentence: str
    names_owner: bool = True


class Cleared(msgspec.Struct, frozen=True, tag=True):
    """The rank's results stood out, and another node gets the same ones: the samples are the cause."""

    rank: Rank
    sentence: str


class Incomparable(msgspec.Struct, frozen=True, tag=True):
    """The statements come from ranks of different kinds, which may round in different ways.

    ``ranks``: the owner and a rank of another kind. ``kinds``: theirs.
    """

    ranks: tuple[Rank, Rank]
    kinds: tuple[str, str]
    sentence: str


AuditJudgement = OwnerConvicted | OwnerStrike | AuditorStrike | Tied | Inconclusive | Suspicion | Incomparable | Cleared

OUTCOMES: Mapping[type[AuditJudgement], str] = {
    OwnerConvicted: "owner_convicted",
    OwnerStrike: "owner_strike",
    AuditorStrike: "auditor_strike",
    Tied: "tied",
    Inconclusive: "inconclusive",
    Suspicion: "suspicion",
    Incomparable: "incomparable",
    Cleared: "cleared",
}
"""Names of the outcomes in metrics."""
PROGRAM = "program"
"""Outcome of cases that the program has caused, whatever they say of ranks (``core.judgement.control_group``)."""


def judge(
    statements: Collection[AuditStatement], nodes: Mapping[Rank, NodeId], kinds: Mapping[Rank, str] | None = None
) -> AuditJudgement:
    """Judge the statements of one case, at least one, by those of the owner's kind.

    Args:
        statements: Of the owner, a peer and an arbiter.
        nodes: The node of each rank that made one.
        kinds: What each rank computes with; empty if unknown. None: as the statements say.
    """
    kinds = {statement.rank: statement.kind for statement in statements} if kinds is None else kinds
    owner = next((statement for statement in statements if statement.role is AuditRole.OWNER), None)
    if owner is None or owner.audit not in _COMPUTED_AGAIN:
        return _judge_same_kind(statements, nodes)
    other = next((statement for statement in statements if _differ(kinds[statement.rank], kinds[owner.rank])), None)
    if other is None:
        return _judge_same_kind(statements, nodes)
    same = [statement for statement in statements if not _differ(kinds[statement.rank], kinds[owner.rank])]
    judgement = _judge_same_kind(same, nodes)
    if not isinstance(judgement, Inconclusive):
        return judgement
    pair = kinds[owner.rank], kinds[other.rank]
    words = describe_incomparable(nodes[owner.rank], nodes[other.rank], pair)
    return Incomparable((owner.rank, other.rank), pair, words)


def describe_incomparable(node: NodeId, other: NodeId, kinds: tuple[str, str]) -> str:
    """Return why results of two nodes are not compared."""
    one, two = (kind or "of an unknown kind" for kind in kinds)
    return (
        f"results of {node} and {other} are not compared: one is {one}, the other is {two}, which may round in "
        "another way"
    )


def _differ(kind: str, other: str) -> bool:
    return bool(kind) and bool(other) and kind != other


def _judge_same_kind(statements: Collection[AuditStatement], nodes: Mapping[Rank, NodeId]) -> AuditJudgement:
    """Judge statements of ranks whose results must be equal, at least one."""
    by_role = {statement.role: statement for statement in reversed(list(statements))}
    owner, peer, arbiter = (by_role.get(role) for role in (AuditRole.OWNER, AuditRole.PEER, AuditRole.ARBITER))
    some = next(iter(statements))
    work = f"{some.unit} of step {some.step}"
    difference = next((f"; {statement.difference}" for statement in statements if statement.difference), "")
    if owner is None:
        words = f"an audit of {work} found a difference, but rank {some.owner} has not stated its results"
        return Inconclusive(words, is_incomplete=True)
    if not owner.original and not owner.digest:
        if not owner.wrong_results:
            return Suspicion(f"a rank, still unknown, may stand out in {work}{difference}", names_owner=False)
        return Suspicion(f"rank {owner.rank} stands out from the other ranks in {work}{difference}")
    if is_cleared(owner):
        return Cleared(owner.rank, f"{owner.difference or 'another node got the same results'} in {work}")
    if peer is not None and arbiter is not None:
        return _Arbitration(owner, peer, arbiter, nodes, work, difference).judge()
    if (witness := peer or arbiter) is not None:
        return _judge_pair(owner, witness, nodes, work, difference)
    if owner.audit in _ON_OWN_WORD or owner.digest not in ("", owner.original):
        return OwnerStrike(f"{_own_contradiction(owner, work)}{difference}", max(1, owner.wrong_results))
    words = f"an audit of {work} of rank {owner.rank} found a difference, but no other rank has stated its result"
    return Inconclusive(words, is_incomplete=True)


def accused_rank(judgement: AuditJudgement, owner: Rank) -> Rank | None:
    """Return the rank that a judgement speaks against; of a tie, the owner; None if it speaks against no rank."""
    match judgement:
        case AuditorStrike():
            return judgement.rank
        case OwnerConvicted() | OwnerStrike() | Tied() | Suspicion(names_owner=True):
            return owner
        case _:
            return None


def is_cleared(owner: AuditStatement) -> bool:
    """Return whether a rank's gradients stood out, and its samples give the same ones on another node."""
    return owner.audit is AuditKind.GRADIENT_NORM and bool(owner.original) and owner.digest == owner.original


def _own_contradiction(owner: AuditStatement, work: str) -> str:
    if owner.audit is AuditKind.STATE:
        return f"{work} of rank {owner.rank} changed in memory between two updates"
    if owner.audit is AuditKind.CHECKPOINT:
        return f"{work} of rank {owner.rank} differs from the state that was copied"
    if owner.audit is AuditKind.GRADIENT_NORM:
        return f"rank {owner.rank} computed {work} wrongly{' twice' if owner.wrong_results > 1 else ''}"
    return f"rank {owner.rank} got two results for {work} (audit {owner.audit})"


def _judge_pair(
    owner: AuditStatement, witness: AuditStatement, nodes: Mapping[Rank, NodeId], work: str, difference: str
) -> AuditJudgement:
    """Judge the owner and one rank that did the work again."""
    there = f"rank {witness.rank} on {nodes[witness.rank]}"
    if owner.original == witness.digest:
        return _judge_confirmed(owner, there, work, difference)
    if owner.digest == witness.digest:
        words = f"rank {owner.rank} computed {work} wrongly once: it got another result when it computed again, as did"
        return OwnerStrike(f"{words} {there}{difference}")
    if owner.digest not in ("", owner.original):
        return Inconclusive(f"{_not_repeatable(work, owner.rank, witness.rank)}{difference}")
    words = f"rank {owner.rank} on {nodes[owner.rank]} and {there} got different results for {work}"
    return Tied((owner.rank, witness.rank), f"{words}, and no third node decides{difference}")


def _judge_confirmed(owner: AuditStatement, witness: str, work: str, difference: str) -> AuditJudgement:
    """Judge an owner whose result in training a witness confirms: only its own repetition may be wrong."""
    if owner.digest not in ("", owner.original):
        words = f"rank {owner.rank} got another result when it computed {work} again, and {witness} confirms the first"
        return OwnerStrike(f"{words}{difference}")
    return Inconclusive(f"{witness} got the same result for {work} as rank {owner.rank}")


def _not_repeatable(work: str, *ranks: Rank) -> str:
    names = ", ".join(map(str, ranks))
    return f"ranks {names} all got different results for {work}: its kernels may not be repeatable"


class _Arbitration(msgspec.Struct, frozen=True):
    """The results of an owner, a peer and an arbiter."""

    owner: AuditStatement
    peer: AuditStatement
    arbiter: AuditStatement
    nodes: Mapping[Rank, NodeId]
    work: str
    difference: str

    def judge(self) -> AuditJudgement:
        owner, peer, arbiter = self.owner, self.peer, self.arbiter
        if owner.original == peer.digest:
            return _judge_confirmed(owner, f"rank {peer.rank}", self.work, self.difference)
        if peer.digest == arbiter.digest:
            return self._against_owner()
        if owner.original == arbiter.digest and owner.digest in ("", owner.original):
            return self._against_peer()
        words = _not_repeatable(self.work, owner.rank, peer.rank, arbiter.rank)
        if owner.original == arbiter.digest:
            words = f"rank {owner.rank} did not get its own result for {self.work} again, but rank {arbiter.rank} did"
        return Inconclusive(f"{words}{self.difference}")

    def _against_owner(self) -> AuditJudgement:
        """Judge an owner with whose result neither of the others agrees."""
        owner, others = self.owner, (self.peer, self.arbiter)
        who = f"rank {owner.rank} computed {self.work} wrongly"
        agree = f"{self._names(*others)} agree on another result"
        if owner.digest == self.peer.digest:
            return OwnerStrike(f"{who} once: {agree}, which it got when it computed again{self.difference}")
        if self._speak_for_one_node(others, owner):
            return Tied((owner.rank, self.peer.rank), self._one_node(others, owner))
        again = " twice" if owner.digest == owner.original else ""
        return OwnerConvicted(f"{who}{again}: {agree}{self.difference}")

    def _against_peer(self) -> AuditJudgement:
        """Judge a peer with whose result neither of the others agrees."""
        peer, others = self.peer, (self.owner, self.arbiter)
        if self._speak_for_one_node(others, peer):
            return Tied((self.owner.rank, peer.rank), self._one_node(others, peer))
        who = f"rank {peer.rank} computed {self.work} wrongly when it audited rank {self.owner.rank}"
        return AuditorStrike(peer.rank, f"{who}: {self._names(*others)} agree on another result{self.difference}")

    def _speak_for_one_node(self, witnesses: Collection[AuditStatement], accused: AuditStatement) -> bool:
        """Return whether the witnesses share a node, which could make them all say so, and accuse another node."""
        nodes = {self.nodes[witness.rank] for witness in witnesses}
        return len(nodes) == 1 and self.nodes[accused.rank] not in nodes

    def _one_node(self, witnesses: Collection[AuditStatement], accused: AuditStatement) -> str:
        where, other = self._names(*witnesses), self.nodes[accused.rank]
        return f"{where} and {other} got different results for {self.work}, and no third node decides{self.difference}"

    def _names(self, *statements: AuditStatement) -> str:
        return " and ".join(dict.fromkeys(self.nodes[statement.rank] for statement in statements))


# ---- cases


def record_statement(
    transition: Transition, job: JobRecord, node: str, report: AuditStatement
) -> Sequence[Sequence[AuditCase]]:
    """Record a rank's statement about its own results. Return the groups that can be judged now; they are closed."""
    audits = transition.state.job_runtime[job.job].audits
    key = AuditKey(report.generation, report.owner, report.step, report.audit, report.unit)
    case, spec = audits.cases.get(key), _generation_of(job, audits, key)
    if key.audit in job.audits.off:
        transition.count_ignored("audit_statement.audit_is_off")
    elif key in audits.judged or spec is None:
        transition.count_ignored("audit_statement.stale")
    elif not spec.has_rank_on(node, report.rank) or report.owner >= spec.world_size:
        transition.count_ignored("audit_statement.not_a_member")
    elif (report.role is AuditRole.OWNER) != (report.rank == report.owner):
        transition.count_ignored("audit_statement.wrong_role")
    elif (case is None and len(audits.cases) >= MAX_CASES) or (
        case is not None and (report.rank in case.statements or len(case.statements) >= MAX_STATEMENTS)
    ):
        transition.count_ignored("audit_statement.surplus")
    else:
        case = case or _open_case(transition, job, audits, key, spec)
        case.statements[report.rank] = report
        if _is_complete(case):
            case.due = transition.now + _settle_s(transition, case)
            transition.schedule_job(case.due, job.job)
            return close_settled_groups(transition, job)
    return ()


def _generation_of(job: JobRecord, audits: AuditRuntime, key: AuditKey) -> GenerationSpec | None:
    """Return the generation of the work: the running one, or the one of statements about the same audit."""
    if job.running_generation is not None and job.is_running and job.running_generation.number == key.generation:
        return job.running_generation
    if key.group in audits.judged_groups:
        return audits.judged_groups[key.group].spec
    return next((case.spec for case in audits.cases.values() if case.key.group == key.group), None)


def _settle_s(transition: Transition, case: AuditCase) -> float:
    """Return the seconds for which other ranks may say what they found. Norms are compared between ranks already."""
    return 0.0 if case.key.audit is AuditKind.GRADIENT_NORM else transition.policy.audits.settle_s


def _open_case(
    transition: Transition, job: JobRecord, audits: AuditRuntime, key: AuditKey, spec: GenerationSpec
) -> AuditCase:
    due = transition.now + transition.policy.audits.case_s
    case = audits.cases[key] = AuditCase(key, spec, transition.now, due, transition.trace)
    transition.schedule_job(due, job.job)
    return case


def _is_complete(case: AuditCase) -> bool:
    """Return whether no further statement is to be expected."""
    roles = {statement.role for statement in case.statements.values()}
    owner = case.statements.get(case.key.owner)
    if owner is None:
        return False
    if (not owner.original and not owner.digest) or is_cleared(owner):
        return True
    expects_arbiter = any(statement.expects_arbiter for statement in case.statements.values())
    if expects_arbiter and not {AuditRole.PEER, AuditRole.ARBITER} <= roles:
        return False
    if AuditRole.PEER in roles:
        return True
    contradicts_itself = case.key.audit in _ON_OWN_WORD or owner.digest not in ("", owner.original)
    return case.key.audit is not AuditKind.PEER_REPLAY and contradicts_itself


def _close(audits: AuditRuntime, case: AuditCase) -> None:
    del audits.cases[case.key]
    audits.judged[case.key] = None
    while len(audits.judged) > MAX_JUDGED:
        del audits.judged[next(iter(audits.judged))]


def close_settled_groups(transition: Transition, job: JobRecord) -> list[list[AuditCase]]:
    """Close and return the groups about which no rank has more to say, oldest first."""
    audits = transition.state.job_runtime[job.job].audits
    groups: dict[AuditGroup, list[AuditCase]] = {}
    for case in audits.cases.values():
        groups.setdefault(case.key.group, []).append(case)
    settled = [cases for cases in groups.values() if _is_settled(transition, job, cases)]
    for case in chain.from_iterable(settled):
        _close(audits, case)
    return settled


def _is_settled(transition: Transition, job: JobRecord, cases: Sequence[AuditCase]) -> bool:
    """Return whether all ranks have had the time to state what they found; else schedule the next check."""
    first, spec = cases[0], cases[0].spec
    if {case.key.owner for case in cases} == set(range(spec.world_size)) and all(map(_is_complete, cases)):
        return True
    due = max(case.due for case in cases)
    if transition.now < due:
        transition.schedule_job(due, job.job)
        return False
    latest = min(case.opened_at for case in cases) + transition.policy.audits.case_s
    running = job.running_generation
    if first.key.audit is AuditKind.GRADIENT_NORM or running is None or running.number != spec.number:
        return True
    if transition.now >= latest:
        return True
    steps = transition.read_steps(job.job)
    if all(steps.get(rank, -1) >= first.key.step for rank in range(spec.world_size)):
        return True
    due = min(latest, transition.now + transition.policy.audits.settle_s)
    for case in cases:
        case.due = due
    transition.schedule_job(due, job.job)
    return False


def record_judged_group(audits: AuditRuntime, case: AuditCase, accusations: Iterable[Accusation]) -> list[Accusation]:
    """Remember which ranks a group accuses, and return all its accusations so far."""
    group = case.key.group
    before = audits.judged_groups.pop(group, None)
    known = list(dict.fromkeys([*(before.accusations if before is not None else ()), *accusations]))
    audits.judged_groups[group] = JudgedGroup(case.spec, tuple(known))
    while len(audits.judged_groups) > MAX_CASES:
        del audits.judged_groups[next(iter(audits.judged_groups))]
    return known


def list_accusations(case: AuditCase, judgement: AuditJudgement) -> list[Accusation]:
    """Return the rank that the judgement of a case speaks against; of a tie, the owner."""
    accused = accused_rank(judgement, case.key.owner)
    return [] if accused is None else [Accusation(accused, case.spec.node_of(accused), isinstance(judgement, Tied))]


def judge_case(case: AuditCase, records: Mapping[NodeId, NodeRecord]) -> AuditJudgement:
    """Judge a case by the statements that have arrived, among nodes of one kind."""
    statements = case.statements.values()
    nodes = {statement.rank: case.spec.node_of(statement.rank) for statement in statements}
    if all(statement.kind for statement in statements):
        return judge(statements, nodes)
    kinds = {rank: node_kind(records[node].identity) if node in records else "" for rank, node in nodes.items()}
    return judge(statements, nodes, kinds)


def collect_statements(case: AuditCase, job: str) -> dict[str, str]:
    """Return the case and its statements as evidence of a finding."""
    key = case.key
    evidence = {
        "job": job,
        "generation": str(key.generation),
        "step": str(key.step),
        "audit": str(key.audit),
        "unit": key.unit,
    }
    for statement in sorted(case.statements.values(), key=lambda one: list(AuditRole).index(one.role)):
        results = [f"used {statement.original}"] if statement.original else []
        results += (
            [f"computed {statement.digest}{' again' if statement.role is AuditRole.OWNER else ''}"]
            if statement.digest
            else []
        )
        where = f"rank {statement.rank} on {case.spec.node_of(statement.rank)}"
        evidence.setdefault(f"{statement.role}_statement", f"{where}: {', '.join(results) or 'no result'}")
    if difference := next((statement.difference for statement in case.statements.values() if statement.difference), ""):
        evidence["difference"] = difference
    return evidence


# ---- verified versions


def handle_audits_clean(transition: Transition, job: JobRecord, node: str, report: AuditsClean) -> None:
    """Record that a rank's work since a step was audited; with all ranks, versions up to that step are verified."""
    spec = job.running_generation
    if spec is None or not job.is_running or report.generation != spec.number:
        transition.count_ignored("audits_clean.stale")
        return
    if not spec.has_rank_on(node, report.rank):
        transition.count_ignored("audits_clean.not_a_member")
        return
    audits, candidate = transition.state.job_runtime[job.job].audits, job.commits.audit_candidate
    audits.clean_steps[report.rank] = max(report.step, audits.clean_steps.get(report.rank, report.step))
    if candidate is None:
        return
    if audits.counted_version != candidate.version:
        audits.counted_version = candidate.version
        audits.clean_ranks = {rank for rank, step in audits.clean_steps.items() if step >= candidate.version.step}
    elif report.step >= candidate.version.step:
        audits.clean_ranks.add(report.rank)
    if len(audits.clean_ranks) == spec.world_size and not audits.cases:
        verify_audit_candidate(transition, job)
