"""Forget nodes and ended jobs, by order or by age, and end abandoned jobs.

A node that a job may still need is never forgotten, nor by age a node with a problem that no sensor would detect again.
One that returns after it was forgotten while unfit must pass the same diagnostics (``liveness.registration``).
"""

from __future__ import annotations

from everstep.vocabulary import JobState, NodeState
from everstep_controller.core.effects import RecordFindingCleared
from everstep_controller.core.health import node_state
from everstep_controller.core.health.eviction import drop_deferral
from everstep_controller.core.jobs.ending import fail_job
from everstep_controller.core.records import QUARANTINE_STATES, JobRecord, NodeRecord, ReadmissionPlan, UnfitNode
from everstep_controller.core.seats import job_index
from everstep_controller.core.state import FLEET, DeadlineKind, FleetState
from everstep_controller.core.transition import Transition

CHECK_INTERVAL_S = 600.0
"""Seconds between two checks."""
MAX_PER_CHECK = 256
"""Maximum number of nodes, and of jobs, forgotten per check, so that transactions stay short."""
RETRY_S = 1.0
MAX_UNFIT_NODES = 1000
"""Number of unfit nodes remembered after they were forgotten; the oldest are dropped first."""


def schedule_retention(transition: Transition, wait_s: float = CHECK_INTERVAL_S) -> None:
    """Schedule the next check, if the policy asks for any."""
    retention = transition.policy.retention
    if retention.forget_nodes_after_s or retention.forget_jobs_after_s or retention.end_abandoned_jobs_after_s:
        transition.schedule(transition.now + wait_s, DeadlineKind.RETENTION, FLEET)


def apply_retention(transition: Transition) -> None:
    """Forget whatever is older than the policy keeps. In a database outage this waits, because it would be lost."""
    jobs = nodes = 0
    if not transition.state.database.outage:
        _end_abandoned_jobs(transition)
        jobs, nodes = _forget_old_jobs(transition), _forget_old_nodes(transition)
    schedule_retention(transition, RETRY_S if MAX_PER_CHECK in (jobs, nodes) else CHECK_INTERVAL_S)


def reason_to_keep(state: FleetState, node: str) -> str:
    """Return why the node cannot be forgotten and what to do, or "" if nothing speaks against it."""
    if node in state.liveness.reachable_nodes:
        return f"{node} still sends messages: stop its agent first, or it would register again at once"
    for job in state.jobs.values():
        if job.is_ended:
            continue
        if job.is_seated(node):
            return (
                f"{node} is in the roster of job {job.job}, which is {job.status.state}: stop the job, or let it "
                "continue without the node"
            )
        if job.commits.counts_on(node):
            return f"{node} may hold a share of what {job.job} has committed: wait for its next commit, or stop the job"
    busy = (
        *(probe.nodes for probe in state.diagnostics.probes.values()),
        *(case.suspects for case in state.diagnostics.blame_cases.values()),
    )
    if any(node in those for those in busy):
        return f"a probe of {node} is running: wait until it has ended"
    return ""


def _forget_old_nodes(transition: Transition) -> int:
    """Forget expired nodes and return their number."""
    state, after_s = transition.state, transition.policy.retention.forget_nodes_after_s
    if not after_s:
        return 0
    old = [n for n, node in state.nodes.items() if _may_expire(node) and transition.now - _gone_since(node) >= after_s]
    found = [node for node in old if not reason_to_keep(state, node)][:MAX_PER_CHECK]
    for node in found:
        days = (transition.now - _gone_since(state.nodes[node])) / 86400
        forget_node(transition, node, f"{node} sent no message for {days:.1f} days and is forgotten")
    return len(found)


def _may_expire(record: NodeRecord) -> bool:
    """Return whether time alone ends the record. A person's order, or a pending decision of a person, keeps it."""
    if record.liveness.reachable or record.scheduling.hold_reason or record.scheduling.external_cordon_by:
        return False
    if record.quarantine.needs_operator or record.health.defective_gpus:
        return False
    return record.state in (NodeState.LOST, NodeState.QUARANTINED)


