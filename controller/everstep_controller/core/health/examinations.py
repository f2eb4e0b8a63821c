"""Digests differ: name the liar by majority, or doubt both; in any case go back to what is known clean."""

from __future__ import annotations

from everstep.vocabulary import Action, Decision, Finding, FindingKind, GenerationReason, JobState, NodeState, Severity
from everstep.wire.v1.training import GenerationSpec, ProbeFinished, Sealed
from everstep_controller.core.checkpoints.commits import Vote, roll_back, take_seal
from everstep_controller.core.health import diagnostics, maintenance, quarantine
from everstep_controller.core.health.diagnostics import Outcome, open_case, overdue, take_result
from everstep_controller.core.health.eviction import serving
from everstep_controller.core.health.evidence import clear_own, forget_unseen, raise_own
from everstep_controller.core.health.findings import judge_own, judge_settled, look_again
from everstep_controller.core.health.node_state import OUT
from everstep_controller.core.jobs import lifecycle
from everstep_controller.core.jobs.generations import Cause, heard_beyond_boundary, regroup
from everstep_controller.core.jobs.losses import running_spec
from everstep_controller.core.jobs.membership import is_seated
from everstep_controller.core.policy import SecondPass
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import Case, FleetState
from everstep_controller.core.transition import Turn


def seal_arrived(turn: Turn, job: JobRecord, node: str, report: Sealed) -> None:
    """A rank's share of a version. Only ranks of the running generation count, each only for itself."""
    heard_beyond_boundary(turn, job, node, report.rank, report.generation, report.version.step)
    spec = running_spec(job)
    if spec is None or job.state is not JobState.RUNNING or report.generation != spec.number:
        turn.ignore("sealed.stale")
        return
    if report.version.generation != spec.number or not spec.has(node, report.rank):
        turn.ignore("sealed.not_a_member")
        return
    turn.state.live_jobs[job.job].pace.seen(report.version.step, turn.now)
    vote = take_seal(turn, job, spec, report)
    if vote is not None:
        _digests_differ(turn, job, spec, report, vote)


def _digests_differ(turn: Turn, job: JobRecord, spec: GenerationSpec, report: Sealed, vote: Vote) -> None:
    back = roll_back(turn, job)
    liars = list(dict.fromkeys(spec.node_of(rank) for rank in sorted(vote.liars)))
    tied = list(dict.fromkeys(spec.node_of(rank) for rank in sorted(vote.tied)))
    if liars:
        ranks = ", ".join(str(rank) for rank in sorted(vote.liars))
        what = f"the digest of rank {ranks} on {', '.join(liars)} differs from the majority at version {report.version}"
        settled = _convict(turn, job, liars, what)
    else:
        what = f"digests of version {report.version} differ without a majority among {', '.join(tied)}"
        settled = _second_opinion(turn, job, tied, what)
    if not settled and _too_many(turn, job) and not turn.state.store_away:  # an end that is told cannot be taken back
        lifecycle.fail(turn, job, f"{what}; {_times(job)}, and {_whose_fault(turn, job)}")
        return
    cause = Cause(reason=GenerationReason.CORRUPTION, sentence=f"{what}; {back}", trace=turn.trace)
    regroup(turn, job, cause)


def _times(job: JobRecord) -> str:
    return f"wrong for the {len(job.ties)}. time"


def _whose_fault(turn: Turn, job: JobRecord) -> str:
    if turn.state.live_jobs[job.job].verified is None:
        return (
            "digests of this job never agreed: parameters that differ between ranks must be DTensors or tracked under "
            "names of their own, or what is restored is wrong"
        )
    return "whoever computes wrongly is still in"


def _convict(turn: Turn, job: JobRecord, nodes: list[str], what: str) -> bool:
    """One confirmed mismatch convicts: every known liar lied again. Out at once, since what it computes is wrong; the
    caller regroups ``job`` once, for all of them.

    False where minimum, budget, an outbreak or the rule's own mode kept one of them in.
    """
    turn.regrouped.add(job.job)
    for node in nodes:
        if not serving(turn, node):
            continue
        _finding(turn, node, what, Severity.CRITICAL)
        judge_own(turn)
        if not serving(turn, node):
            _clear_names(turn, node)
    turn.regrouped.discard(job.job)
    return not any(serving(turn, node) for node in nodes)


def _clear_names(turn: Turn, liar: str) -> None:
    """Who was tied with the liar needs no other explanation."""
    for node in turn.state.nodes[liar].against:
        other = turn.state.nodes.get(node)
        if other is not None and liar in other.against:
            other.against = []
            turn.node_changed(node)
            clear_own(turn, node, [k for k, f in other.own.items() if f.kind is FindingKind.DIGEST_MISMATCH])
    turn.state.nodes[liar].against = []


