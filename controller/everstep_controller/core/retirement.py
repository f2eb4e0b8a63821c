"""Nodes that are gone for good, and jobs that are over for long: forgotten by an operator's word, or by age. A job that
nobody goes on with is over after a while.

Nobody is forgotten whom a job may still want, and by age nobody against whom something stands that no sensor would see
again. A node that comes back under a forgotten name is a new one. But of one that was not fit to serve so much is kept:
it comes back through the diagnostics, as it would have had to (``agents``).
"""

from __future__ import annotations

from everstep.vocabulary import JobState, NodeState
from everstep_controller.core.effects import RecordFindingCleared
from everstep_controller.core.health import node_state
from everstep_controller.core.health.eviction import drop_deferral
from everstep_controller.core.jobs import job_index
from everstep_controller.core.jobs.lifecycle import fail_job
from everstep_controller.core.jobs.membership import ENDED_STATES, is_seated
from everstep_controller.core.records import JobRecord, NodeRecord, ReadmissionPlan, UnfitNode
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition

CHECK_INTERVAL_S = 600.0
"""Seconds between two looks at what has become old."""
MAX_PER_CHECK = 256
"""Nodes, and jobs, that one look forgets: the rest follows a second later, so that one transaction stays short."""
RETRY_S = 1.0
MAX_UNFIT_NODES = 1000
"""Names of forgotten nodes that were not fit to serve; beyond them those go that were forgotten first."""
UNFIT_STATES = (NodeState.QUARANTINED, NodeState.REPAIR)
"""States from which only a probe leads back to service. Who was lost, or is held, on that way has a course."""
FLEET = "fleet"


def schedule_retention(transition: Transition, wait_s: float = CHECK_INTERVAL_S) -> None:
    """Asks for the next look, where policy wants any."""
    policy = transition.policy
    if policy.forget_nodes_after_s or policy.forget_jobs_after_s or policy.end_abandoned_jobs_after_s:
        transition.schedule(transition.now + wait_s, "retention", FLEET)


def apply_retention(transition: Transition) -> None:
    """Forgets what is older than policy keeps. Not while the database is away: it would have to be done again."""
    jobs = nodes = 0
    if not transition.state.database_outage:
        _end_abandoned_jobs(transition)
        jobs, nodes = _forget_old_jobs(transition), _forget_old_nodes(transition)
    schedule_retention(transition, RETRY_S if MAX_PER_CHECK in (jobs, nodes) else CHECK_INTERVAL_S)


# --- nodes -------------------------------------------------------------------------------------------------------


def reason_to_keep(state: FleetState, node: str) -> str:
    """What speaks against forgetting the node, in words and with the mend; empty where nothing does."""
    if node in state.reachable:
        return f"{node} is heard: end its agent first, else it would be back at once"
    for job in state.jobs.values():
        if job.state in ENDED_STATES:
            continue
        if is_seated(job, node):
            return f"{node} is in the roster of {job.job}, which is {job.state}: stop the job, or let it go on without"
        if job.version_locations is not None and node in job.version_locations.shares:
            return f"{node} may hold a share of what {job.job} has committed: wait for its next commit, or stop the job"
    busy = (*(probe.nodes for probe in state.probes.values()), *(case.suspects for case in state.blame_cases.values()))
    if any(node in those for those in busy):
        return f"a probe of {node} is under way: wait until it has ended"
    return ""


def _forget_old_nodes(transition: Transition) -> int:
    """How many were forgotten."""
    state, after_s = transition.state, transition.policy.forget_nodes_after_s
    if not after_s:
        return 0
    old = [n for n, one in state.nodes.items() if _may_expire(one) and transition.now - _gone_since(one) >= after_s]
    found = [node for node in old if not reason_to_keep(state, node)][:MAX_PER_CHECK]
    for node in found:
        days = (transition.now - _gone_since(state.nodes[node])) / 86400
        forget_node(transition, node, f"{node} was not heard for {days:.1f} days and is forgotten")
    return len(found)


def _may_expire(record: NodeRecord) -> bool:
    """Whether time alone ends it. What a person has said of a node, or must say, stays until a person ends it."""
    if (
        record.reachable
        or record.hold_reason
        or record.external_cordon_by
        or record.needs_operator
        or record.defective_gpus
    ):
        return False
    return record.state in (NodeState.LOST, NodeState.QUARANTINED)


