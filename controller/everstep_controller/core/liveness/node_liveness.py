"""Track node liveness from heartbeats and witnesses: suspect before lost.

Witnesses shorten the wait, and the controller's own lag lengthens it. Messages of other incarnations than the
registered one are dropped before they come here.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from everstep.vocabulary import FindingKind, JobState, NodeState, Severity
from everstep.wire.v1.training import PeerConnectionLost
from everstep_controller.core.health.node_state import out_of_service_reason, set_state
from everstep_controller.core.health.offences import clear_controller_findings, raise_controller_finding
from everstep_controller.core.health.outbreaks import common_cause
from everstep_controller.core.health.quarantine import begin_probation, check_probation, check_quarantine
from everstep_controller.core.jobs.job_index import offer_to_jobs
from everstep_controller.core.jobs.losses import regroup_without_missing, remove_launcher
from everstep_controller.core.jobs.membership import jobs_seated_on
from everstep_controller.core.liveness import correlation
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import IN_SERVICE, JobRecord, NodeRecord
from everstep_controller.core.state import FLEET, DeadlineKind, HeartbeatState, ObserverState
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import join_names

# Suspicion: classify a node's silence by its longest recent pause.
#
# A healthy node has a steady heartbeat and, now and then, a pause: its agent was starved, swapped or stopped by a
# debugger. Such pauses are rare and long, and do not follow a bell curve; mean and deviation forget them in between. If
# pauses are alike over time, the next of n is longer than all before with probability 1/(n + 1), whatever their
# distribution. A node is therefore suspected after twice its longest recent pause, within the policy's bounds.
#
# The end of a TCP connection is the fast signal of a death. Silence only has to reveal a cut power line or network, so
# the deadline may be slow, and must not be wrong. The observer applies the same measure to itself: if no node at all
# was heard for longer than any node is allowed, the observer was deaf, and all silences restart.

PAUSE_MARGIN = 2.0
"""Multiple of the longest pause that makes a silence suspect. The next pause may be the longest yet, but hardly by that
much."""
PAUSE_MARGIN_AFTER_PEER_LOSS = 1.5
"""The same multiple for a node that other nodes have lost."""
PAUSE_DECAY_S = 600.0
"""Time constant in seconds for the decay of pauses; a job that pauses its agents does so again within minutes."""


class Liveness(Enum):
    """Meaning of a silence."""

    PRESENT = "present"
    SUSPECT = "suspect"
    LOST = "lost"


def record_message(policy: CorePolicy, observer: ObserverState, heartbeats: HeartbeatState, now: float) -> None:
    """Record a message: the node's silence ends, and the pause before it is learned. Runs for every heartbeat."""
    if now - observer.last_received_at > observer_stall_s(policy):
        observer.receiving_since = now
    observer.last_received_at = now
    began = heartbeats.last_seen_at if heartbeats.last_seen_at > observer.receiving_since else observer.receiving_since
    if now > began:
        pause_s = min(now - began, policy.suspect_after_max_s / PAUSE_MARGIN)
        heartbeats.longest_pause_s = decayed_longest_pause_s(heartbeats.longest_pause_s, pause_s)
    heartbeats.last_seen_at = now


def decayed_longest_pause_s(longest_s: float, pause_s: float) -> float:
    """Return the longest recent pause after one more; earlier ones decay with ``PAUSE_DECAY_S``."""
    return max(pause_s, longest_s * (1.0 - pause_s / PAUSE_DECAY_S))


def observer_stall_s(policy: CorePolicy) -> float:
    """Return half the minimum suspicion timeout: longer than any heartbeat interval (the settings ensure it)."""
    return policy.suspect_after_s / 2


def suspect_timeout_s(policy: CorePolicy, longest_pause_s: float) -> float:
    """Return the seconds of silence after which a node is suspected."""
    return min(max(PAUSE_MARGIN * longest_pause_s, policy.suspect_after_s), policy.suspect_after_max_s)


