"""Track node liveness from heartbeats and connections: suspect before lost.

The controller's own lag lengthens each wait. Messages of other incarnations than the registered one are dropped before
they come here.
"""

from __future__ import annotations

from everstep.vocabulary import NodeState
from everstep_controller.core.health.node_state import is_held_by_notice_alone, set_state
from everstep_controller.core.health.quarantine import reconsider_probation, reconsider_quarantine
from everstep_controller.core.liveness import correlation
from everstep_controller.core.liveness.flapping import record_loss
from everstep_controller.core.liveness.peer_loss import (
    describe_silence,
    regroup_with_evidence,
    suspect,
    weigh_peer_reports,
)
from everstep_controller.core.liveness.rejoin import drop_launchers, handle_first_contact, handle_return
from everstep_controller.core.liveness.suspicion import (
    Liveness,
    classify_silence,
    loss_timeout_s,
    record_message,
    suspect_timeout_s,
)
from everstep_controller.core.seats.job_index import offer_to_jobs
from everstep_controller.core.seats.membership import jobs_seated_on
from everstep_controller.core.state import DeadlineKind
from everstep_controller.core.transition import Transition


def schedule_silence_deadline(transition: Transition, node: str) -> None:
    """Queue the node's silence deadline, unless one is queued already."""
    if not transition.state.node_runtime[node].has_silence_deadline:
        heartbeats = transition.read_heartbeats(node)
        timeout_s = suspect_timeout_s(transition.policy, heartbeats.longest_pause_s)
        _watch_until(transition, node, heartbeats.silent_since + timeout_s)


def _watch_until(transition: Transition, node: str, due: float) -> None:
    transition.state.node_runtime[node].has_silence_deadline = True
    transition.schedule(due, DeadlineKind.SILENCE, node)


def mark_seen(transition: Transition, node: str) -> None:
    """Note that the node is alive, and clear every suspicion from its silence."""
    state = transition.state
    record, live = state.nodes[node], state.node_runtime[node]
    record_message(transition.policy, state.observer, live.heartbeats, transition.now)
    live.disconnected_at, live.peer_loss_reports = None, {}
    correlation.set_silent(transition, node, False)
    schedule_silence_deadline(transition, node)
    if record.state is NodeState.SUSPECT:
        set_state(transition, node, NodeState.HEALTHY, f"{node} sent a message again and is no longer suspected")
        correlation.log_unless_correlated(transition, "node.suspicion_cleared", node, record.sentence)
        offer_to_jobs(transition, node)
    if not record.liveness.reachable:
        handle_return(transition, node)
    elif record.state is NodeState.PROBATION:
        transition.seen_on_probation[node] = None
    elif record.state is NodeState.QUARANTINED:
        reconsider_quarantine(transition, node)
    if node in state.rejoin_window.unseen_nodes:
        handle_first_contact(transition, node)


def handle_disconnected(transition: Transition, node: str) -> None:
    """Handle a closed connection. Jobs with a witness continue without the node at once; others wait for the grace."""
    record, live = transition.state.nodes[node], transition.state.node_runtime[node]
    if live.disconnected_at is not None or not record.liveness.reachable:
        return
    live.disconnected_at = transition.now
    correlation.set_silent(transition, node, True)
    sentence = f"the connection of {node} closed"
    grace_s = transition.policy.liveness.disconnect_grace_s
    if record.state is NodeState.HEALTHY:
        why = f"{sentence}; it is lost unless it reconnects within {grace_s:g} s"
        set_state(transition, node, NodeState.SUSPECT, why)
    correlation.log_unless_correlated(transition, "node.disconnected", node, sentence)
    transition.schedule_node(transition.now + transition.policy.regroups.collective_settle_s, node)
    transition.schedule_node(transition.now + (grace_s + transition.state.controller_lag.seconds), node)
    regroup_with_evidence(transition, node)


def handle_silence_deadline(transition: Transition, node: str) -> bool:
    """Act on the node's silence at its deadline. Return whether the node had only been heard in time."""
    transition.state.node_runtime[node].has_silence_deadline = False
    if not transition.state.nodes[node].liveness.reachable:
        return True
    answer, due = _judge_silence(transition, node)
    if transition.state.nodes[node].liveness.reachable:
        _watch_until(transition, node, due)
    return answer is Liveness.PRESENT