def _second_opinion(turn: Turn, job: JobRecord, tied: list[str], what: str) -> bool:
    """A tie accuses all of them, and so nobody. True where the matter is in hand: one is out, or all are being tried.

    Ranks of one node that differ convict it. Otherwise each node does work whose result is known, and what comes of
    that settles it (``case_settled``). While it goes on, further ties of the job are the same one.
    """
    if len(tied) == 1:
        return _convict(turn, job, tied, f"ranks of {tied[0]} differ among themselves")
    if any(case.job == job.job for case in turn.state.cases.values()):
        return True
    findings = {node: _finding(turn, node, what, Severity.WARNING) for node in tied}
    judge_own(turn)
    tried = all(set(_tied_with(turn, node)) == set(tied) - {node} for node in tied)
    trying = not tried and open_case(turn, SecondPass.COMPUTE, findings, what, job.job) is not None
    if not trying and _settled_by_history(turn, job, tied, what):
        return True
    until = "while it does work whose result is known" if trying else "until a second opinion"
    for node in tied:
        stays = "is out already" if turn.state.nodes[node].state in OUT else "stays"
        words = f"{what}; {node} is under suspicion and {stays}, {until}"
        turn.verdict(node, Decision.NO_ACTION, words, evidence=(findings[node],))
    return trying


def case_settled(turn: Turn, case: Case) -> None:
    """The nodes of a tie have been tried. Who computed wrongly is convicted; where nobody did, their history speaks.

    That is so of the nodes whatever has become of the job, which may have ended or be paused by now.
    """
    job = turn.state.jobs.get(case.job)
    if job is None:
        return
    if case.failed:
        convicted = list(case.failed)
        what = f"{case.what}; {'; '.join(case.failed.values())}"
        out = _convict(turn, job, convicted, what)
    else:
        out = _settled_by_history(turn, job, list(case.suspects), case.what)
    if not out:
        words = f"{case.what}; no work whose result is known came out wrong: {', '.join(case.suspects)} stay, suspected"
        turn.audit("second_pass.nobody", words, job=job.job, trace=case.trace)
    if job.state is not JobState.RUNNING:
        return
    if not out and _too_many(turn, job):
        lifecycle.fail(turn, job, f"{case.what}; {_times(job)}, and {_whose_fault(turn, job)}")
    elif out or any(is_seated(job, node) and not serving(turn, node) for node in case.failed):
        cause = Cause(reason=GenerationReason.CORRUPTION, sentence=f"{case.what}; it is settled", trace=case.trace)
        regroup(turn, job, cause)


def _settled_by_history(turn: Turn, job: JobRecord, tied: list[str], what: str) -> bool:
    """Who was tied before, with others than now, is in both ties. True where that convicts one.

    Where digests never agreed, it may be the vote that is wrong. Work whose result is known finds under half of the
    GPUs that compute wrongly (SDCHunter, OSDI'26), so who passed it is not cleared. A tie is remembered for as long as
    steps of the rule's ladder are (``repeat_s``).
    """
    agreed_once = turn.state.live_jobs[job.job].verified is not None
    convicted = []
    for node in tied:
        record, before = turn.state.nodes[node], _tied_with(turn, node)
        others = [other for other in tied if other != node]
        if agreed_once and before and not set(before) & set(others):
            convicted.append(node)
        record.against, record.against_at = others, turn.now
        turn.node_changed(node)
    if len(convicted) == 1:
        return _convict(turn, job, convicted, f"{what}; {convicted[0]} was in such a tie before, with others")
    return False


def _tied_with(turn: Turn, node: str) -> list[str]:
    """With whom the node was in a tie that is not forgotten yet."""
    record = turn.state.nodes[node]
    return record.against if turn.now < record.against_at + _remembered_s(turn.state) else []


def _remembered_s(state: FleetState) -> float:
    return state.policy.rules.of_kind(FindingKind.DIGEST_MISMATCH).repeat_s


def date_ties(state: FleetState) -> None:
    """Ties that were stored without a date are as old as the findings of them."""
    for record in state.nodes.values():
        if not record.against or record.against_at:
            continue
        doubts = {key: found for key, found in record.own.items() if _is_doubt(found)}
        record.against_at = max((found.since for found in doubts.values()), default=record.since)
        for key, found in doubts.items():
            record.own_until.setdefault(key, found.since + _remembered_s(state))


def _is_doubt(finding: Finding) -> bool:
    return finding.kind is FindingKind.DIGEST_MISMATCH and finding.severity is Severity.WARNING


def _too_many(turn: Turn, job: JobRecord) -> bool:
    job.ties = [*(at for at in job.ties if at > turn.now - turn.policy.flap_window_s), turn.now]
    turn.job_changed(job.job)
    return len(job.ties) >= turn.policy.tie_count


def _finding(turn: Turn, node: str, what: str, severity: Severity) -> Finding:
    """The controller's own finding, kept with the node. A doubt is, for as long as the tie is remembered, and never in
    place of what is proved."""
    finding = Finding(
        kind=FindingKind.DIGEST_MISMATCH,
        subject="parameters",
        severity=severity,
        message=what,
        action=Action.REPAIR if severity is Severity.CRITICAL else Action.NONE,
        since=turn.now,
        trace=turn.trace,
    )
    standing = turn.state.nodes[node].own.get(finding.key)
    if _is_doubt(finding) and standing is not None and not _is_doubt(standing):
        return standing
    raise_own(turn, node, finding, _remembered_s(turn.state) if _is_doubt(finding) else 0.0)
    return finding


