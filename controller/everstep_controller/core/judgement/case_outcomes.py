"""Draw the consequences of differing digests, probes and blame cases."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.ids import Version
from everstep.vocabulary import (
    Action,
    AuditKind,
    Decision,
    Finding,
    FindingKind,
    GenerationReason,
    Mode,
    NodeState,
    Severity,
)
from everstep.wire.v1.training import GenerationSpec, ProbeFinished, VersionSealed
from everstep_controller.core import maintenance, notices
from everstep_controller.core.checkpoints.commits import (
    DigestVote,
    record_seal,
    roll_back_before,
    roll_back_to_clean,
)
from everstep_controller.core.health import diagnostics, offences, quarantine
from everstep_controller.core.health.node_state import CORDONED_STATES
from everstep_controller.core.jobs import ending
from everstep_controller.core.jobs.generations import RegroupCause, note_beyond_boundary, regroup
from everstep_controller.core.judgement import control_group
from everstep_controller.core.judgement.audit_reports import note_incomparable_digests
from everstep_controller.core.judgement.audit_switch import name_parameters, switch_off, switch_votes_off
from everstep_controller.core.judgement.findings import judge_controller_findings, recheck_undecided
from everstep_controller.core.judgement.verdicts import FindingReport, is_serving, settle
from everstep_controller.core.policy import BlameIsolationMethod
from everstep_controller.core.records import (
    DiagnosticsStatus,
    JobRecord,
    UndecidedReason,
)
from everstep_controller.core.state import AuditGroup, BlameCase
from everstep_controller.core.transition import Transition


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
    if report.differing_parameters and job.audits.compared_nodes:
        name_parameters(transition, job, report.version, report.differing_parameters)
    vote = record_seal(transition, job, spec, report)
    if vote is None:
        return
    note_incomparable_digests(transition, job, spec, vote.incomparable)
    if not vote.is_unanimous:
        _digests_differ(transition, job, spec, report, vote)


def _digests_differ(
    transition: Transition, job: JobRecord, spec: GenerationSpec, report: VersionSealed, vote: DigestVote
) -> None:
    divergent_nodes = list(dict.fromkeys(spec.node_of(rank) for rank in sorted(vote.divergent_ranks)))
    if vote.scattered_ranks or control_group.are_too_many(divergent_nodes, len(spec.seats)):
        ranks = vote.scattered_ranks or vote.divergent_ranks
        sentence = control_group.describe_scattered(str(report.version), ranks)
        differing = list(dict.fromkeys(spec.node_of(rank) for rank in sorted(ranks)))
        majority = [node for node in spec.seats if node not in differing]  # from which they all may differ alike
        switch_votes_off(transition, job, report.version, sentence, [*majority[:1], *differing], ranks)
        return
    back = roll_back_to_clean(transition, job)
    tied = list(dict.fromkeys(spec.node_of(rank) for rank in sorted(vote.tied_ranks)))
    if divergent_nodes:
        ranks_words = ", ".join(str(rank) for rank in sorted(vote.divergent_ranks))
        nodes = ", ".join(divergent_nodes)
        what = f"the digest of rank {ranks_words} on {nodes} differs from the majority at version {report.version}"
        settled = evict_divergent(transition, job, divergent_nodes, what)
        if not settled and fails_for_kept_culprits(transition, job, what, FindingKind.DIGEST_MISMATCH):
            return
    else:
        what = f"digests of version {report.version} differ without a majority among {', '.join(tied)}"
        if not settle_tie(transition, job, tied, what):
            switch_votes_off_after_ties(transition, job, report.version, tied, what)
    cause = RegroupCause(reason=GenerationReason.CORRUPTION, sentence=f"{what}; {back}", trace=transition.trace)
    regroup(transition, job, cause)


def fails_for_kept_culprits(transition: Transition, job: JobRecord, description: str, kind: FindingKind) -> bool:
    """Record that a node that computes wrongly stays in the job; after too many times end the job, and return True.

    The job would only compute the same wrong steps again. Its end cannot be revoked, so it waits for the database.
    """
    since = transition.now - transition.policy.regroups.failure_window_s
    times = [*(at for at in job.failures.kept_culprit_times if at > since), transition.now]
    job.failures.kept_culprit_times = times
    transition.mark_job_changed(job.job)
    is_over = len(times) >= transition.policy.audits.digest_tie_count and job.is_running
    if not is_over or transition.state.database.outage:
        return False
    results = "digests" if kind is FindingKind.DIGEST_MISMATCH else "results in audits"
    count = f"{results} differed {len(times)} times and no node was evicted for it"
    never_agreed = transition.state.job_runtime[job.job].commits.verified_version is None
    why = "the node that computes wrongly is still in the job"
    if kind is FindingKind.DIGEST_MISMATCH and never_agreed:
        why = f"digests of this job never agreed, so the program is the likely cause: {control_group.VOTE_CAUSES}"
    ending.fail_job(transition, job, f"{description}; {count}; {why}")
    return True


def evict_divergent(
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
        if not is_serving(transition.state, node):
            continue
        _raise_mismatch(transition, node, description, Severity.CRITICAL, kind, evidence)
        judge_controller_findings(transition)
        if not is_serving(transition.state, node):
            _clear_tied_nodes(transition, node)
    transition.regroup_claimed.discard(job.job)
    return not any(is_serving(transition.state, node) for node in nodes)


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
                or (
                    finding.kind is FindingKind.AUDIT_MISMATCH and finding.subject in (_TIE_SUBJECT, _UNDECIDED_SUBJECT)
                )
            ]
            transition.clear_findings(node, mismatches)
    transition.state.nodes[divergent_node].health.digest_tie_nodes = []


def settle_tie(
    transition: Transition,
    job: JobRecord,
    tied: list[str],
    description: str,
    kind: FindingKind = FindingKind.DIGEST_MISMATCH,
    evidence: dict[str, str] | None = None,
) -> bool:
    """Handle a tie, which accuses all of its nodes. Return True if one is out, or if all are being tried."""
    if len(tied) == 1 and len(job.seats) > 1:
        return evict_divergent(transition, job, tied, f"ranks of {tied[0]} differ among themselves")
    if any(case.job == job.job for case in transition.state.diagnostics.blame_cases.values()):
        return True
    findings = {node: _raise_mismatch(transition, node, description, Severity.WARNING, kind, evidence) for node in tied}
    judge_controller_findings(transition)
    case = None
    if len(tied) == 1 or not all(set(_remembered_tie(transition, node)) == set(tied) - {node} for node in tied):
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
        out = evict_divergent(transition, job, list(case.failed), what, kind)
    else:
        out = _settle_by_history(transition, job, list(case.suspects), case.summary, kind)
    if not out:
        words = (
            f"{case.summary}; all compute tests with known results passed: {', '.join(case.suspects)} stay in service "
            "and remain suspected"
        )
        transition.log_event("blame_isolation.inconclusive", words, job=job.job, trace=case.trace)
    if not job.is_running:
        return
    group = _audited_group(case) if kind is FindingKind.AUDIT_MISMATCH else None
    if not out and case.failed and fails_for_kept_culprits(transition, job, case.summary, kind):
        return
    if not out and not case.failed and group is not None:
        switch_off_after_ties(transition, job, group, list(case.suspects), case.summary)
    elif not out and not case.failed:
        version = transition.state.job_runtime[job.job].commits.settled_version
        switch_votes_off_after_ties(transition, job, version, list(case.suspects), case.summary)
    elif out or any(job.is_seated(node) and not is_serving(transition.state, node) for node in case.failed):
        sentence = f"{case.summary}; the culprit is found"
        if kind is FindingKind.AUDIT_MISMATCH:  # it has gone on computing since the tie
            step = min(int(finding.evidence["step"]) for finding in case.findings.values())
            sentence += f"; {roll_back_before(transition, job, step)}"
        regroup(transition, job, RegroupCause(GenerationReason.CORRUPTION, sentence, case.trace))


def _audited_group(case: BlameCase) -> AuditGroup | None:
    """Return the audit in which the suspects differ, by the evidence on one of them."""
    evidence = next((finding.evidence for finding in case.findings.values()), {})
    if "audit" not in evidence:
        return None
    return AuditGroup(int(evidence["generation"]), int(evidence["step"]), AuditKind(evidence["audit"]))


def switch_off_after_ties(
    transition: Transition, job: JobRecord, group: AuditGroup, tied: Sequence[str], description: str
) -> bool:
    """Record that an audit's difference evicted no node; after too many, switch that audit off and return True.

    A job whose nodes differ without a fault of hardware must not end for it, and a person is told.
    """
    count = _count_tie(transition, job)
    if not count:
        return False
    sentence = control_group.describe_ties(group.audit, description, count)
    switch_off(transition, job, group, sentence)
    _keep_suspected(transition, tied, sentence, FindingKind.AUDIT_MISMATCH)
    return True


def switch_votes_off_after_ties(
    transition: Transition, job: JobRecord, version: Version | None, tied: Sequence[str], description: str
) -> None:
    """Record that a tie of digests evicted no node; after too many, compare digests no more."""
    count = _count_tie(transition, job)
    if count:
        sentence = control_group.describe_vote_ties(description, count)
        switch_votes_off(transition, job, version, sentence, tied)
        _keep_suspected(transition, tied, sentence, FindingKind.DIGEST_MISMATCH)


def _count_tie(transition: Transition, job: JobRecord) -> int:
    """Record a tie without a culprit. Return the number of ties if that is too many, and begin to count anew; else 0.

    Ties are remembered for as long as they accuse their nodes. Otherwise a job with slow steps goes back forever.
    """
    if not job.is_running or transition.state.database.outage:
        return 0
    since = transition.now - _tie_memory_s(transition)
    times = [*(at for at in job.failures.digest_tie_times if at > since), transition.now]
    is_too_many = len(times) >= transition.policy.audits.digest_tie_count
    job.failures.digest_tie_times = [] if is_too_many else times
    transition.mark_job_changed(job.job)
    return len(times) if is_too_many else 0


def _keep_suspected(transition: Transition, tied: Sequence[str], sentence: str, kind: FindingKind) -> None:
    """Raise a finding on each tied node that a person should look at. It evicts no node, as nothing is proven."""
    for node in tied:
        if node in transition.state.nodes:
            finding = transition.make_finding(kind, _UNDECIDED_SUBJECT, Severity.CRITICAL, sentence)
            finding = msgspec.structs.replace(finding, mode=Mode.OBSERVE)
            transition.raise_finding(node, finding, _tie_memory_s(transition))


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
    return evict_divergent(transition, job, evicted_for_tie, f"{description}; {why}", kind)


def _remembered_tie(transition: Transition, node: str) -> list[str]:
    """Return the other nodes of the node's last tie, if it is still remembered."""
    health = transition.state.nodes[node].health
    return health.digest_tie_nodes if transition.now < health.digest_tie_at + _tie_memory_s(transition) else []


