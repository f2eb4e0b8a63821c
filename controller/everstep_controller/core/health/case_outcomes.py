"""Draw the consequences of differing digests, judged audits, probes and blame cases."""

from __future__ import annotations

from everstep.ids import GenerationNumber
from everstep.vocabulary import Action, AuditRole, Decision, Finding, FindingKind, GenerationReason, NodeState, Severity
from everstep.wire.v1.training import AuditStatement, GenerationSpec, ProbeFinished, VersionSealed
from everstep_controller.core.checkpoints.commits import (
    DigestVote,
    newest_version_before,
    record_seal,
    roll_back_before,
    roll_back_to_clean,
)
from everstep_controller.core.health import audits, diagnostics, maintenance, offences, quarantine
from everstep_controller.core.health.eviction import is_serving
from everstep_controller.core.health.findings import judge_by_rule, judge_controller_findings, recheck_undecided
from everstep_controller.core.health.node_state import CORDONED_STATES
from everstep_controller.core.jobs import ending
from everstep_controller.core.jobs.generations import RegroupCause, note_beyond_boundary, regroup
from everstep_controller.core.policy import BlameIsolationMethod
from everstep_controller.core.records import (
    MAX_RECOMPUTED_STEPS,
    AuditStrike,
    DiagnosticsStatus,
    JobRecord,
    UndecidedReason,
)
from everstep_controller.core.state import AuditCase, BlameCase
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import format_span


def handle_sealed(transition: Transition, job: JobRecord, node: str, report: VersionSealed) -> None:
    """Handle a rank's seal of a version. Only ranks of the running generation count."""
    note_beyond_boundary(transition, job, node, report.rank, report.generation, report.version.step)
    spec = job.running_generation
    if spec is None or not job.is_running or report.generation != spec.number:
        transition.count_ignored("version_sealed.stale")
        return
    if report.version.generation != spec.number or not spec.has_rank_on(node, report.rank):
        transition.count_ignored("version_sealed.not_a_member")
        return
    transition.state.job_runtime[job.job].progress.record_step(report.version.step, transition.now)
    vote = record_seal(transition, job, spec, report)
    if vote is not None:
        _digests_differ(transition, job, spec, report, vote)


def _digests_differ(
    transition: Transition, job: JobRecord, spec: GenerationSpec, report: VersionSealed, vote: DigestVote
) -> None:
    back = roll_back_to_clean(transition, job)
    divergent_nodes = list(dict.fromkeys(spec.node_of(rank) for rank in sorted(vote.divergent_ranks)))
    tied = list(dict.fromkeys(spec.node_of(rank) for rank in sorted(vote.tied_ranks)))
    if divergent_nodes:
        ranks = ", ".join(str(rank) for rank in sorted(vote.divergent_ranks))
        nodes = ", ".join(divergent_nodes)
        what = f"the digest of rank {ranks} on {nodes} differs from the majority at version {report.version}"
        settled = _evict_divergent(transition, job, divergent_nodes, what)
    else:
        what = f"digests of version {report.version} differ without a majority among {', '.join(tied)}"
        settled = _settle_tie(transition, job, tied, what)
    # the end of a job cannot be revoked, so it waits for the database
    if not settled and _record_tie(transition, job) and not transition.state.database_outage:
        ending.fail_job(transition, job, f"{what}; {_explain_ties(transition, job, FindingKind.DIGEST_MISMATCH)}")
        return
    cause = RegroupCause(reason=GenerationReason.CORRUPTION, sentence=f"{what}; {back}", trace=transition.trace)
    regroup(transition, job, cause)


def _explain_ties(transition: Transition, job: JobRecord, kind: FindingKind) -> str:
    results = "digests" if kind is FindingKind.DIGEST_MISMATCH else "results in audits"
    count = f"{results} differed {len(job.failures.digest_tie_times)} times and no node was evicted for it"
    never_agreed = transition.state.job_runtime[job.job].commits.verified_version is None
    if kind is FindingKind.DIGEST_MISMATCH and never_agreed:
        return (
            f"{count}; digests of this job never agreed, so the script is the likely cause: parameters that differ "
            "between ranks must be DTensors, or be tracked under different names"
        )
    return f"{count}; the node that computes wrongly is still in the job"


