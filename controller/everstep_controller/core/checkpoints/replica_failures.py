"""Move copies away from replica nodes that do not take them, after several failed commits.

A vault without memory, a vault that is far too slow or a link that corrupts bytes does not hurt training. However,
nothing is committed while a share's copy depends on it. The faulty end need not be known to try another pair: a node
whose copies arrive nowhere is recognised at its next replica node too.
"""

from __future__ import annotations

from everstep.vocabulary import Finding, FindingKind, GenerationReason, JobState, Severity
from everstep_controller.core.health.offences import raise_controller_finding
from everstep_controller.core.jobs.generations import RegroupCause, boundary_step, plan_replicas, regroup
from everstep_controller.core.records import JobRecord
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import join_names

SUBJECT = "copies"


def check_replica_nodes(transition: Transition, job: JobRecord) -> None:
    """At a deadline or after a failed commit, skip the replica nodes that missed too many versions in a row."""
    live, policy, spec = transition.state.job_runtime[job.job], transition.policy, job.generation
    live.commits.skipped_replica_nodes = {
        replica_node: until
        for replica_node, until in live.commits.skipped_replica_nodes.items()
        if until > transition.now
    }
    failing = sorted(
        replica_node
        for replica_node, count in live.commits.missed_copies.items()
        if count >= policy.missed_copies_count
    )
    if not failing or spec is None or job.status.state is not JobState.RUNNING or transition.state.database_outage:
        return
    if transition.now < job.progress.opened_at + policy.growth_interval_s:
        transition.schedule_job(job.progress.opened_at + policy.growth_interval_s, job.job)
        return
    if boundary_step(transition, job, live) is None:
        return  # the next missed version leads here again
    for replica_node in failing:
        del live.commits.missed_copies[replica_node]
        live.commits.skipped_replica_nodes[replica_node] = transition.now + policy.replica_node_skip_s
        _raise_copies_missing(transition, job, replica_node)
    if plan_replicas(transition, job, list(spec.seats)) == spec.replica_nodes:
        return  # there is no other node
    sentence = (
        f"copies go elsewhere than to {join_names(failing)}, which missed {policy.missed_copies_count} "
        "versions in a row"
    )
    regroup(
        transition,
        job,
        RegroupCause(reason=GenerationReason.PLACEMENT, sentence=sentence, trace=transition.trace, at_boundary=True),
    )


def _raise_copies_missing(transition: Transition, job: JobRecord, replica_node: str) -> None:
    spec = job.generation
    assert spec is not None
    senders = [node for node, replica_nodes in spec.replica_nodes.items() if replica_node in replica_nodes]
    finding = Finding(
        kind=FindingKind.COPIES_MISSING,
        subject=f"{SUBJECT}/{job.job}",
        severity=Severity.WARNING,
        message=(
            f"{transition.policy.missed_copies_count} versions of {job.job} in a row did not get from "
            f"{join_names(senders)} to {replica_node}, "
            "so nothing was committed; the ranks' logs on either end say why (memory, time, digests)"
        ),
        value=float(transition.policy.missed_copies_count),
        since=transition.now,
        trace=transition.trace,
    )
    raise_controller_finding(transition, replica_node, finding, transition.policy.replica_node_skip_s)
