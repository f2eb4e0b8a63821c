"""Settle differing digests, and conclude probes and blame cases.

Digests name a divergent node by majority, or put all tied nodes under suspicion. In either case the job returns to a
state known to be clean.
"""

from __future__ import annotations

from everstep.vocabulary import Action, Decision, Finding, FindingKind, GenerationReason, NodeState, Severity
from everstep.wire.v1.training import GenerationSpec, ProbeFinished, VersionSealed
from everstep_controller.core.checkpoints.commits import DigestVote, record_seal, roll_back_to_clean
from everstep_controller.core.health import diagnostics, maintenance, quarantine
from everstep_controller.core.health.diagnostics import (
    ProbeOutcome,
    open_blame_case,
    record_probe_result,
    time_out_probe,
)
from everstep_controller.core.health.eviction import is_serving
from everstep_controller.core.health.findings import judge_after_isolation, judge_controller_findings, recheck_undecided
from everstep_controller.core.health.node_state import CORDONED_STATES
from everstep_controller.core.health.offences import (
    clear_controller_findings,
    expire_controller_findings,
    raise_controller_finding,
)
from everstep_controller.core.jobs import ending
from everstep_controller.core.jobs.generations import RegroupCause, note_beyond_boundary, regroup
from everstep_controller.core.jobs.membership import is_seated, running_generation
from everstep_controller.core.policy import BlameIsolationMethod
from everstep_controller.core.records import DiagnosticsStatus, JobRecord, UndecidedReason
from everstep_controller.core.state import BlameCase, FleetState
from everstep_controller.core.transition import Transition


def handle_sealed(transition: Transition, job: JobRecord, node: str, report: VersionSealed) -> None:
    """Handle a rank's seal of a version. Only ranks of the running generation count."""
    note_beyond_boundary(transition, job, node, report.rank, report.generation, report.version.step)
    spec = running_generation(job)
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
        what = (
            f"the digest of rank {ranks} on {', '.join(divergent_nodes)} differs from the majority at "
            f"version {report.version}"
        )
        settled = _evict_divergent(transition, job, divergent_nodes, what)
    else:
        what = f"digests of version {report.version} differ without a majority among {', '.join(tied)}"
        settled = _settle_tie(transition, job, tied, what)
    if (
        not settled and _record_tie(transition, job) and not transition.state.database_outage
    ):  # the end of a job cannot be revoked, so it waits for the database
        ending.fail_job(transition, job, f"{what}; {_explain_ties(transition, job)}")
        return
    cause = RegroupCause(reason=GenerationReason.CORRUPTION, sentence=f"{what}; {back}", trace=transition.trace)
    regroup(transition, job, cause)


def _explain_ties(transition: Transition, job: JobRecord) -> str:
    count = f"digests differed {len(job.failures.digest_tie_times)} times and no node was evicted for it"
    if transition.state.job_runtime[job.job].commits.verified_version is None:
        return (
            f"{count}; digests of this job never agreed, so the script is the likely cause: parameters that differ "
            "between ranks must be DTensors, or be tracked under different names"
        )
    return f"{count}; the node that computes wrongly is still in the job"


def _evict_divergent(transition: Transition, job: JobRecord, nodes: list[str], description: str) -> bool:
    """Evict divergent nodes at once, because what they compute is wrong; one confirmed mismatch suffices.

    The caller regroups ``job`` once for all of them. Return False if a minimum, a budget, an outbreak or the rule's
    mode kept one of them in service.
    """
    transition.regroup_claimed.add(job.job)
    for node in nodes:
        if not is_serving(transition, node):
            continue
        _raise_mismatch(transition, node, description, Severity.CRITICAL)
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
            clear_controller_findings(
                transition,
                node,
                [k for k, f in other.health.controller_findings.items() if f.kind is FindingKind.DIGEST_MISMATCH],
            )
    transition.state.nodes[divergent_node].health.digest_tie_nodes = []