def _evict_divergent(
    transition: Transition,
    job: JobRecord,
    nodes: list[str],
    description: str,
    kind: FindingKind = FindingKind.DIGEST_MISMATCH,
    evidence: dict[str, str] | None = None,
) -> bool:
    """Evict divergent nodes at once; the caller regroups ``job``. Return False if one was kept in service."""
    transition.regroup_claimed.add(job.job)
    for node in nodes:
        if not is_serving(transition, node):
            continue
        _raise_mismatch(transition, node, description, Severity.CRITICAL, kind, evidence)
        judge_controller_findings(transition)
        if not is_serving(transition, node):
            _clear_tied_nodes(transition, node)
    transition.regroup_claimed.discard(job.job)
    return not any(is_serving(transition, node) for node in nodes)


def _clear_tied_nodes(transition: Transition, divergent_node: str) -> None:
    """Clear the suspicion of nodes that were tied with the divergent node."""
    for node in transition.state.nodes[divergent_node].health.digest_tie_nodes:
        other = transition.state.nodes.get(node)
        if other is not None and divergent_node in other.health.digest_tie_nodes:
            other.health.digest_tie_nodes = []
            transition.mark_node_changed(node)
            own = other.health.controller_findings
            mismatches = [
                key
                for key, finding in own.items()
                if finding.kind is FindingKind.DIGEST_MISMATCH
                or (finding.kind is FindingKind.AUDIT_MISMATCH and finding.subject == _TIE_SUBJECT)
            ]
            offences.clear_controller_findings(transition, node, mismatches)
    transition.state.nodes[divergent_node].health.digest_tie_nodes = []


def _settle_tie(
    transition: Transition,
    job: JobRecord,
    tied: list[str],
    description: str,
    kind: FindingKind = FindingKind.DIGEST_MISMATCH,
    evidence: dict[str, str] | None = None,
) -> bool:
    """Handle a tie, which accuses all of its nodes. Return True if one is out, or if all are being tried."""
    if len(tied) == 1:
        return _evict_divergent(transition, job, tied, f"ranks of {tied[0]} differ among themselves")
    if any(case.job == job.job for case in transition.state.blame_cases.values()):
        return True
    findings = {node: _raise_mismatch(transition, node, description, Severity.WARNING, kind, evidence) for node in tied}
    judge_controller_findings(transition)
    case = None
    if not all(set(_remembered_tie(transition, node)) == set(tied) - {node} for node in tied):
        case = diagnostics.open_blame_case(transition, BlameIsolationMethod.COMPUTE, findings, description, job.job)
    trying = case is not None
    if not trying and _settle_by_history(transition, job, tied, description, kind):
        return True
    until = "while it runs compute tests with known results" if trying else "until another vote decides"
    for node in tied:
        is_out = transition.state.nodes[node].state in CORDONED_STATES
        stays = "is out of service already" if is_out else "stays in service"
        words = f"{description}; {node} is suspected and {stays} {until}"
        transition.add_verdict(node, Decision.NO_ACTION, words, evidence=(findings[node],))
    return trying


def settle_digest_case(transition: Transition, case: BlameCase) -> None:
    """Settle a tie after trials, whatever has become of the job: evict for wrong results, else decide by history."""
    job = transition.state.jobs.get(case.job)
    if job is None:
        return
    kind = next((finding.kind for finding in case.findings.values()), FindingKind.DIGEST_MISMATCH)
    if case.failed:
        what = f"{case.summary}; {'; '.join(case.failed.values())}"
        out = _evict_divergent(transition, job, list(case.failed), what, kind)
    else:
        out = _settle_by_history(transition, job, list(case.suspects), case.summary, kind)
    if not out:
        words = (
            f"{case.summary}; all compute tests with known results passed: {', '.join(case.suspects)} stay in service "
            "and remain suspected"
        )
        transition.audit("blame_isolation.inconclusive", words, job=job.job, trace=case.trace)
    if not job.is_running:
        return
    if not out and _record_tie(transition, job):
        ending.fail_job(transition, job, f"{case.summary}; {_explain_ties(transition, job, kind)}")
    elif out or any(job.is_seated(node) and not is_serving(transition, node) for node in case.failed):
        sentence = f"{case.summary}; the culprit is found"
        if kind is FindingKind.AUDIT_MISMATCH:  # it has gone on computing since the tie
            step = min(int(finding.evidence["step"]) for finding in case.findings.values())
            sentence += f"; {roll_back_before(transition, job, step)}"
        regroup(transition, job, RegroupCause(GenerationReason.CORRUPTION, sentence, case.trace))


