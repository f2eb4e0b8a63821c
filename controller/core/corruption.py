"""Digests differ: name the liar by majority, or doubt both; in any case go back to what is known clean."""

from __future__ import annotations

from controller.core import jobs
from controller.core.checkpoints import Vote, roll_back, take_seal
from controller.core.eviction import evict, serving
from controller.core.generations import Cause, heard_beyond_boundary, is_member, regroup
from controller.core.losses import node_left_jobs, running_spec
from controller.core.state import JobRecord
from controller.core.turn import Turn
from everstep.vocabulary import Action, Decision, Finding, FindingKind, GenerationReason, JobState, Severity
from everstep.wire.v1.training import GenerationSpec, Sealed


def seal_arrived(turn: Turn, job: JobRecord, node: str, report: Sealed) -> None:
    """A rank's share of a version. Only ranks of the running generation count, each only for itself."""
    heard_beyond_boundary(turn, job, node, report.rank, report.generation)
    spec = running_spec(job)
    if spec is None or job.state is not JobState.RUNNING or report.generation != spec.number:
        turn.ignore("sealed.stale")
        return
    if report.version.generation != spec.number or not is_member(spec, node, report.rank):
        turn.ignore("sealed.not_a_member")
        return
    turn.state.live_jobs[job.job].pace.seen(report.version.step, turn.now)
    vote = take_seal(turn, job, spec, report)
    if vote is not None:
        _digests_differ(turn, job, spec, report, vote)


def _digests_differ(turn: Turn, job: JobRecord, spec: GenerationSpec, report: Sealed, vote: Vote) -> None:
    back = roll_back(turn, job)
    liars = list(dict.fromkeys(spec.roster[rank].node for rank in sorted(vote.liars)))
    tied = list(dict.fromkeys(spec.roster[rank].node for rank in sorted(vote.tied)))
    if liars:
        ranks = ", ".join(str(rank) for rank in sorted(vote.liars))
        what = f"the digest of rank {ranks} on {', '.join(liars)} differs from the majority at version {report.version}"
        settled = _convict(turn, job, liars, what)
    else:
        what = f"digests of version {report.version} differ without a majority among {', '.join(tied)}"
        settled = _second_opinion(turn, job, tied, what)
    if not settled and _too_many(turn, job):
        jobs.fail(turn, job, f"{what}; wrong for the {len(job.ties)}. time, and {_whose_fault(turn, job)}")
        return
    cause = Cause(reason=GenerationReason.CORRUPTION, sentence=f"{what}; {back}", trace=turn.trace)
    regroup(turn, job, cause)


def _whose_fault(turn: Turn, job: JobRecord) -> str:
    if turn.state.live_jobs[job.job].verified is None:
        return "digests of this job never agreed: where replicas need not be equal, --digest-interval 0 ends the vote"
    return "whoever computes wrongly is still in"


def _convict(turn: Turn, job: JobRecord, nodes: list[str], what: str) -> bool:
    """One confirmed mismatch convicts: every known liar lied again. Out at once, since what it computes is wrong.

    False where minimum or budget kept one of them in.
    """
    settled = True
    for node in nodes:
        finding = _finding(turn, node, what, Severity.CRITICAL)
        if not serving(turn, node):
            continue
        if not evict(turn, node, finding, f"{node}: {what}"):
            settled = False
            continue
        cause = Cause(
            reason=GenerationReason.NODE_EVICTED,
            sentence=f"{node} computes wrongly in job {job.job}",
            trace=turn.trace,
        )
        _leave_others(turn, job, node, cause)
        _clear_names(turn, node)
    return settled


def _clear_names(turn: Turn, liar: str) -> None:
    """Who was tied with the liar needs no other explanation."""
    for node in turn.state.nodes[liar].against:
        other = turn.state.nodes.get(node)
        if other is not None and liar in other.against:
            other.against = []
            other.own = {k: f for k, f in other.own.items() if f.kind is not FindingKind.DIGEST_MISMATCH}
            turn.node_changed(node)
    turn.state.nodes[liar].against = []


def _leave_others(turn: Turn, job: JobRecord, node: str, cause: Cause) -> None:
    """Jobs other than ``job`` leave the node; ``job`` itself regroups once, for all liars together."""
    live = turn.state.live_nodes[node]
    mine, live.jobs = live.jobs, {name: None for name in live.jobs if name != job.job}
    node_left_jobs(turn, node, cause)
    live.jobs = mine


def _second_opinion(turn: Turn, job: JobRecord, tied: list[str], what: str) -> bool:
    """Suspicion on all of a tie; True where one of them is convicted and out.

    Ranks of one node that differ convict it. Who was tied before, with others than now, is in both ties; but where
    digests never agreed, it may be the vote that is wrong.
    """
    if len(tied) == 1:
        return _convict(turn, job, tied, f"ranks of {tied[0]} differ among themselves")
    agreed_once = turn.state.live_jobs[job.job].verified is not None
    convicted = []
    for node in tied:
        record = turn.state.nodes[node]
        others = [other for other in tied if other != node]
        if agreed_once and record.against and not set(record.against) & set(others):
            convicted.append(node)
        record.against = others
    if len(convicted) == 1:
        return _convict(turn, job, convicted, f"{what}; {convicted[0]} was in such a tie before, with others")
    for node in tied:
        finding = _finding(turn, node, what, Severity.WARNING)
        words = f"{what}; {node} is under suspicion and stays, until a second opinion"
        turn.verdict(node, Decision.NO_ACTION, words, evidence=(finding,))
    return False


def _too_many(turn: Turn, job: JobRecord) -> bool:
    job.ties = [*(at for at in job.ties if at > turn.now - turn.policy.flap_window_s), turn.now]
    turn.job_changed(job.job)
    return len(job.ties) >= turn.policy.tie_count


def _finding(turn: Turn, node: str, what: str, severity: Severity) -> Finding:
    """The controller's own finding, kept with the node."""
    finding = Finding(
        kind=FindingKind.DIGEST_MISMATCH,
        subject="parameters",
        severity=severity,
        message=what,
        action=Action.REPAIR if severity is Severity.CRITICAL else Action.NONE,
        since=turn.now,
        trace=turn.trace,
    )
    turn.state.nodes[node].own[finding.key] = finding
    turn.node_changed(node)
    return finding