def suspect_timeout_after_peer_loss_s(policy: CorePolicy, longest_pause_s: float) -> float:
    """Return the same seconds for a node that others have lost, whose next heartbeat is overdue."""
    timeout_s = max(PAUSE_MARGIN_AFTER_PEER_LOSS * longest_pause_s, policy.suspect_after_peer_loss_s)
    return min(timeout_s, suspect_timeout_s(policy, longest_pause_s))


def loss_timeout_s(policy: CorePolicy, longest_pause_s: float) -> float:
    """Return the seconds of silence after which a node is lost."""
    return suspect_timeout_s(policy, longest_pause_s) + policy.lost_after_s - policy.suspect_after_s


def classify_silence(policy: CorePolicy, longest_pause_s: float, silent_s: float) -> Liveness:
    """Return the meaning of ``silent_s`` seconds of silence for a node with the given longest recent pause."""
    if silent_s < suspect_timeout_s(policy, longest_pause_s):
        return Liveness.PRESENT
    return Liveness.SUSPECT if silent_s < loss_timeout_s(policy, longest_pause_s) else Liveness.LOST


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
        _audit_unless_correlated(transition, "node.suspicion_cleared", node, record.sentence)
        offer_to_jobs(transition, node)
    if not record.liveness.reachable:
        _handle_return(transition, node)
    elif record.state is NodeState.PROBATION:
        transition.seen_on_probation[node] = None
    elif record.state is NodeState.QUARANTINED:
        check_quarantine(transition, node)
    if node in state.unseen_nodes:
        _handle_first_contact(transition, node)


def _handle_return(transition: Transition, node: str) -> None:
    record = transition.state.nodes[node]
    record.liveness.reachable = True
    correlation.add_expected(transition.state, node)
    correlation.update_correlated_silence(transition)
    transition.mark_node_changed(node)
    if record.state is NodeState.LOST:
        begin_probation(transition, node, f"{node} reports again")
    else:
        transition.audit("node.returned", f"{node} reports again; its state stays {record.state}", node=node)
        transition.schedule_node(transition.now, node)  # the quarantine may have ended during the absence


def _audit_unless_correlated(transition: Transition, kind: str, node: str, sentence: str) -> None:
    """Log a change of one node; during a correlated silence its own log entries cover all nodes."""
    if transition.state.correlated_silence is None:
        transition.audit(kind, sentence, node=node)


# Start of this controller


def _handle_first_contact(transition: Transition, node: str) -> None:
    """Handle the first message of a node that this controller receives; jobs may be waiting for it."""
    state = transition.state
    state.unseen_nodes.discard(node)
    if transition.now < state.rejoin_window_ends_at:  # more nodes are on their way
        quiet_until = transition.now + transition.policy.rejoin_window_quiet_s
        ends_at = min(quiet_until, state.rejoin_window_latest_at)
        state.rejoin_window_ends_at = max(state.rejoin_window_ends_at, ends_at)
    for name in state.node_runtime[node].open_jobs:
        job, pending = state.jobs[name], state.job_runtime[name].regroup.pending
        if pending is not None and pending.reason is not None and not state.unseen_nodes.intersection(job.seats):
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
    if transition.now < transition.state.rejoin_window_ends_at:  # more nodes came meanwhile
        transition.schedule(transition.state.rejoin_window_ends_at, DeadlineKind.REJOIN_WINDOW, FLEET)
        return
    for node in sorted(transition.state.unseen_nodes):
        _regroup_with_evidence(transition, node)


def handle_disconnected(transition: Transition, node: str) -> None:
    """Handle a closed connection. Jobs with a witness continue without the node at once; others wait for the grace."""
    record, live = transition.state.nodes[node], transition.state.node_runtime[node]
    if live.disconnected_at is not None or not record.liveness.reachable:
        return
    live.disconnected_at = transition.now
    correlation.set_silent(transition, node, True)
    sentence = f"the connection of {node} closed"
    grace_s = transition.policy.disconnect_grace_s
    if record.state is NodeState.HEALTHY:
        why = f"{sentence}; it is lost unless it reconnects within {grace_s:g} s"
        set_state(transition, node, NodeState.SUSPECT, why)
    _audit_unless_correlated(transition, "node.disconnected", node, sentence)
    transition.schedule_node(transition.now + transition.policy.collective_settle_s, node)
    transition.schedule_node(transition.now + (grace_s + transition.state.observer_lag_s), node)
    _regroup_with_evidence(transition, node)