def _settle_by_history(
    transition: Transition, job: JobRecord, tied: list[str], description: str, kind: FindingKind
) -> bool:
    """Evict a node that was tied before with other nodes, and return whether that evicts one.

    If digests never agreed, the vote itself may be wrong. Work with a known result finds under half of the GPUs that
    compute wrongly (SDCHunter, OSDI'26), so a pass does not clear a node.
    """
    agreed_once = (
        transition.state.job_runtime[job.job].commits.verified_version is not None or job.commits.audited is not None
    )
    evicted_for_tie = []
    for node in tied:
        record, before = transition.state.nodes[node], _remembered_tie(transition, node)
        others = [other for other in tied if other != node]
        if agreed_once and before and not set(before) & set(others):
            evicted_for_tie.append(node)
        record.health.digest_tie_nodes, record.health.digest_tie_at = others, transition.now
        transition.mark_node_changed(node)
    if len(evicted_for_tie) != 1:
        return False
    why = f"{evicted_for_tie[0]} was already in an undecided vote with other nodes, so it is the likely culprit"
    return _evict_divergent(transition, job, evicted_for_tie, f"{description}; {why}", kind)


def _remembered_tie(transition: Transition, node: str) -> list[str]:
    """Return the other nodes of the node's last tie, if it is still remembered."""
    health = transition.state.nodes[node].health
    return health.digest_tie_nodes if transition.now < health.digest_tie_at + _tie_memory_s(transition) else []


def _tie_memory_s(transition: Transition) -> float:
    return transition.policy.rules.default_rule(FindingKind.DIGEST_MISMATCH).step_memory_s


def _record_tie(transition: Transition, job: JobRecord) -> bool:
    since = transition.now - transition.policy.job_failure_window_s
    times = [*(at for at in job.failures.digest_tie_times if at > since), transition.now]
    job.failures.digest_tie_times = times
    transition.mark_job_changed(job.job)
    return len(times) >= transition.policy.digest_tie_count


_TIE_SUBJECT = "tie"
"""Subject of the finding on nodes whose results in an audit differ, while it is unknown which are wrong."""


def _raise_mismatch(
    transition: Transition,
    node: str,
    description: str,
    severity: Severity,
    kind: FindingKind,
    evidence: dict[str, str] | None = None,
) -> Finding:
    """Raise the controller's finding. A mere suspicion expires with the tie and never replaces proof."""
    is_proven = severity is Severity.CRITICAL
    action = Action.REPAIR if is_proven else Action.NONE
    subject = "parameters" if kind is FindingKind.DIGEST_MISMATCH else "work" if is_proven else _TIE_SUBJECT
    finding = transition.make_finding(kind, subject, severity, description, action=action, evidence=evidence)
    existing = transition.state.nodes[node].health.controller_findings.get(finding.key)
    if not is_proven and existing is not None and existing.severity is Severity.CRITICAL:
        return existing
    offences.raise_controller_finding(transition, node, finding, 0.0 if is_proven else _tie_memory_s(transition))
    return finding


# Audits

MAX_STRIKES = 16
"""Number of strikes remembered per node: one whose eviction is deferred goes on."""


def handle_audit_statement(transition: Transition, job: JobRecord, node: str, report: AuditStatement) -> None:
    """Handle what a rank computed for an audit that found a difference."""
    case = audits.record_statement(transition, job, node, report)
    if case is not None:
        _settle_audit(transition, job, case)


def check_audit_cases(transition: Transition, job: JobRecord) -> None:
    """At a deadline, judge cases that lack statements by those that have arrived."""
    for case in audits.close_overdue_cases(transition, job):
        _settle_audit(transition, job, case)


def _settle_audit(transition: Transition, job: JobRecord, case: AuditCase) -> None:
    """Judge a case and draw its consequences."""
    judgement = audits.judge_case(case)
    count = case.key.link, audits.OUTCOMES[type(judgement)]
    transition.state.audit_counts[count] = transition.state.audit_counts.get(count, 0) + 1
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


def _convict(
    transition: Transition, job: JobRecord, case: AuditCase, node: str, description: str, earlier: str = ""
) -> None:
    """Evict a node that computed wrongly, and undo its work, also where it has gone on in a later generation."""
    evidence = audits.collect_statements(case, job.job) | ({"earlier": earlier} if earlier else {})
    nodes = [node] if node in transition.state.nodes else []
    settled = _evict_divergent(transition, job, nodes, description, FindingKind.AUDIT_MISMATCH, evidence)
    if not (job.is_seated(node) or _is_current(job, case)):
        return
    if settled or not _fails_for_ties(transition, job, description):
        _go_back(transition, job, description, roll_back_before(transition, job, case.first_bad_step))