def _settle_tie(transition: Transition, job: JobRecord, tied: list[str], description: str) -> bool:
    """Handle a tie, which accuses all of its nodes. Return True if one is out, or if all are being tried.

    Differing ranks of a single node are proof against it. Otherwise each node does work with a known result, which
    settles the case (``settle_digest_case``). Further ties of the job during that time count as the same tie.
    """
    if len(tied) == 1:
        return _evict_divergent(transition, job, tied, f"ranks of {tied[0]} differ among themselves")
    if any(case.job == job.job for case in transition.state.blame_cases.values()):
        return True
    findings = {node: _raise_mismatch(transition, node, description, Severity.WARNING) for node in tied}
    judge_controller_findings(transition)
    tried = all(set(_remembered_tie(transition, node)) == set(tied) - {node} for node in tied)
    trying = (
        not tried
        and open_blame_case(transition, BlameIsolationMethod.COMPUTE, findings, description, job.job) is not None
    )
    if not trying and _settle_by_history(transition, job, tied, description):
        return True
    until = "while it runs compute tests with known results" if trying else "until another vote decides"
    for node in tied:
        stays = (
            "is out of service already" if transition.state.nodes[node].state in CORDONED_STATES else "stays in service"
        )
        words = f"{description}; {node} is suspected and {stays} {until}"
        transition.add_verdict(node, Decision.NO_ACTION, words, evidence=(findings[node],))
    return trying


def settle_digest_case(transition: Transition, case: BlameCase) -> None:
    """Settle a tie after its nodes were tried: evict those that computed wrongly, else decide by history.

    This holds whatever has become of the job, which may have ended or paused.
    """
    job = transition.state.jobs.get(case.job)
    if job is None:
        return
    if case.failed:
        evicted_for_tie = list(case.failed)
        what = f"{case.summary}; {'; '.join(case.failed.values())}"
        out = _evict_divergent(transition, job, evicted_for_tie, what)
    else:
        out = _settle_by_history(transition, job, list(case.suspects), case.summary)
    if not out:
        words = (
            f"{case.summary}; all compute tests with known results passed: {', '.join(case.suspects)} stay in service "
            "and remain suspected"
        )
        transition.audit("blame_isolation.inconclusive", words, job=job.job, trace=case.trace)
    if not job.is_running:
        return
    if not out and _record_tie(transition, job):
        ending.fail_job(transition, job, f"{case.summary}; {_explain_ties(transition, job)}")
    elif out or any(is_seated(job, node) and not is_serving(transition, node) for node in case.failed):
        cause = RegroupCause(
            reason=GenerationReason.CORRUPTION, sentence=f"{case.summary}; the culprit is found", trace=case.trace
        )
        regroup(transition, job, cause)


def _settle_by_history(transition: Transition, job: JobRecord, tied: list[str], description: str) -> bool:
    """Decide a tie by earlier ties: a node that was tied before with other nodes is in both. Return True if that evicts
    one.

    If digests never agreed, the vote itself may be wrong. Work with a known result finds under half of the GPUs that
    compute wrongly (SDCHunter, OSDI'26), so a pass does not clear a node. A tie is remembered for the rule's
    ``step_memory_s``.
    """
    agreed_once = transition.state.job_runtime[job.job].commits.verified_version is not None
    evicted_for_tie = []
    for node in tied:
        record, before = transition.state.nodes[node], _remembered_tie(transition, node)
        others = [other for other in tied if other != node]
        if agreed_once and before and not set(before) & set(others):
            evicted_for_tie.append(node)
        record.health.digest_tie_nodes, record.health.digest_tie_at = others, transition.now
        transition.mark_node_changed(node)
    if len(evicted_for_tie) == 1:
        return _evict_divergent(
            transition,
            job,
            evicted_for_tie,
            f"{description}; {evicted_for_tie[0]} was already in an undecided vote with other nodes, so it is the "
            "likely culprit",
        )
    return False


def _remembered_tie(transition: Transition, node: str) -> list[str]:
    """Return the other nodes of the node's last tie, if it is still remembered."""
    record = transition.state.nodes[node]
    return (
        record.health.digest_tie_nodes
        if transition.now < record.health.digest_tie_at + _tie_memory_s(transition.state)
        else []
    )


def _tie_memory_s(state: FleetState) -> float:
    return state.policy.rules.default_rule(FindingKind.DIGEST_MISMATCH).step_memory_s


def _is_unproven(finding: Finding) -> bool:
    return finding.kind is FindingKind.DIGEST_MISMATCH and finding.severity is Severity.WARNING


def _record_tie(transition: Transition, job: JobRecord) -> bool:
    job.failures.digest_tie_times = [
        *(at for at in job.failures.digest_tie_times if at > transition.now - transition.policy.job_failure_window_s),
        transition.now,
    ]
    transition.mark_job_changed(job.job)
    return len(job.failures.digest_tie_times) >= transition.policy.digest_tie_count


