"""Suspect nodes that other vaults have lost, and let jobs with a witness continue without the suspects.

A witness is a report of another node or rank that fits the silence. It shortens the wait for the silent node.
"""

from __future__ import annotations

from everstep.vocabulary import NodeState
from everstep.wire.v1.training import PeerConnectionLost
from everstep_controller.core.health.node_state import set_state
from everstep_controller.core.jobs.losses import regroup_without_missing
from everstep_controller.core.liveness import correlation
from everstep_controller.core.liveness.suspicion import suspect_timeout_after_peer_loss_s
from everstep_controller.core.records import JobRecord
from everstep_controller.core.seats.membership import jobs_seated_on
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import join_names


def handle_peer_lost(transition: Transition, job: JobRecord, node: str, report: PeerConnectionLost) -> None:
    """Handle a vault's report that it lost another node's vault: a hint that shortens the wait for a silent node."""
    state, peer = transition.state, report.peer
    strangers = peer == node or peer not in state.liveness.reachable_nodes
    if strangers or any(job.job not in state.node_runtime[member].jobs for member in (node, peer)):
        transition.count_ignored("peer_connection_lost.not_a_member")
        return
    before = _current_peer_reports(transition, peer)
    state.node_runtime[peer].peer_loss_reports[node] = transition.now
    if node not in before:
        detail = f" ({report.detail})" if report.detail else ""
        sentence = f"the vault on {node} lost its connection to the vault on {peer}{detail}"
        transition.log_event("peer.lost", sentence, node=peer, job=job.job, generation=job.progress.last_number)
    weigh_peer_reports(transition, peer)


def _current_peer_reports(transition: Transition, node: str) -> list[str]:
    """Return the nodes whose vaults have lost this node's vault since its last message."""
    reporting_nodes = transition.state.node_runtime[node].peer_loss_reports
    if not reporting_nodes:
        return []
    heard_at = transition.read_heartbeats(node).last_seen_at
    return sorted(other for other, at in reporting_nodes.items() if at > heard_at)


def weigh_peer_reports(transition: Transition, node: str) -> None:
    """Suspect a node once its next heartbeat is overdue, given enough reports, or one and a failure in its job."""
    record = transition.state.nodes[node]
    reporting_nodes = _current_peer_reports(transition, node)
    if not reporting_nodes:
        return
    if node in transition.state.liveness.silent_nodes:
        regroup_with_evidence(transition, node)
        return
    running = (job for job in jobs_seated_on(transition.state, node) if job.is_running)
    failing = any(_job_failure(transition, job) or not _has_resumed(job) for job in running)
    if record.state is not NodeState.HEALTHY or (
        len(reporting_nodes) < transition.policy.liveness.min_peer_witnesses and not failing
    ):
        return
    heartbeats = transition.read_heartbeats(node)
    timeout_s = suspect_timeout_after_peer_loss_s(transition.policy, heartbeats.longest_pause_s)
    due = heartbeats.silent_since + timeout_s + transition.state.controller_lag.seconds
    if transition.now < due:
        transition.schedule_node(due, node)
    else:
        suspect(transition, node, f"{describe_silence(transition, node)}, and {_describe_peer_loss(reporting_nodes)}")


def _describe_peer_loss(reporting_nodes: list[str]) -> str:
    vaults = "vault" if len(reporting_nodes) == 1 else "vaults"
    return f"the {vaults} on {join_names(reporting_nodes)} cannot reach its vault"


def suspect(transition: Transition, node: str, sentence: str) -> None:
    """Suspect a healthy node, and let jobs with a witness continue without it."""
    correlation.set_silent(transition, node, True)
    if transition.state.nodes[node].state is NodeState.HEALTHY:
        set_state(transition, node, NodeState.SUSPECT, sentence)
        correlation.log_unless_correlated(transition, "node.suspect", node, sentence)
    regroup_with_evidence(transition, node)


def describe_silence(transition: Transition, node: str) -> str:
    """Return for how long the node has sent nothing."""
    silent_s = transition.now - transition.read_heartbeats(node).silent_since
    if node in transition.state.rejoin_window.unseen_nodes:
        return f"{node} has sent no message since this controller started, {silent_s:.1f} s ago"
    return f"{node} has sent no message for {silent_s:.1f} s"


def regroup_with_evidence(transition: Transition, node: str) -> None:
    """Regroup jobs in which another witness reports a missing rank, without waiting for the end of the grace."""
    for job in jobs_seated_on(transition.state, node):
        if job.is_running and (witness := _find_missing_evidence(transition, job, node)):
            regroup_without_missing(transition, job, witness)


def _job_failure(transition: Transition, job: JobRecord) -> str:
    """Return what went wrong according to the job's ranks; "" if nothing did."""
    live = transition.state.job_runtime[job.job]
    if live.regroup.failed_collective_ranks:
        return f"a collective of rank {min(live.regroup.failed_collective_ranks)} failed"
    return f"rank {waiting} is stalled" if (waiting := live.regroup.waiting_rank) is not None else ""


def _find_missing_evidence(transition: Transition, job: JobRecord, node: str) -> str:
    """Return what in the job indicates that the suspect ``node`` is missing; "" if nothing does."""
    if failure := _job_failure(transition, job):
        return failure
    spec, settle_s = job.running_generation, transition.policy.regroups.collective_settle_s
    due = _unresponsive_since(transition, node) + settle_s
    if transition.now < due:
        transition.schedule_node(due, node)
        return ""
    if reporting_nodes := _current_peer_reports(transition, node):
        return _describe_peer_loss(reporting_nodes)
    if _has_resumed(job) or spec is None:
        return ""
    if transition.now < job.progress.opened_at + settle_s:
        transition.schedule_node(job.progress.opened_at + settle_s, node)
        return ""
    return f"generation {spec.number} has not resumed"


def _has_resumed(job: JobRecord) -> bool:
    return job.progress.resumed_at is not None or job.outgoing_generation is not None


def _unresponsive_since(transition: Transition, node: str) -> float:
    gone_at = transition.state.node_runtime[node].disconnected_at
    if gone_at is not None:
        return gone_at
    state = transition.state
    return state.nodes[node].since if node in state.liveness.silent_nodes else state.rejoin_window.ends_at