def _tie_memory_s(transition: Transition) -> float:
    return transition.policy.rules.default_rule(FindingKind.DIGEST_MISMATCH).step_memory_s


_TIE_SUBJECT = "tie"
"""Subject of the finding on nodes whose results in an audit differ, while it is unknown which are wrong."""
_UNDECIDED_SUBJECT = "undecided"
"""Subject of the finding on nodes that differed so often, without a culprit, that the comparison is off."""


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
    transition.raise_finding(node, finding, 0.0 if is_proven else _tie_memory_s(transition))
    return finding


# Probes


def handle_probe_finished(transition: Transition, node: str, report: ProbeFinished) -> None:
    """Handle one node's probe result; the last result, or the first bad one, decides."""
    _apply_outcome(transition, diagnostics.record_probe_result(transition, node, report))


def settle_overdue_probe(transition: Transition, name: str) -> None:
    """Settle a probe whose deadline has passed."""
    _apply_outcome(transition, diagnostics.time_out_probe(transition, name))


def advance_blame_case(transition: Transition, name: str) -> None:
    """Continue a blame case at its deadline, or when a suspect waits for a partner."""
    _settle_if_over(transition, diagnostics.retry_blame_case(transition, name))


def advance_treatment(transition: Transition, node: str) -> None:
    """Do everything in a node's treatment that is due."""
    record = transition.state.nodes[node]
    maintenance.end_if_due(transition, node)
    notices.reconsider_notice(transition, node)
    if record.state is NodeState.HELD:
        why = f"no order or cordon keeps {node} out of service any more"
        maintenance.try_return_to_probation(transition, node, why)
    offences.expire_controller_findings(transition, node)
    recheck_undecided(transition, node)
    if record.state is NodeState.QUARANTINED:
        quarantine.reconsider_quarantine(transition, node)
        return
    if quarantine.can_retry_diagnostic(transition, node):
        quarantine.run_next_diagnostic(transition, node)
    quarantine.reconsider_probation(transition, node)


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
        if not peers or not is_serving(transition.state, node):
            continue
        subject, evidence = (peers[0], {"peer": peers[0]}) if len(peers) == 1 else (outcome.probe_id, None)
        finding = transition.make_finding(
            FindingKind.NETWORK_SLOW_LINK, subject, Severity.WARNING, outcome.failure, evidence=evidence
        )
        transition.raise_finding(node, finding, transition.policy.probes.retry_s)


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
            transition.clear_findings(node, slow)