def _raise_mismatch(transition: Transition, node: str, description: str, severity: Severity) -> Finding:
    """Raise the controller's finding. A mere suspicion expires with the tie and never replaces proof."""
    finding = Finding(
        kind=FindingKind.DIGEST_MISMATCH,
        subject="parameters",
        severity=severity,
        message=description,
        action=Action.REPAIR if severity is Severity.CRITICAL else Action.NONE,
        since=transition.now,
        trace=transition.trace,
    )
    existing = transition.state.nodes[node].health.controller_findings.get(finding.key)
    if _is_unproven(finding) and existing is not None and not _is_unproven(existing):
        return existing
    raise_controller_finding(
        transition, node, finding, _tie_memory_s(transition.state) if _is_unproven(finding) else 0.0
    )
    return finding


# Probes and blame cases


def handle_probe_finished(transition: Transition, node: str, report: ProbeFinished) -> None:
    """Handle one node's probe result; the last result, or the first bad one, decides."""
    _apply_outcome(transition, record_probe_result(transition, node, report))


def check_probe_deadline(transition: Transition, name: str) -> None:
    """Check a probe at its deadline."""
    _apply_outcome(transition, time_out_probe(transition, name))


def check_blame_case(transition: Transition, name: str) -> None:
    """Check a blame case at its deadline, or when a suspect waits for a partner."""
    _settle_if_over(transition, diagnostics.retry_blame_case(transition, name))


def check_node_treatment(transition: Transition, node: str) -> None:
    """Check everything in a node's treatment that may be due."""
    record = transition.state.nodes[node]
    maintenance.end_if_due(transition, node)
    if record.state is NodeState.HELD:
        maintenance.try_return_to_probation(
            transition, node, f"no order or cordon keeps {node} out of service any more"
        )
    expire_controller_findings(transition, node)
    recheck_undecided(transition, node)
    if record.state is NodeState.QUARANTINED:
        quarantine.check_quarantine(transition, node)
        return
    if quarantine.can_retry_diagnostic(transition, node):
        quarantine.run_next_diagnostic(transition, node)
    quarantine.check_probation(transition, node)


def _apply_outcome(transition: Transition, outcome: ProbeOutcome | None) -> None:
    if outcome is None:
        return
    if outcome.probe.tested_node is None:
        if outcome.is_slow:
            _suspect_link(transition, outcome)
    elif outcome.probe.case_id:
        _settle_if_over(transition, diagnostics.record_blame_outcome(transition, outcome))
    else:
        quarantine.handle_probation_probe(transition, outcome)


def _suspect_link(transition: Transition, outcome: ProbeOutcome) -> None:
    """After a slow all-reduce ordered by an operator, try both ends with partners known to be good."""
    for node in outcome.probe.nodes:
        peers = [other for other in outcome.probe.nodes if other != node]
        if not peers or not is_serving(transition, node):
            continue
        finding = Finding(
            kind=FindingKind.NETWORK_SLOW_LINK,
            subject=peers[0] if len(peers) == 1 else outcome.probe_id,
            severity=Severity.WARNING,
            message=outcome.failure,
            since=transition.now,
            trace=transition.trace,
            evidence={"peer": peers[0]} if len(peers) == 1 else {},
        )
        raise_controller_finding(transition, node, finding, transition.policy.probe_retry_s)


def _settle_if_over(transition: Transition, case: BlameCase | None) -> None:
    if case is None or not diagnostics.is_settled(case):
        return
    diagnostics.close_blame_case(transition, case)
    for node in case.suspects:
        record = transition.state.nodes[node]
        record.health.undecided_findings = {
            key: why
            for key, why in record.health.undecided_findings.items()
            if why is not UndecidedReason.BLAME_ISOLATION
        }
        transition.mark_node_changed(node)
    if case.kind is BlameIsolationMethod.COMPUTE:
        settle_digest_case(transition, case)
    else:
        _settle_pair(transition, case)
        for node in case.passed:
            own = transition.state.nodes[node].health.controller_findings
            clear_controller_findings(
                transition, node, [key for key, found in own.items() if found.kind is FindingKind.NETWORK_SLOW_LINK]
            )


def _settle_pair(transition: Transition, case: BlameCase) -> None:
    """Settle a pair: a suspect that fails with a good partner is at fault; if none fails, the link between them is
    suspected."""
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
        judge_after_isolation(transition, node, finding, proof)
    else:
        raise_controller_finding(transition, node, finding, transition.policy.probe_retry_s, proof)


def _settle_return(transition: Transition, case: BlameCase, node: str) -> None:
    """Continue or end the readmission of a suspect on probation. Staying out without proof is no offence."""
    if node in case.passed:
        quarantine.record_diagnostic_passed(transition, node)
    elif node in case.failed:
        quarantine.record_diagnostic_failed(transition, node, case.failed[node])
    else:
        quarantine.record_diagnostic_failed(
            transition, node, f"{case.summary}; {case.inconclusive[node]}", offence_weight=0.0
        )