# Witnesses


def handle_peer_lost(transition: Transition, job: JobRecord, node: str, report: PeerConnectionLost) -> None:
    """Handle a vault's report that it lost another node's vault: a hint that shortens the wait for a silent node."""
    state, peer = transition.state, report.peer
    strangers = peer == node or peer not in state.reachable_nodes
    if strangers or any(job.job not in state.node_runtime[one].jobs for one in (node, peer)):
        transition.count_ignored("peer_connection_lost.not_a_member")
        return
    before = _current_peer_reports(transition, peer)
    state.node_runtime[peer].peer_loss_reports[node] = transition.now
    if node not in before:
        detail = f" ({report.detail})" if report.detail else ""
        sentence = f"the vault on {node} lost its connection to the vault on {peer}{detail}"
        transition.audit("peer.lost", sentence, node=peer, job=job.job, generation=job.progress.last_number)
    _weigh_peer_reports(transition, peer)


def _current_peer_reports(transition: Transition, node: str) -> list[str]:
    """Return the nodes whose vaults have lost this node's vault since its last message."""
    reporting_nodes = transition.state.node_runtime[node].peer_loss_reports
    if not reporting_nodes:
        return []
    heard_at = transition.read_heartbeats(node).last_seen_at
    return sorted(other for other, at in reporting_nodes.items() if at > heard_at)


def _weigh_peer_reports(transition: Transition, node: str) -> None:
    """Suspect a node once its next heartbeat is overdue, given enough reports, or one and a failure in its job."""
    record = transition.state.nodes[node]
    reporting_nodes = _current_peer_reports(transition, node)
    if not reporting_nodes:
        return
    if node in transition.state.silent_nodes:
        _regroup_with_evidence(transition, node)
        return
    running = (job for job in jobs_seated_on(transition.state, node) if job.is_running)
    failing = any(_job_failure(transition, job) or not _has_resumed(job) for job in running)
    if record.state is not NodeState.HEALTHY or (
        len(reporting_nodes) < transition.policy.min_peer_witnesses and not failing
    ):
        return
    heartbeats = transition.read_heartbeats(node)
    timeout_s = suspect_timeout_after_peer_loss_s(transition.policy, heartbeats.longest_pause_s)
    due = heartbeats.silent_since + timeout_s + transition.state.observer_lag_s
    if transition.now < due:
        transition.schedule_node(due, node)
    else:
        _suspect(transition, node, f"{_describe_silence(transition, node)}, and {_describe_peer_loss(reporting_nodes)}")


def _describe_peer_loss(reporting_nodes: list[str]) -> str:
    vaults = "vault" if len(reporting_nodes) == 1 else "vaults"
    return f"the {vaults} on {join_names(reporting_nodes)} cannot reach its vault"


def _regroup_with_evidence(transition: Transition, node: str) -> None:
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
    spec, settle_s = job.running_generation, transition.policy.collective_settle_s
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
    return state.nodes[node].since if node in state.silent_nodes else state.rejoin_window_ends_at


# Deadlines


def check_silence(transition: Transition, node: str) -> bool:
    """Check the node at its silence deadline. Return whether the node had only been heard in time."""
    transition.state.node_runtime[node].has_silence_deadline = False
    if not transition.state.nodes[node].liveness.reachable:
        return True
    answer, due = _judge_silence(transition, node)
    if transition.state.nodes[node].liveness.reachable:
        _watch_until(transition, node, due)
    return answer is Liveness.PRESENT


