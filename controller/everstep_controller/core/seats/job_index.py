"""Index the jobs that want a node and the job that computes on it, to avoid a search through all jobs.

``NodeRuntime.jobs``, ``NodeRuntime.open_jobs`` and ``FleetState.job_by_node`` follow from the jobs' records. Code that
changes a job's launchers, state or roster calls this module, which also offers nodes to the jobs that want one.
"""

from __future__ import annotations

from everstep.ids import JobId, NodeId
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import Transition


def index_launcher(state: FleetState, job: JobRecord, node: NodeId) -> None:
    """Note that a launcher on ``node``, which the record already contains, offers the node to the job."""
    if len(job.membership.launchers) == 1:
        # the last launcher may have been on another node, which still counts the job
        _close(state, job.job)
    live = state.node_runtime[node]
    live.jobs[job.job] = None
    live.open_jobs[job.job] = None
    state.job_runtime[job.job].nodes[node] = None


def unindex_launcher(state: FleetState, job: JobRecord, node: NodeId) -> None:
    """Note that the launcher on ``node`` is gone. A job's last launcher leaves the job in the node's index."""
    if job.membership.launchers:
        state.node_runtime[node].open_jobs.pop(job.job, None)


def update_roster(state: FleetState, job: JobRecord) -> None:
    """Note that the job's state, roster or outgoing roster may have changed. O(nodes of the job)."""
    live, owners = state.job_runtime[job.job], state.job_by_node
    owns = frozenset(job.all_seats if job.is_running else ())
    for node in live.owned_nodes - owns:
        if owners.get(node) == job.job:
            del owners[node]
    for node in owns - live.owned_nodes:
        owners[node] = job.job
    live.owned_nodes = owns


def close_ended_job(state: FleetState, job: JobRecord) -> None:
    """Note that the job has ended."""
    update_roster(state, job)
    _close(state, job.job)


def _close(state: FleetState, name: JobId) -> None:
    for node in state.job_runtime[name].nodes:
        state.node_runtime[node].open_jobs.pop(name, None)


def restore_job(state: FleetState, job: JobRecord) -> None:
    """Index a restored job, after all nodes are restored."""
    for node in (*job.membership.launchers, *job.all_seats):
        if node in state.node_runtime:
            state.node_runtime[node].jobs[job.job] = None
            state.job_runtime[job.job].nodes[node] = None
    for node in job.membership.launchers if not job.is_ended else ():
        if node in state.node_runtime:
            state.node_runtime[node].open_jobs[job.job] = None
    update_roster(state, job)


def drop_job(transition: Transition, name: JobId, sentence: str) -> None:
    """Forget a job that is not running. ``sentence`` is the reason for the event log."""
    state = transition.state
    transition.log_event("job.forgotten", sentence, job=name)
    _close(state, name)
    for node in state.job_runtime[name].nodes:
        state.node_runtime[node].jobs.pop(name, None)
    state.evictions.node_shortages.pop(name, None)
    del state.jobs[name], state.job_runtime[name]
    transition.delete_job(name)


def remove_node(state: FleetState, node: NodeId) -> None:
    """Drop a node without work from the index, before the state forgets the node."""
    for name in state.node_runtime[node].jobs:
        state.job_runtime[name].nodes.pop(node, None)


def offer_to_jobs(transition: Transition, node: str) -> None:
    """Offer a newly usable node to the jobs that want one. Each is checked once at the next Tick."""
    for name in transition.state.node_runtime[node].open_jobs:
        live = transition.state.job_runtime[name]
        if live.regroup.node_offered_at is None:
            live.regroup.node_offered_at = transition.now
            transition.schedule_job(transition.now, name)


def clear_exclusion(transition: Transition, job_id: str, node: str) -> None:
    """Clear the job's lost ranks, exclusion and straggler mark for the node."""
    job = transition.state.jobs[job_id]
    job.membership.excluded_nodes.pop(node, None)
    job.failures.rank_loss_times.pop(node, None)
    job.membership.replaced_stragglers.pop(node, None)
    transition.mark_job_changed(job_id)


def wake_competing_jobs(transition: Transition, job: JobRecord) -> None:
    """Schedule an immediate check of other jobs that want this job's nodes, after its seats or claims changed."""
    runtime = transition.state.node_runtime
    nodes = {*job.membership.launchers, *job.membership.former_nodes, *job.seats} & runtime.keys()
    for name in sorted({name for node in nodes for name in runtime[node].open_jobs} - {job.job}):
        transition.schedule_job(transition.now, name)
