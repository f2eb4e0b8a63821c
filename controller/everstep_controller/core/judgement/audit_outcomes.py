"""Draw the consequences of judged audits: strikes, evictions, steps that are computed again, audits that are off."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.ids import GenerationNumber
from everstep.vocabulary import AuditKind, AuditRole, Decision, FindingKind, GenerationReason, Severity
from everstep.wire.v1.training import AuditStatement
from everstep_controller.core.checkpoints.commits import (
    newest_version_before,
    roll_back_before,
)
from everstep_controller.core.jobs.generations import RegroupCause, regroup
from everstep_controller.core.judgement import audits, control_group
from everstep_controller.core.judgement.audit_reports import note_incomparable, report_difference
from everstep_controller.core.judgement.audit_switch import STRIKE_SUBJECT, switch_off, withdraw_suspicion
from everstep_controller.core.judgement.case_outcomes import (
    evict_divergent,
    fails_for_kept_culprits,
    settle_tie,
    switch_off_after_ties,
)
from everstep_controller.core.records import MAX_RECOMPUTED_STEPS, AuditStrike, JobRecord
from everstep_controller.core.state import Accusation, AuditCase, AuditGroup
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import format_span

JudgedCases = Sequence[tuple[AuditCase, audits.AuditJudgement]]
MAX_STRIKES = 16
"""Number of strikes remembered per node: one whose eviction is deferred goes on."""


def handle_audit_statement(transition: Transition, job: JobRecord, node: str, report: AuditStatement) -> None:
    """Handle what a rank computed for an audit that found a difference."""
    for cases in audits.record_statement(transition, job, node, report):
        _settle_group(transition, job, cases)


def judge_audit_cases(transition: Transition, job: JobRecord) -> None:
    """At a deadline, judge the cases about which no rank has more to say, or that wait no longer for statements."""
    for cases in audits.close_settled_groups(transition, job):
        _settle_group(transition, job, cases)


def _settle_group(transition: Transition, job: JobRecord, cases: Sequence[AuditCase]) -> None:
    """Judge the cases of one audit in one step, and draw the consequences, unless the program is the cause."""
    group, spec = cases[0].key.group, cases[0].spec
    if group.audit in job.audits.off:
        return
    judged = [(case, audits.judge_case(case, transition.state.nodes)) for case in cases]
    accused = [accusation for case, judgement in judged for accusation in audits.list_accusations(case, judgement)]
    live = transition.state.job_runtime[job.job].audits
    known = audits.record_judged_group(live, cases[0], accused)
    is_alone = spec.world_size == 1 and bool(accused)
    is_program = is_alone or _is_program(transition, job, judged, known)
    _count_outcomes(transition, judged, is_program=is_program)
    if is_alone:
        sentence = control_group.describe_lone_rank(group.audit, judged[0][1].sentence)
        switch_off(transition, job, group, sentence, ranks=[0])
    elif is_program:
        sentence = _describe_common_cause(group, judged, known)
        why = f"audit {group.audit} of job {job.job} differs on several nodes, so the program is the cause"
        switch_off(transition, job, group, sentence, ranks={accusation.rank for accusation in known}, cleared=why)
    elif job.spec.sdc_mode == "report":
        for case, judgement in judged:
            report_difference(transition, job, case, judgement)
    else:
        for case, judgement in judged:
            _settle_audit(transition, job, case, judgement)


def _count_outcomes(transition: Transition, judged: JudgedCases, *, is_program: bool) -> None:
    counts = transition.state.counts.audits
    for case, judgement in judged:
        outcome = case.key.audit, audits.PROGRAM if is_program else audits.OUTCOMES[type(judgement)]
        counts[outcome] = counts.get(outcome, 0) + 1


def _is_program(transition: Transition, job: JobRecord, judged: JudgedCases, known: Sequence[Accusation]) -> bool:
    spec = judged[0][0].spec
    at_once = control_group.has_common_cause(known, len(spec.seats), spec.world_size)
    return at_once or _differs_everywhere(transition, job, judged)


def _differs_everywhere(transition: Transition, job: JobRecord, judged: JudgedCases) -> bool:
    """Return whether an audit has let too many of the job's nodes contradict themselves, in whatever steps.

    A program whose fault depends on the samples shows on one rank in one step, and on another rank in a later one.
    """
    audit, spec = judged[0][0].key.audit, judged[0][0].spec
    now = {
        case.spec.node_of(case.key.owner)
        for case, judgement in judged
        if isinstance(judgement, audits.OwnerStrike) and is_own_word(case)
    }
    before = {
        node
        for node in spec.seats
        if (record := transition.state.nodes.get(node)) is not None
        and any(
            strike.job == job.job and strike.audit is audit and strike.on_own_word for strike in record.audits.strikes
        )
    }
    return bool(now) and control_group.are_too_many(now | before, len(spec.seats))


def is_own_word(case: AuditCase) -> bool:
    """Return whether nothing speaks against the owner but its own results."""
    return case.statements.keys() == {case.key.owner} and case.key.audit is not AuditKind.GRADIENT_NORM


def _describe_common_cause(group: AuditGroup, judged: JudgedCases, accused: Sequence[Accusation]) -> str:
    statements = [statement for case, _ in judged for statement in case.statements.values()]
    difference = next((statement.difference for statement in statements if statement.difference), "")
    units = [case.key.unit for case, _ in judged]
    return control_group.describe_cause(
        group.audit, group.step, {accusation.rank for accusation in accused}, units, difference
    )


def _settle_audit(transition: Transition, job: JobRecord, case: AuditCase, judgement: audits.AuditJudgement) -> None:
    """Draw the consequences of a judged case."""
    owner = case.spec.node_of(case.key.owner)
    match judgement:
        case audits.OwnerConvicted():
            _convict(transition, job, case, owner, judgement.sentence)
        case audits.OwnerStrike():
            job.failures.recomputed_steps.pop(case.key.step, None)  # its data is not the cause
            if not _add_strike(transition, job, case, owner, judgement.sentence, judgement.strikes):
                _undo(transition, job, case, judgement.sentence)
        case audits.AuditorStrike():
            _add_strike(transition, job, case, case.spec.node_of(judgement.rank), judgement.sentence)
        case audits.Tied():
            _settle_audit_tie(transition, job, case, judgement)
        case audits.Inconclusive():
            _note_inconclusive(transition, job, case, judgement)
        case audits.Suspicion():
            _handle_suspicion(transition, job, case, judgement)
        case audits.Cleared():
            node = case.spec.node_of(judgement.rank)
            withdraw_suspicion(transition, job, node, judgement.sentence, case.key.generation)
        case audits.Incomparable():
            note_incomparable(transition, job, case, judgement)


def _convict(
    transition: Transition, job: JobRecord, case: AuditCase, node: str, description: str, earlier: str = ""
) -> None:
    """Evict a node that computed wrongly, and undo its work, also where it has gone on in a later generation."""
    evidence = audits.collect_statements(case, job.job) | ({"earlier": earlier} if earlier else {})
    nodes = [node] if node in transition.state.nodes else []
    settled = evict_divergent(transition, job, nodes, description, FindingKind.AUDIT_MISMATCH, evidence)
    if not (job.is_seated(node) or _is_current(job, case)):
        return
    if settled or not fails_for_kept_culprits(transition, job, description, FindingKind.AUDIT_MISMATCH):
        _go_back(transition, job, description, roll_back_before(transition, job, case.first_bad_step))


def _add_strike(
    transition: Transition, job: JobRecord, case: AuditCase, node: str, description: str, count: int = 1
) -> bool:
    """Add ``count`` strikes against the node; with enough of them convict it, and return True."""
    record, policy = transition.state.nodes.get(node), transition.policy
    if record is None:
        return False
    coalesce_s = policy.rules.default_rule(FindingKind.AUDIT_MISMATCH).coalesce_s
    strikes = [strike for strike in record.audits.strikes if strike.at > transition.now - policy.audits.strike_window_s]
    before, generation = strikes[-1].sentence if strikes else "", case.key.generation
    # one fault shows in several audits; the regroup that undoes it ends the generation
    known = any(
        (strike.job, strike.generation) == (job.job, generation) and strike.at > transition.now - coalesce_s
        for strike in strikes
    )
    if not known:
        own_word = is_own_word(case)
        strikes += [AuditStrike(transition.now, job.job, generation, description, case.key.audit, own_word)] * count
    record.audits.strikes = strikes[-MAX_STRIKES:]
    transition.mark_node_changed(node)
    window = format_span(policy.audits.strike_window_s)
    number = f"strike {min(len(strikes), policy.audits.strike_count)} of {policy.audits.strike_count} within {window}"
    if len(strikes) >= policy.audits.strike_count:
        _convict(transition, job, case, node, f"{description}; this is {number}", before)
        return True
    finding = transition.make_finding(
        FindingKind.AUDIT_MISMATCH,
        STRIKE_SUBJECT,
        Severity.WARNING,
        description,
        evidence=audits.collect_statements(case, job.job),
    )
    transition.raise_finding(node, finding, policy.audits.strike_window_s)
    words = f"{node}: {description}; it stays in service: this is {number}"
    transition.add_verdict(node, Decision.NO_ACTION, words, evidence=(finding,))
    return False


def _settle_audit_tie(transition: Transition, job: JobRecord, case: AuditCase, judgement: audits.Tied) -> None:
    """Try the nodes whose results differ with work whose result is known, and undo the step."""
    tied = list(dict.fromkeys(case.spec.node_of(rank) for rank in judgement.ranks))
    if len(tied) == 1:  # one of its GPUs is wrong, and the whole node is treated
        if not _add_strike(transition, job, case, tied[0], judgement.sentence):
            _undo(transition, job, case, judgement.sentence)
        return
    if any(node not in transition.state.nodes for node in tied):
        _undo(transition, job, case, judgement.sentence)
        return
    kind, evidence = FindingKind.AUDIT_MISMATCH, audits.collect_statements(case, job.job)
    settled = settle_tie(transition, job, tied, judgement.sentence, kind, evidence)
    if settled or not switch_off_after_ties(transition, job, case.key.group, tied, judgement.sentence):
        _undo(transition, job, case, judgement.sentence)


def _note_inconclusive(transition: Transition, job: JobRecord, case: AuditCase, judgement: audits.Inconclusive) -> None:
    """Note on the owner and its peer what no one is blamed for; undo the step once if the work may be wrong."""
    evidence = audits.collect_statements(case, job.job)
    finding = transition.make_finding(
        FindingKind.AUDIT_MISMATCH, "inconclusive", Severity.INFO, judgement.sentence, evidence=evidence
    )
    others = (statement.rank for statement in case.statements.values() if statement.role is AuditRole.PEER)
    for node in dict.fromkeys(case.spec.node_of(rank) for rank in (case.key.owner, *others)):
        if node in transition.state.nodes:
            words = f"{node}: {judgement.sentence}; no node is blamed"
            transition.add_verdict(node, Decision.NO_ACTION, words, evidence=(finding,))
    nodes = {case.spec.node_of(rank) for rank in case.statements}
    if len(nodes) < 2 or not judgement.is_incomplete:  # one node alone cannot send a job back
        return
    if _may_repeat(transition, job, case, judgement.sentence, job.failures.recomputed_steps):
        _undo(transition, job, case, judgement.sentence)


def _handle_suspicion(transition: Transition, job: JobRecord, case: AuditCase, suspicion: audits.Suspicion) -> None:
    """Compute the step again if a version from before it is known.

    A suspected node exchanges seats with another one, which then computes the same samples: unusual results come from
    the samples if they stay with these, and from the node if they go with it. Without a suspect, ranks check each of
    the repeated steps, which may name one.
    """
    sentence, step = suspicion.sentence, case.key.step
    if not _is_current(job, case):
        return
    if newest_version_before(transition, job, step) is None:
        words = (
            f"{sentence}; no version from before step {step} is known, so the job goes on: a suspicion proves nothing"
        )
        transition.log_event("audit.suspicion", words, job=job.job, generation=case.key.generation)
        return
    failures = job.failures
    repeated = failures.recomputed_steps if suspicion.names_owner else failures.searched_steps
    if _may_repeat(transition, job, case, sentence, repeated):
        to_exchange = _choose_exchange(job, case.spec.node_of(case.key.owner)) if suspicion.names_owner else None
        _undo(transition, job, case, sentence, to_audited=False, to_exchange=to_exchange)


def _may_repeat(
    transition: Transition, job: JobRecord, case: AuditCase, sentence: str, repeated: dict[int, GenerationNumber]
) -> bool:
    """Return whether to compute the step again, once: if it stands out a second time, the fault is not in a node."""
    step = case.key.step
    if not _is_current(job, case) or not case.is_about_parameters:
        return False
    if step in repeated:
        cause = "its data is the likely cause, and " if repeated is job.failures.recomputed_steps else ""
        words = f"{sentence}; step {step} was computed again before: {cause}the job goes on"
        transition.log_event("audit.suspicion", words, job=job.job, generation=case.key.generation)
        return False
    repeated[step] = case.key.generation
    while len(repeated) > MAX_RECOMPUTED_STEPS:
        del repeated[next(iter(repeated))]
    transition.log_event(
        "audit.suspicion", f"{sentence}; step {step} is computed again", job=job.job, generation=case.key.generation
    )
    return True


def _choose_exchange(job: JobRecord, suspect: str) -> tuple[str, str] | None:
    """Return the suspect and the node after it in its block or, for blocks of one node, in the roster."""
    seats, size = job.seats, job.spec.block_nodes
    if suspect not in seats:
        return None
    begin = seats.index(suspect) // size * size if size > 1 else 0
    block = seats[begin : begin + size] if size > 1 else seats
    other = block[(block.index(suspect) + 1) % len(block)]
    return (suspect, other) if other != suspect else None


def _undo(
    transition: Transition,
    job: JobRecord,
    case: AuditCase,
    description: str,
    *,
    to_audited: bool = True,
    to_exchange: tuple[str, str] | None = None,
) -> None:
    """Go back before the wrong work, unless a regroup since has done so (``roll_back_open_cases``)."""
    if _is_current(job, case) and case.is_about_parameters:
        back = roll_back_before(transition, job, case.first_bad_step, to_audited=to_audited)
        if to_exchange is not None:
            back += f"; {to_exchange[0]} and {to_exchange[1]} exchange seats"
        _go_back(transition, job, description, back, to_exchange)


def _is_current(job: JobRecord, case: AuditCase) -> bool:
    running = job.running_generation
    return not job.is_ended and running is not None and running.number == case.key.generation


def _go_back(
    transition: Transition,
    job: JobRecord,
    description: str,
    back: str,
    to_exchange: tuple[str, str] | None = None,
) -> None:
    if job.is_running:
        cause = RegroupCause(
            reason=GenerationReason.CORRUPTION,
            sentence=f"{description}; {back}",
            trace=transition.trace,
            nodes_exchanging_seats=to_exchange,
        )
        regroup(transition, job, cause)