def _judge_silence(transition: Transition, node: str) -> tuple[Liveness, float]:
    """Act on the meaning of the node's silence. Return it with the time at which it may change."""
    policy, heartbeats, slack_s = transition.policy, transition.read_heartbeats(node), transition.state.observer_lag_s
    answer = classify_silence(policy, heartbeats.longest_pause_s, transition.now - heartbeats.silent_since - slack_s)
    if answer is Liveness.PRESENT:
        return answer, heartbeats.silent_since + suspect_timeout_s(policy, heartbeats.longest_pause_s) + slack_s
    if answer is Liveness.SUSPECT:
        _suspect(transition, node, _describe_silence(transition, node))
        return answer, heartbeats.silent_since + loss_timeout_s(policy, heartbeats.longest_pause_s) + slack_s
    correlation.set_silent(transition, node, True)
    if correlation.is_silence_excused(transition, node, heartbeats.silent_since):
        _suspect(transition, node, _describe_silence(transition, node))  # no-op unless a late Tick skipped it
        return answer, correlation.excused_until(transition, heartbeats.silent_since)
    gone_at = transition.state.node_runtime[node].disconnected_at
    why = _describe_silence(transition, node) if gone_at is None else _describe_disconnect(transition, node, gone_at)
    declare_lost(transition, node, why)
    return answer, transition.now


def _describe_silence(transition: Transition, node: str) -> str:
    silent_s = transition.now - transition.read_heartbeats(node).silent_since
    if node in transition.state.unseen_nodes:
        return f"{node} has sent no message since this controller started, {silent_s:.1f} s ago"
    return f"{node} has sent no message for {silent_s:.1f} s"


def _suspect(transition: Transition, node: str, sentence: str) -> None:
    correlation.set_silent(transition, node, True)
    if transition.state.nodes[node].state is NodeState.HEALTHY:
        set_state(transition, node, NodeState.SUSPECT, sentence)
        _audit_unless_correlated(transition, "node.suspect", node, sentence)
    _regroup_with_evidence(transition, node)


def check_node(transition: Transition, node: str) -> None:
    """Check a node's other deadlines: grace after a disconnection, quarantine, and witnesses that may now count."""
    record, live = transition.state.nodes[node], transition.state.node_runtime[node]
    if live.launcher_rejoin_due is not None and transition.now >= live.launcher_rejoin_due:
        live.launcher_rejoin_due = None
        why = f"the launcher on {node} did not rejoin after its agent's restart"
        drop_launchers(transition, node, why, include_rejoined=False)
    if live.disconnected_at is not None and record.liveness.reachable:
        _check_disconnected(transition, node, live.disconnected_at)
    elif node in transition.state.silent_nodes:
        _judge_silence(transition, node)
        _regroup_with_evidence(transition, node)
    elif record.state is NodeState.QUARANTINED:
        check_quarantine(transition, node)
    elif record.state is NodeState.PROBATION:
        check_probation(transition, node)
    else:
        _weigh_peer_reports(transition, node)


def _check_disconnected(transition: Transition, node: str, disconnected_at: float) -> None:
    due = disconnected_at + transition.policy.disconnect_grace_s + transition.state.observer_lag_s
    if transition.now < due:
        _regroup_with_evidence(transition, node)
        transition.schedule_node(due, node)
    elif correlation.is_silence_excused(transition, node, disconnected_at):
        _regroup_with_evidence(transition, node)
        transition.schedule_node(correlation.excused_until(transition, disconnected_at), node)
    else:
        declare_lost(transition, node, _describe_disconnect(transition, node, disconnected_at))


def _describe_disconnect(transition: Transition, node: str, disconnected_at: float) -> str:
    return f"{node} did not reconnect within {transition.now - disconnected_at:.1f} s after its connection closed"


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
        live.launcher_rejoin_due = transition.now + transition.policy.launcher_rejoin_grace_s
        transition.schedule_node(live.launcher_rejoin_due, node)


def drop_launchers(transition: Transition, node: str, sentence: str, *, include_rejoined: bool) -> None:
    """Drop the node's launchers that have not rejoined; all of them if ``include_rejoined``."""
    for name in transition.state.node_runtime[node].jobs:
        job = transition.state.jobs[name]
        launcher = job.membership.launchers.get(node)
        if launcher is not None and (include_rejoined or not launcher.has_rejoined):
            remove_launcher(transition, job, node, sentence)