def _gone_since(record: NodeRecord) -> float:
    return max(record.liveness.lost_at, record.since)


def forget_node(transition: Transition, node: str, sentence: str) -> None:
    """Drop everything known about a node that nothing keeps (``reason_to_keep``), except its events."""
    state, record = transition.state, transition.state.nodes[node]
    drop_deferral(transition, node)
    node_state.uncordon(transition, node, sentence)
    _keep_unfit(transition, record)
    transition.log_event("node.forgotten", sentence, node=node)
    for key in (*record.health.agent_findings, *record.health.controller_findings):
        transition.emit(RecordFindingCleared(node, key, transition.now))
    for job in state.jobs.values():
        _remove_from_job(transition, job, node)
    if any(window.node == node for window in state.fleet.maintenance_windows):
        state.fleet.maintenance_windows = [window for window in state.fleet.maintenance_windows if window.node != node]
        transition.mark_fleet_changed()
    for seen in state.shared_findings.sightings.values():
        seen.pop(node, None)
    for waiting in state.shared_findings.outbreaks.values():
        waiting.pop(node, None)
    job_index.remove_node(state, node)
    del state.nodes[node], state.node_runtime[node]
    transition.delete_node(node)


def _keep_unfit(transition: Transition, record: NodeRecord) -> None:
    """Remember that the node was unfit, in case an agent registers under its name. A plan shows that it was out."""
    if record.state not in QUARANTINE_STATES and record.quarantine.plan is None and not record.health.defective_gpus:
        return
    unfit, plan = transition.state.fleet.unfit_nodes, record.quarantine.plan or ReadmissionPlan()
    unfit.pop(record.node, None)
    unfit[record.node] = UnfitNode(
        sentence=f"{record.node} was forgotten while it was out of service ({record.sentence})",
        diagnostics=plan.required_diagnostics,
        required_passes=plan.required_passes,
        defective_gpus=tuple(record.health.defective_gpus),
    )
    while len(unfit) > MAX_UNFIT_NODES:
        del unfit[next(iter(unfit))]
    transition.mark_fleet_changed()


def _remove_from_job(transition: Transition, job: JobRecord, node: str) -> None:
    """Remove the node from the job. An ended job that counts on the node for a version loses its locations."""
    member = job.membership
    counts = job.commits.counts_on(node)
    blamed = (member.excluded_nodes, job.failures.rank_loss_times, member.replaced_stragglers)
    if not (counts or any(node in place for place in (member.launchers, *blamed, member.former_nodes))):
        return
    job.membership.launchers.pop(node, None)
    job_index.clear_exclusion(transition, job.job, node)
    job.membership.former_nodes = [other for other in job.membership.former_nodes if other != node]
    if counts:
        job.commits.locations, job.commits.earlier_locations = None, []
    transition.mark_job_changed(job.job)


def _end_abandoned_jobs(transition: Transition) -> None:
    """End jobs that lost all launchers long ago, since they occupy memory on their nodes."""
    after_s = transition.policy.retention.end_abandoned_jobs_after_s
    for job in transition.state.jobs.values() if after_s else ():
        deserted = job.status.state in (JobState.FORMING, JobState.PAUSED) and not job.membership.launchers
        if deserted and transition.now - max(job.status.since, job.membership.abandoned_at) >= after_s:
            sentence = f"all its launchers have left, and none joined for {after_s / 3600:g} h: its memory is released"
            fail_job(transition, job, sentence)


def _forget_old_jobs(transition: Transition) -> int:
    """Forget expired jobs and return their number."""
    state, after_s = transition.state, transition.policy.retention.forget_jobs_after_s
    if not after_s:
        return 0
    old = [j for j, job in state.jobs.items() if job.is_ended and transition.now - job.status.since >= after_s]
    for name in old[:MAX_PER_CHECK]:
        job = state.jobs[name]
        days = (transition.now - job.status.since) / 86400
        job_index.drop_job(transition, name, f"job {name} {job.status.state} {days:.1f} days ago and is forgotten")
    return len(old[:MAX_PER_CHECK])