def _gone_since(record: NodeRecord) -> float:
    return max(record.lost_at, record.since)


def forget_node(transition: Transition, node: str, sentence: str) -> None:
    """Drops all that is known of a node that nothing keeps (``why_kept``); its lines in the audit log stay."""
    state, record = transition.state, transition.state.nodes[node]
    drop_deferral(transition, node)
    node_state.uncordon(transition, node, sentence)
    _keep_unfit(transition, record)
    transition.audit("node.forgotten", sentence, node=node)
    for key in (*record.agent_findings, *record.controller_findings):
        transition.emit(RecordFindingCleared(node, key, transition.now))
    for job in state.jobs.values():
        _remove_from_job(transition, job, node)
    if any(window.node == node for window in state.fleet.maintenance_windows):
        state.fleet.maintenance_windows = [window for window in state.fleet.maintenance_windows if window.node != node]
        transition.mark_fleet_changed()
    for seen in state.sightings.values():
        seen.pop(node, None)
    for waiting in state.outbreaks.values():
        waiting.pop(node, None)
    job_index.node_forgotten(state, node)
    del state.nodes[node], state.node_runtime[node]
    transition.delete_node(node)


def _keep_unfit(transition: Transition, record: NodeRecord) -> None:
    """Keeps that the node was not fit to serve, should anything register under its name."""
    if record.state not in UNFIT_STATES and record.readmission_plan is None and not record.defective_gpus:
        return
    unfit, course = transition.state.fleet.unfit_nodes, record.readmission_plan or ReadmissionPlan()
    unfit.pop(record.node, None)
    unfit[record.node] = UnfitNode(
        sentence=f"{record.node} was forgotten while it was out of service ({record.sentence})",
        diagnostics=course.required_diagnostics,
        required_passes=course.required_passes,
        defective_gpus=tuple(record.defective_gpus),
    )
    while len(unfit) > MAX_UNFIT_NODES:
        del unfit[next(iter(unfit))]
    transition.mark_fleet_changed()


def _remove_from_job(transition: Transition, job: JobRecord, node: str) -> None:
    """The job knows the node no more. One that counts it among the homes of a version is over, and keeps none."""
    shares = job.version_locations.shares if job.version_locations is not None else {}
    if not any(
        node in place
        for place in (
            job.launchers,
            job.excluded_nodes,
            job.rank_loss_times,
            job.replaced_stragglers,
            job.former_nodes,
            shares,
        )
    ):
        return
    job.launchers.pop(node, None)
    for place in (job.excluded_nodes, job.rank_loss_times, job.replaced_stragglers):
        place.pop(node, None)
    job.former_nodes = [other for other in job.former_nodes if other != node]
    if job.version_locations is not None and node in job.version_locations.shares:
        job.version_locations = None
    transition.mark_job_changed(job.job)


# --- jobs --------------------------------------------------------------------------------------------------------


def _end_abandoned_jobs(transition: Transition) -> None:
    """Ends jobs that do not run, whose launchers have all left, and that nobody went on with in time: they keep memory
    of their nodes taken. One whose launchers are only out of reach may be running there."""
    after_s = transition.policy.end_abandoned_jobs_after_s
    for job in transition.state.jobs.values() if after_s else ():
        deserted = job.state in (JobState.FORMING, JobState.PAUSED) and not job.launchers
        if deserted and transition.now - max(job.since, job.abandoned_at) >= after_s:
            sentence = f"all its launchers have left, and none came for {after_s / 3600:g} h: its memory is given back"
            fail_job(transition, job, sentence)


def _forget_old_jobs(transition: Transition) -> int:
    """How many were forgotten."""
    state, after_s = transition.state, transition.policy.forget_jobs_after_s
    if not after_s:
        return 0
    old = [j for j, one in state.jobs.items() if one.state in ENDED_STATES and transition.now - one.since >= after_s]
    for name in old[:MAX_PER_CHECK]:
        _forget_job(transition, name)
    return len(old[:MAX_PER_CHECK])


def _forget_job(transition: Transition, name: str) -> None:
    job = transition.state.jobs[name]
    days = (transition.now - job.since) / 86400
    job_index.drop_job(transition, name, f"job {name} {job.state} {days:.1f} days ago and is forgotten")