# ---- examinations
# Probes and second passes come to their end: who passed, who failed, who is convicted, who is told.


def probe_reported(turn: Turn, node: str, report: ProbeFinished) -> None:
    """One side's result; the last one, or the first bad one, decides."""
    _conclude(turn, take_result(turn, node, report))


def check_probe(turn: Turn, name: str) -> None:
    """At a probe's deadline."""
    _conclude(turn, overdue(turn, name))


def check_case(turn: Turn, name: str) -> None:
    """At a second pass's deadline, or when a suspect of it waits for a partner."""
    _settle_if_over(turn, diagnostics.look_again(turn, name))


def check_care(turn: Turn, node: str) -> None:
    """Whatever of a node's treatment may be due."""
    record = turn.state.nodes[node]
    maintenance.check_end(turn, node)
    if record.state is NodeState.HELD:
        maintenance.come_back(turn, node, f"nobody's word keeps {node} out any more")
    forget_unseen(turn, node)
    look_again(turn, node)
    if record.state is NodeState.QUARANTINED:
        quarantine.check_quarantine(turn, node)
        return
    if quarantine.may_be_tried(turn, node):
        quarantine.next_check(turn, node)
    quarantine.check_probation(turn, node)


def _conclude(turn: Turn, outcome: Outcome | None) -> None:
    if outcome is None:
        return
    if outcome.probe.candidate is None:
        if outcome.slow:
            _suspect_link(turn, outcome)
    elif outcome.probe.case:
        _settle_if_over(turn, diagnostics.took(turn, outcome))
    else:
        quarantine.examined(turn, outcome)


def _suspect_link(turn: Turn, outcome: Outcome) -> None:
    """An all-reduce that a person asked for was slow: partners known to be good tell at which end."""
    for node in outcome.probe.nodes:
        peers = [other for other in outcome.probe.nodes if other != node]
        if not peers or not serving(turn, node):
            continue
        finding = Finding(
            kind=FindingKind.NETWORK_SLOW_LINK,
            subject=peers[0] if len(peers) == 1 else outcome.name,
            severity=Severity.WARNING,
            message=outcome.failure,
            since=turn.now,
            trace=turn.trace,
            evidence={"peer": peers[0]} if len(peers) == 1 else {},
        )
        raise_own(turn, node, finding, turn.policy.probe_retry_s)


def _settle_if_over(turn: Turn, case: Case | None) -> None:
    if case is None or not diagnostics.is_over(case):
        return
    diagnostics.close(turn, case)
    for node in case.suspects:
        record = turn.state.nodes[node]
        record.undecided = {key: why for key, why in record.undecided.items() if why != "second pass"}
        turn.node_changed(node)
    if case.kind is SecondPass.COMPUTE:
        case_settled(turn, case)
    else:
        _settle_pair(turn, case)
        for node in case.passed:
            own = turn.state.nodes[node].own
            clear_own(turn, node, [key for key, found in own.items() if found.kind is FindingKind.NETWORK_SLOW_LINK])


def _settle_pair(turn: Turn, case: Case) -> None:
    """Who fails with a partner known to be good is at fault; where nobody does, the link between is."""
    for node in case.suspects:
        state = turn.state.nodes[node].state
        if node in case.failed and serving(turn, node):
            _blame(turn, node, case.findings[node], f"{case.what}; with a good partner too: {case.failed[node]}")
        elif state is NodeState.PROBATION and turn.state.nodes[node].probe == quarantine.PROBE_WAITS:
            _settle_return(turn, case, node)
        elif node in case.unknown and serving(turn, node):
            words = f"{case.what}; {case.unknown[node]}, so nobody is convicted: a person is to look at {node}"
            turn.verdict(node, Decision.RECOMMEND, words, evidence=(case.findings[node],), trace=case.trace)
    if not case.failed and not case.unknown:
        others = " and ".join(case.suspects)
        blame = f"the link between {others} is suspected" if len(case.suspects) > 1 else f"{others} is cleared"
        words = f"{case.what}; with partners known to be good it passed: {blame}, and nobody is evicted"
        turn.audit("second_pass.nobody", words, trace=case.trace)


def _blame(turn: Turn, node: str, finding: Finding, proof: str) -> None:
    if finding.key in turn.state.nodes[node].findings:
        judge_settled(turn, node, finding, proof)
    else:
        raise_own(turn, node, finding, turn.policy.probe_retry_s, proof)


def _settle_return(turn: Turn, case: Case, node: str) -> None:
    """A suspect that is on its way back: it goes on, or stays out. To stay out without a proof is no offence."""
    if node in case.passed:
        quarantine.passed(turn, node)
    elif node in case.failed:
        quarantine.failed(turn, node, case.failed[node])
    else:
        quarantine.failed(turn, node, f"{case.what}; {case.unknown[node]}", offence=0.0)