def _settle_pair(transition: Transition, case: BlameCase) -> None:
    """Settle a pair: a suspect that fails with a good partner is at fault; if none fails, the link is suspected."""
    for node in case.suspects:
        record = transition.state.nodes[node]
        if node in case.failed and is_serving(transition.state, node):
            proof = f"{case.summary}; it also failed with a known-good partner: {case.failed[node]}"
            _judge_proven(transition, node, case.findings[node], proof)
        elif record.state is NodeState.PROBATION and record.quarantine.diagnostics is DiagnosticsStatus.WAITING:
            _settle_return(transition, case, node)
        elif node in case.inconclusive and is_serving(transition.state, node):
            words = f"{case.summary}; {case.inconclusive[node]}, so no node is found at fault: inspect {node}"
            transition.add_verdict(node, Decision.RECOMMEND, words, evidence=(case.findings[node],), trace=case.trace)
    if not case.failed and not case.inconclusive:
        others = " and ".join(case.suspects)
        blame = f"the link between {others} is suspected" if len(case.suspects) > 1 else f"{others} is cleared"
        words = f"{case.summary}; each node passed with a known-good partner: {blame}; no node is evicted"
        transition.log_event("blame_isolation.inconclusive", words, trace=case.trace)


def _judge_proven(transition: Transition, node: str, finding: Finding, proof: str) -> None:
    if finding.key in transition.state.nodes[node].health.agent_findings:
        settle(transition, FindingReport(node=node, finding=finding, proof=proof))
    else:
        transition.raise_finding(node, finding, transition.policy.probes.retry_s, proof)


def _settle_return(transition: Transition, case: BlameCase, node: str) -> None:
    """Continue or end the readmission of a suspect on probation. Staying out without proof is no offence."""
    if node in case.passed:
        quarantine.record_diagnostic_passed(transition, node)
    elif node in case.failed:
        quarantine.record_diagnostic_failed(transition, node, case.failed[node])
    else:
        why = f"{case.summary}; {case.inconclusive[node]}"
        quarantine.record_diagnostic_failed(transition, node, why, offence_weight=0.0)