def declare_lost(transition: Transition, node: str, sentence: str) -> None:
    """Declare the node lost, which blames no node. Its jobs continue without it at the end of this event."""
    state = transition.state
    record = state.nodes[node]
    record_loss(transition, node, sentence)
    record.liveness.reachable, record.liveness.lost_at = False, transition.now
    # A replay omits the silence deadline that passes while the node is away, so its return always queues a new one.
    state.node_runtime[node].has_silence_deadline = False
    correlation.remove_expected(transition, node)
    state.unseen_nodes.discard(node)
    if record.state in (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION):
        set_state(transition, node, NodeState.LOST, sentence)
    transition.mark_node_changed(node)
    transition.audit("node.lost", sentence, node=node)
    for job in jobs_seated_on(state, node):
        if job.is_running:
            transition.lost_nodes_by_job.setdefault(job.job, {})[node] = sentence


# Flapping: a node that is lost repeatedly and returns by itself each time costs its job a regroup each time.
#
# Only losses of the node itself count: it was in service, and nothing indicated a fault of the network or of this
# controller. A loss that other nodes share at about the same time is withdrawn.

FLAPPING_SUBJECT = "node"
FLAPPING_KEY = f"{FindingKind.NODE_FLAPPING}/{FLAPPING_SUBJECT}"


def record_loss(transition: Transition, node: str, sentence: str) -> None:
    """Count a loss of the node's own, and raise a finding on a node that is lost too often."""
    record, policy = transition.state.nodes[node], transition.policy
    if not _counts_as_own_loss(transition, record):
        return
    since = transition.now - policy.node_flap_window_s
    record.liveness.loss_times = [*(at for at in record.liveness.loss_times if at > since), transition.now]
    transition.mark_node_changed(node)
    if why := _common_cause(transition, node):
        for other, at in transition.state.recent_losses.items():
            _withdraw_loss(transition, other, at, why)
    elif len(record.liveness.loss_times) >= policy.node_flap_count:
        _raise_flapping(transition, node, record, sentence)


def _counts_as_own_loss(transition: Transition, record: NodeRecord) -> bool:
    if record.state not in IN_SERVICE or out_of_service_reason(record, transition.now):
        return False
    if record.quarantine.plan is not None and record.quarantine.plan.pending_remediation_id:  # a reboot may be running
        return False
    if transition.state.correlated_silence is not None:
        return False
    return transition.read_heartbeats(record.node).silent_since >= transition.state.correlated_silence_ended_at


def _common_cause(transition: Transition, node: str) -> str:
    """Return what the nodes lost at the same time have in common; "" if it may be chance."""
    state, rule = transition.state, transition.policy.rules.default_rule(FindingKind.NODE_FLAPPING)
    since = transition.now - rule.correlated_s
    lately = {other: at for other, at in state.recent_losses.items() if at >= since and other in state.nodes}
    state.recent_losses = {**lately, node: transition.now}
    return common_cause(state, rule, state.recent_losses, node)


def _withdraw_loss(transition: Transition, node: str, at: float, reason: str) -> None:
    record = transition.state.nodes[node]
    if at not in record.liveness.loss_times:
        return
    record.liveness.loss_times = [other for other in record.liveness.loss_times if other != at]
    transition.mark_node_changed(node)
    flaps = len(record.liveness.loss_times) >= transition.policy.node_flap_count
    if FLAPPING_KEY in record.health.controller_findings and not flaps:
        why = f"{FLAPPING_KEY} of {node} is withdrawn: {reason} were lost at once, which points to a common cause"
        clear_controller_findings(transition, node, [FLAPPING_KEY], why)


def _raise_flapping(transition: Transition, node: str, record: NodeRecord, sentence: str) -> None:
    count, window_s = len(record.liveness.loss_times), transition.policy.node_flap_window_s
    message = f"{node} was lost {count} times within {window_s / 3600:g} h, the last time because {sentence}"
    most = float(transition.policy.node_flap_count)
    finding = transition.make_finding(
        FindingKind.NODE_FLAPPING, FLAPPING_SUBJECT, Severity.WARNING, message, value=float(count), threshold=most
    )
    raise_controller_finding(transition, node, finding, window_s)