def _add_strike(
    transition: Transition, job: JobRecord, case: AuditCase, node: str, description: str, count: int = 1
) -> bool:
    """Add ``count`` strikes against the node; with enough of them convict it, and return True."""
    record, policy = transition.state.nodes.get(node), transition.policy
    if record is None:
        return False
    coalesce_s = policy.rules.default_rule(FindingKind.AUDIT_MISMATCH).coalesce_s
    strikes = [one for one in record.audits.strikes if one.at > transition.now - policy.audit_strike_window_s]
    before, generation = strikes[-1].sentence if strikes else "", case.key.generation
    # one fault shows in several audits; the regroup that undoes it ends the generation
    known = any(
        (one.job, one.generation) == (job.job, generation) and one.at > transition.now - coalesce_s for one in strikes
    )
    if not known:
        strikes += [AuditStrike(transition.now, job.job, generation, description)] * count
    record.audits.strikes = strikes[-MAX_STRIKES:]
    transition.mark_node_changed(node)
    window = format_span(policy.audit_strike_window_s)
    number = f"strike {min(len(strikes), policy.audit_strike_count)} of {policy.audit_strike_count} within {window}"
    if len(strikes) >= policy.audit_strike_count:
        _convict(transition, job, case, node, f"{description}; this is {number}", before)
        return True
    finding = transition.make_finding(
        FindingKind.AUDIT_MISMATCH,
        "strike",
        Severity.WARNING,
        description,
        evidence=audits.collect_statements(case, job.job),
    )
    offences.raise_controller_finding(transition, node, finding, policy.audit_strike_window_s)
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
    settled = _settle_tie(transition, job, tied, judgement.sentence, kind, evidence)
    if settled or not _fails_for_ties(transition, job, judgement.sentence):
        _undo(transition, job, case, judgement.sentence)


def _fails_for_ties(transition: Transition, job: JobRecord, description: str) -> bool:
    """Record that an audit's difference evicted no node; end a running job that has had too many, and return True."""
    if not job.is_running or transition.state.database_outage or not _record_tie(transition, job):
        return False
    why = _explain_ties(transition, job, FindingKind.AUDIT_MISMATCH)
    ending.fail_job(transition, job, f"{description}; {why}")
    return True