def _judge_silence(transition: Transition, node: str) -> tuple[Liveness, float]:
    """Act on the meaning of the node's silence. Return it with the time at which it may change."""
    policy, heartbeats = transition.policy, transition.read_heartbeats(node)
    slack_s = transition.state.controller_lag.seconds
    answer = classify_silence(policy, heartbeats.longest_pause_s, transition.now - heartbeats.silent_since - slack_s)
    if answer is Liveness.PRESENT:
        return answer, heartbeats.silent_since + suspect_timeout_s(policy, heartbeats.longest_pause_s) + slack_s
    if answer is Liveness.SUSPECT:
        suspect(transition, node, describe_silence(transition, node))
        return answer, heartbeats.silent_since + loss_timeout_s(policy, heartbeats.longest_pause_s) + slack_s
    correlation.set_silent(transition, node, True)
    if correlation.is_silence_excused(transition, node, heartbeats.silent_since):
        suspect(transition, node, describe_silence(transition, node))  # no-op unless a late Tick skipped it
        return answer, correlation.excused_until(transition, heartbeats.silent_since)
    gone_at = transition.state.node_runtime[node].disconnected_at
    why = describe_silence(transition, node) if gone_at is None else _describe_disconnect(transition, node, gone_at)
    declare_lost(transition, node, why)
    return answer, transition.now


def handle_node_deadline(transition: Transition, node: str) -> None:
    """Act on a node's other deadlines: grace after a disconnection, quarantine, and witnesses that may now count."""
    record, live = transition.state.nodes[node], transition.state.node_runtime[node]
    if live.launcher_rejoin_due is not None and transition.now >= live.launcher_rejoin_due:
        live.launcher_rejoin_due = None
        why = f"the launcher on {node} did not rejoin after its agent's restart"
        drop_launchers(transition, node, why, include_rejoined=False)
    if live.disconnected_at is not None and record.liveness.reachable:
        _end_disconnect_grace(transition, node, live.disconnected_at)
    elif node in transition.state.liveness.silent_nodes:
        _judge_silence(transition, node)
        regroup_with_evidence(transition, node)
    elif record.state is NodeState.QUARANTINED:
        reconsider_quarantine(transition, node)
    elif record.state is NodeState.PROBATION:
        reconsider_probation(transition, node)
    else:
        weigh_peer_reports(transition, node)


def _end_disconnect_grace(transition: Transition, node: str, disconnected_at: float) -> None:
    due = disconnected_at + transition.policy.liveness.disconnect_grace_s + transition.state.controller_lag.seconds
    if transition.now < due:
        regroup_with_evidence(transition, node)
        transition.schedule_node(due, node)
    elif correlation.is_silence_excused(transition, node, disconnected_at):
        regroup_with_evidence(transition, node)
        transition.schedule_node(correlation.excused_until(transition, disconnected_at), node)
    else:
        declare_lost(transition, node, _describe_disconnect(transition, node, disconnected_at))


def _describe_disconnect(transition: Transition, node: str, disconnected_at: float) -> str:
    return f"{node} did not reconnect within {transition.now - disconnected_at:.1f} s after its connection closed"


def declare_lost(transition: Transition, node: str, sentence: str) -> None:
    """Declare the node lost, which blames no node. Its jobs continue without it at the end of this event."""
    state = transition.state
    record = state.nodes[node]
    record_loss(transition, node, sentence)
    record.liveness.reachable, record.liveness.lost_at = False, transition.now
    # A replay omits the silence deadline that passes while the node is away, so its return always queues a new one.
    state.node_runtime[node].has_silence_deadline = False
    correlation.remove_expected(transition, node)
    state.rejoin_window.unseen_nodes.discard(node)
    if record.state in (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION):
        set_state(transition, node, NodeState.LOST, sentence)
    elif is_held_by_notice_alone(record):  # reclaimed, so that its record may expire
        set_state(transition, node, NodeState.LOST, f"{sentence}; {record.scheduling.notice_reason}")
    transition.mark_node_changed(node)
    transition.log_event("node.lost", sentence, node=node)
    for job in jobs_seated_on(state, node):
        if job.is_running:
            transition.lost_nodes_by_job.setdefault(job.job, {})[node] = sentence
