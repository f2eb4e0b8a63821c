"""Take back nodes and launchers that return: after a loss, a restart of their agent, or a start of this controller."""

from __future__ import annotations

import msgspec

from everstep.vocabulary import JobState, NodeState
from everstep_controller.core.health.quarantine import begin_probation
from everstep_controller.core.jobs.losses import remove_launcher
from everstep_controller.core.liveness import correlation
from everstep_controller.core.liveness.peer_loss import regroup_with_evidence
from everstep_controller.core.records import JobRecord
from everstep_controller.core.seats.job_index import offer_to_jobs
from everstep_controller.core.state import FLEET, DeadlineKind
from everstep_controller.core.transition import Transition


def handle_return(transition: Transition, node: str) -> None:
    """Count a lost node as reachable again; one that was in service goes on probation."""
    record = transition.state.nodes[node]
    record.liveness.reachable = True
    correlation.add_expected(transition.state, node)
    correlation.update_correlated_silence(transition)
    transition.mark_node_changed(node)
    if record.state is NodeState.LOST:
        begin_probation(transition, node, f"{node} reports again")
    else:
        transition.log_event("node.returned", f"{node} reports again; its state stays {record.state}", node=node)
        transition.schedule_node(transition.now, node)  # the quarantine may have ended during the absence


def handle_first_contact(transition: Transition, node: str) -> None:
    """Handle the first message of a node that this controller receives; jobs may be waiting for it."""
    state = transition.state
    state.rejoin_window.unseen_nodes.discard(node)
    if transition.now < state.rejoin_window.ends_at:  # more nodes are on their way
        quiet_until = transition.now + transition.policy.liveness.rejoin_window_quiet_s
        ends_at = min(quiet_until, state.rejoin_window.latest_end)
        state.rejoin_window.ends_at = max(state.rejoin_window.ends_at, ends_at)
    for name in state.node_runtime[node].open_jobs:
        job, pending = state.jobs[name], state.job_runtime[name].regroup.pending
        if (
            pending is not None
            and pending.reason is not None
            and not state.rejoin_window.unseen_nodes.intersection(job.seats)
        ):
            state.job_runtime[name].regroup.pending = msgspec.structs.replace(pending, due=transition.now)
            transition.schedule_job(transition.now, name)
        elif _can_take_nodes(job):
            offer_to_jobs(transition, node)


def _can_take_nodes(job: JobRecord) -> bool:
    if job.is_running:
        return len(job.seats) < job.max_seats
    return job.status.state in (JobState.FORMING, JobState.PAUSED)


def end_rejoin_window(transition: Transition) -> None:
    """Treat nodes that have not returned by now as suspect, for jobs with a witness."""
    if transition.now < transition.state.rejoin_window.ends_at:  # more nodes came meanwhile
        transition.schedule(transition.state.rejoin_window.ends_at, DeadlineKind.REJOIN_WINDOW, FLEET)
        return
    for node in sorted(transition.state.rejoin_window.unseen_nodes):
        regroup_with_evidence(transition, node)


def expect_launchers(transition: Transition, node: str) -> None:
    """After an agent's restart, expect its launchers of unfinished jobs to rejoin within a grace."""
    live = transition.state.node_runtime[node]
    unconfirmed = False
    for name in live.open_jobs:
        job = transition.state.jobs[name]
        launcher = job.membership.launchers.get(node)
        if launcher is not None:
            launcher.has_rejoined, unconfirmed = False, True
            transition.mark_job_changed(name)
    if unconfirmed:
        live.launcher_rejoin_due = transition.now + transition.policy.liveness.launcher_rejoin_grace_s
        transition.schedule_node(live.launcher_rejoin_due, node)


def drop_launchers(transition: Transition, node: str, sentence: str, *, include_rejoined: bool) -> None:
    """Drop the node's launchers that have not rejoined; all of them if ``include_rejoined``."""
    for name in transition.state.node_runtime[node].jobs:
        job = transition.state.jobs[name]
        launcher = job.membership.launchers.get(node)
        if launcher is not None and (include_rejoined or not launcher.has_rejoined):
            remove_launcher(transition, job, node, sentence)