def _note_inconclusive(transition: Transition, job: JobRecord, case: AuditCase, judgement: audits.Inconclusive) -> None:
    """Note on the owner and its peer what no one is blamed for; undo the step once if the work may be wrong."""
    evidence = audits.collect_statements(case, job.job)
    finding = transition.make_finding(
        FindingKind.AUDIT_MISMATCH, "inconclusive", Severity.INFO, judgement.sentence, evidence=evidence
    )
    others = (one.rank for one in case.statements.values() if one.role is AuditRole.PEER)
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
        transition.audit("audit.suspicion", words, job=job.job, generation=case.key.generation)
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
        transition.audit("audit.suspicion", words, job=job.job, generation=case.key.generation)
        return False
    repeated[step] = case.key.generation
    while len(repeated) > MAX_RECOMPUTED_STEPS:
        del repeated[next(iter(repeated))]
    transition.audit(
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


# Probes


def handle_probe_finished(transition: Transition, node: str, report: ProbeFinished) -> None:
    """Handle one node's probe result; the last result, or the first bad one, decides."""
    _apply_outcome(transition, diagnostics.record_probe_result(transition, node, report))


def check_probe_deadline(transition: Transition, name: str) -> None:
    """Check a probe at its deadline."""
    _apply_outcome(transition, diagnostics.time_out_probe(transition, name))


def check_blame_case(transition: Transition, name: str) -> None:
    """Check a blame case at its deadline, or when a suspect waits for a partner."""
    _settle_if_over(transition, diagnostics.retry_blame_case(transition, name))


def check_node_treatment(transition: Transition, node: str) -> None:
    """Check everything in a node's treatment that may be due."""
    record = transition.state.nodes[node]
    maintenance.end_if_due(transition, node)
    if record.state is NodeState.HELD:
        why = f"no order or cordon keeps {node} out of service any more"
        maintenance.try_return_to_probation(transition, node, why)
    offences.expire_controller_findings(transition, node)
    recheck_undecided(transition, node)
    if record.state is NodeState.QUARANTINED:
        quarantine.check_quarantine(transition, node)
        return
    if quarantine.can_retry_diagnostic(transition, node):
        quarantine.run_next_diagnostic(transition, node)
    quarantine.check_probation(transition, node)


def _apply_outcome(transition: Transition, outcome: diagnostics.ProbeOutcome | None) -> None:
    if outcome is None:
        return
    if outcome.probe.tested_node is None:
        if outcome.is_slow:
            _suspect_link(transition, outcome)
    elif outcome.probe.case_id:
        _settle_if_over(transition, diagnostics.record_blame_outcome(transition, outcome))
    else:
        quarantine.handle_probation_probe(transition, outcome)


def _suspect_link(transition: Transition, outcome: diagnostics.ProbeOutcome) -> None:
    """After a slow all-reduce ordered by an operator, try both ends with partners known to be good."""
    for node in outcome.probe.nodes:
        peers = [other for other in outcome.probe.nodes if other != node]
        if not peers or not is_serving(transition, node):
            continue
        subject, evidence = (peers[0], {"peer": peers[0]}) if len(peers) == 1 else (outcome.probe_id, None)
        finding = transition.make_finding(
            FindingKind.NETWORK_SLOW_LINK, subject, Severity.WARNING, outcome.failure, evidence=evidence
        )
        offences.raise_controller_finding(transition, node, finding, transition.policy.probe_retry_s)


def _settle_if_over(transition: Transition, case: BlameCase | None) -> None:
    if case is None or diagnostics.open_suspects(case):
        return
    diagnostics.close_blame_case(transition, case)
    for node in case.suspects:
        health = transition.state.nodes[node].health
        undecided = health.undecided_findings.items()
        health.undecided_findings = {k: why for k, why in undecided if why is not UndecidedReason.BLAME_ISOLATION}
        transition.mark_node_changed(node)
    if case.kind is BlameIsolationMethod.COMPUTE:
        settle_digest_case(transition, case)
    else:
        _settle_pair(transition, case)
        for node in case.passed:
            own = transition.state.nodes[node].health.controller_findings
            slow = [key for key, finding in own.items() if finding.kind is FindingKind.NETWORK_SLOW_LINK]
            offences.clear_controller_findings(transition, node, slow)


def _settle_pair(transition: Transition, case: BlameCase) -> None:
    """Settle a pair: a suspect that fails with a good partner is at fault; if none fails, the link is suspected."""
    for node in case.suspects:
        record = transition.state.nodes[node]
        if node in case.failed and is_serving(transition, node):
            proof = f"{case.summary}; it also failed with a known-good partner: {case.failed[node]}"
            _judge_proven(transition, node, case.findings[node], proof)
        elif record.state is NodeState.PROBATION and record.quarantine.diagnostics is DiagnosticsStatus.WAITING:
            _settle_return(transition, case, node)
        elif node in case.inconclusive and is_serving(transition, node):
            words = f"{case.summary}; {case.inconclusive[node]}, so no node is found at fault: inspect {node}"
            transition.add_verdict(node, Decision.RECOMMEND, words, evidence=(case.findings[node],), trace=case.trace)
    if not case.failed and not case.inconclusive:
        others = " and ".join(case.suspects)
        blame = f"the link between {others} is suspected" if len(case.suspects) > 1 else f"{others} is cleared"
        words = f"{case.summary}; each node passed with a known-good partner: {blame}; no node is evicted"
        transition.audit("blame_isolation.inconclusive", words, trace=case.trace)


def _judge_proven(transition: Transition, node: str, finding: Finding, proof: str) -> None:
    if finding.key in transition.state.nodes[node].health.agent_findings:
        judge_by_rule(transition, node, finding, proof=proof)
    else:
        offences.raise_controller_finding(transition, node, finding, transition.policy.probe_retry_s, proof)


def _settle_return(transition: Transition, case: BlameCase, node: str) -> None:
    """Continue or end the readmission of a suspect on probation. Staying out without proof is no offence."""
    if node in case.passed:
        quarantine.record_diagnostic_passed(transition, node)
    elif node in case.failed:
        quarantine.record_diagnostic_failed(transition, node, case.failed[node])
    else:
        why = f"{case.summary}; {case.inconclusive[node]}"
        quarantine.record_diagnostic_failed(transition, node, why, offence_weight=0.0)
