"""Is a node there? Suspect before lost; witnesses shorten the wait, doubt of oneself lengthens it.

How long a node may be silent is worked out in ``suspicion``, whether a silence is its own in ``correlation``. Numbers
settle races: a word counts for the life (incarnation) of the agent that said it, and what another life said, or was
said to have lost, is dropped before it comes here.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from everstep.vocabulary import Finding, FindingKind, JobState, NodeState, Severity
from everstep.wire.v1.training import PeerConnectionLost
from everstep_controller.core.health.evidence import clear_controller_findings, raise_controller_finding
from everstep_controller.core.health.node_state import IN_SERVICE, out_of_service_reason, set_state
from everstep_controller.core.health.outbreaks import common_cause
from everstep_controller.core.health.quarantine import begin_probation, check_probation, check_quarantine
from everstep_controller.core.jobs.joining import offer_to_jobs
from everstep_controller.core.jobs.losses import regroup_without_missing, remove_launcher, running_generation
from everstep_controller.core.jobs.membership import jobs_seated_on, max_roster_nodes, seats_of
from everstep_controller.core.liveness import correlation
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import JobRecord, NodeRecord
from everstep_controller.core.state import HeartbeatState, ObserverState
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import join_names

# ---- suspicion
# Is a node there? Three answers from one number: the longest pause that it took lately and came back from.
#
# The intuition first. Beats travel over TCP, so a lost packet is not a lost beat: it comes a fifth of a second later.
# What is left of a healthy node is a steady beat and, now and then, a pause: its agent was starved, swapped, stopped by
# a
# debugger, or dials anew for every beat and had to wait in a queue. Such pauses are rare, long, and nothing like a bell
# curve around the mean, so a deadline of mean and deviation forgets them between two of them and fits the time when
# nothing happens. The longest of them is what matters. If pauses are alike over time, the chance that the next of n is
# longer than all before it is 1/(n + 1) (each order of n + 1 alike things is as likely as any other), whatever their
# distribution. A node is therefore suspected when it has been silent for twice its longest pause of lately, never
# before
# a floor that the policy gives and never after a ceiling.
#
# The end of a TCP connection is the fast signal of a death and is handled elsewhere; silence has to tell only what
# leaves
# no such word: a cut power line, a cut network. So the deadline may be slow, and must not be wrong.
#
# The observer doubts itself by the same measure: when nobody at all was heard for longer than any node is allowed, it
# was deaf, and all silences begin anew.

PAUSE_MARGIN = 2.0
"""A silence of so many times the longest pause is a doubt: the next may be the longest yet, hardly by that much."""
PAUSE_MARGIN_AFTER_PEER_LOSS = 1.5
"""The same for a node that others say is gone."""
PAUSE_DECAY_S = 600.0
"""Time constant in which a pause is forgotten: a job that pauses its agents does so within minutes again."""


class Liveness(Enum):
    """What a silence means."""

    PRESENT = "present"
    SUSPECT = "suspect"
    LOST = "lost"


def record_message(policy: CorePolicy, observer: ObserverState, heartbeats: HeartbeatState, now: float) -> None:
    """A word of a node: its silence is over, and the pause before it is learned. Runs for every heartbeat.

    Where nobody was heard for long before it, it was the observer that did not listen, and nothing is learned. Of a
    pause beyond the ceiling no more than that is.
    """
    if now - observer.last_received_at > observer_stall_s(policy):
        observer.receiving_since = now
    observer.last_received_at = now
    began = heartbeats.last_seen_at if heartbeats.last_seen_at > observer.receiving_since else observer.receiving_since
    if now > began:
        heartbeats.longest_pause_s = decayed_longest_pause_s(
            heartbeats.longest_pause_s, min(now - began, policy.suspect_after_max_s / PAUSE_MARGIN)
        )
    heartbeats.last_seen_at = now


def decayed_longest_pause_s(longest_s: float, pause_s: float) -> float:
    """The longest pause of lately, after one more. What was longest fades with ``FORGET_S``."""
    return max(pause_s, longest_s * (1.0 - pause_s / PAUSE_DECAY_S))


def observer_stall_s(policy: CorePolicy) -> float:
    """Half the floor: longer than any interval between beats (settings hold that), and short enough that what was sent
    meanwhile is read before the floor is reached."""
    return policy.suspect_after_s / 2


def suspect_timeout_s(policy: CorePolicy, longest_pause_s: float) -> float:
    """Seconds of silence after which a node is suspected."""
    return min(max(PAUSE_MARGIN * longest_pause_s, policy.suspect_after_s), policy.suspect_after_max_s)


def suspect_timeout_after_peer_loss_s(policy: CorePolicy, longest_pause_s: float) -> float:
    """The same for a node that others say is gone: its next beat is overdue."""
    return min(
        max(PAUSE_MARGIN_AFTER_PEER_LOSS * longest_pause_s, policy.suspect_after_peer_loss_s),
        suspect_timeout_s(policy, longest_pause_s),
    )


def loss_timeout_s(policy: CorePolicy, longest_pause_s: float) -> float:
    """Seconds of silence after which it is lost: the policy's time between doubt and loss, after the doubt."""
    return suspect_timeout_s(policy, longest_pause_s) + policy.lost_after_s - policy.suspect_after_s


def classify_silence(policy: CorePolicy, longest_pause_s: float, silent_s: float) -> Liveness:
    """What a silence of ``silent_s`` means for a node whose longest pause lately was ``longest_s``."""
    if silent_s < suspect_timeout_s(policy, longest_pause_s):
        return Liveness.PRESENT
    return Liveness.SUSPECT if silent_s < loss_timeout_s(policy, longest_pause_s) else Liveness.LOST


def schedule_silence_deadline(transition: Transition, node: str) -> None:
    """Queues the node's silence deadline; there is at most one in the queue."""
    if not transition.state.node_runtime[node].has_silence_deadline:
        pulse = transition.read_heartbeats(node)
        _watch_until(transition, node, pulse.silent_since + suspect_timeout_s(transition.policy, pulse.longest_pause_s))


def _watch_until(transition: Transition, node: str, due: float) -> None:
    transition.state.node_runtime[node].has_silence_deadline = True
    transition.schedule(due, "silence", node)


# --- a word ------------------------------------------------------------------------------------------------------


def mark_seen(transition: Transition, node: str) -> None:
    """The node said something, so it is there: whatever was held against its silence is refuted."""
    state = transition.state
    record, live = state.nodes[node], state.node_runtime[node]
    record_message(transition.policy, state.observer, live.heartbeats, transition.now)
    live.disconnected_at, live.peer_loss_reports = None, {}
    correlation.mark_not_silent(transition, node)
    schedule_silence_deadline(transition, node)
    if record.state is NodeState.SUSPECT:
        set_state(transition, node, NodeState.HEALTHY, f"{node} was heard again: the suspicion is refuted")
        _audit_unless_correlated(transition, "node.suspicion_cleared", node, record.sentence)
        offer_to_jobs(transition, node)
    if not record.reachable:
        _handle_return(transition, node)
    elif record.state is NodeState.PROBATION:
        transition.seen_on_probation[node] = None
    elif record.state is NodeState.QUARANTINED:
        check_quarantine(transition, node)
    if node in state.unseen:
        _handle_first_contact(transition, node)


def _handle_return(transition: Transition, node: str) -> None:
    record = transition.state.nodes[node]
    record.reachable = True
    correlation.add_expected(transition.state, node)
    correlation.update_correlated_silence(transition)
    transition.mark_node_changed(node)
    if record.state is NodeState.LOST:
        begin_probation(transition, node, f"{node} is back")
    else:
        transition.audit("node.returned", f"{node} is heard again and stays {record.state}", node=node)
        transition.schedule(transition.now, "node", node)  # its time may have been served while it was away


def _audit_unless_correlated(transition: Transition, kind: str, node: str, sentence: str) -> None:
    """One line for one node; while many are silent at once the episode's lines speak for all."""
    if transition.state.correlated_silence is None:
        transition.audit(kind, sentence, node=node)


# --- after our own start -----------------------------------------------------------------------------------------


def _handle_first_contact(transition: Transition, node: str) -> None:
    """The first word that this controller hears of a node: jobs may wait for nothing else."""
    state = transition.state
    state.unseen.discard(node)
    if transition.now < state.rejoin_window_ends_at:  # others are on their way as well
        state.rejoin_window_ends_at = max(
            state.rejoin_window_ends_at,
            min(transition.now + transition.policy.rejoin_window_quiet_s, state.rejoin_window_latest_at),
        )
    for name in state.node_runtime[node].open:
        job, pending = state.jobs[name], state.job_runtime[name].pending_regroup
        if (
            pending is not None
            and pending.reason is not None
            and not state.unseen.intersection(seats_of(job.generation))
        ):
            state.job_runtime[name].pending_regroup = msgspec.structs.replace(pending, due=transition.now)
            transition.schedule(transition.now, "job", name)
        elif _lacks_nodes(job):
            offer_to_jobs(transition, node)


def _lacks_nodes(job: JobRecord) -> bool:
    if job.state is JobState.RUNNING:
        return len(seats_of(job.generation)) < max_roster_nodes(job)
    return job.state in (JobState.FORMING, JobState.PAUSED)


def end_rejoin_window(transition: Transition) -> None:
    """Nodes that have not come back to us by now are doubtful to jobs that have a witness."""
    if transition.now < transition.state.rejoin_window_ends_at:  # others came meanwhile
        transition.schedule(transition.state.rejoin_window_ends_at, "reunion", correlation.FLEET)
        return
    for node in sorted(transition.state.unseen):
        _regroup_with_witness(transition, node)


# --- disconnection -----------------------------------------------------------------------------------------------


def handle_disconnected(transition: Transition, node: str) -> None:
    """Its connection closed. A job with a witness goes on without it at once, others give it a moment."""
    record, live = transition.state.nodes[node], transition.state.node_runtime[node]
    if live.disconnected_at is not None or not record.reachable:
        return
    live.disconnected_at = transition.now
    correlation.mark_silent(transition, node)
    sentence = f"the connection of {node} closed"
    if record.state is NodeState.HEALTHY:
        set_state(
            transition, node, NodeState.SUSPECT, f"{sentence}; {transition.policy.disconnect_grace_s:g} s to come back"
        )
    _audit_unless_correlated(transition, "node.disconnected", node, sentence)
    transition.schedule(transition.now + transition.policy.collective_settle_s, "node", node)
    transition.schedule(
        transition.now + transition.policy.disconnect_grace_s + transition.state.observer_lag_s, "node", node
    )
    _regroup_with_witness(transition, node)


# --- witnesses ---------------------------------------------------------------------------------------------------


def handle_peer_lost(transition: Transition, job: JobRecord, node: str, report: PeerConnectionLost) -> None:
    """A vault lost the vault of another node. A hint: it shortens the wait for a node that is silent itself.

    A node that is heard after it is there, however many say otherwise.
    """
    state, peer = transition.state, report.peer
    strangers = peer == node or peer not in state.reachable
    if strangers or any(job.job not in state.node_runtime[one].jobs for one in (node, peer)):
        transition.count_ignored("peer_connection_lost.not_a_member")
        return
    before = _current_peer_reports(transition, peer)
    state.node_runtime[peer].peer_loss_reports[node] = transition.now
    if node not in before:
        detail = f" ({report.detail})" if report.detail else ""
        sentence = f"the vault on {node} lost the one on {peer}{detail}"
        transition.audit("peer.lost", sentence, node=peer, job=job.job, generation=job.last_generation_number)
    _weigh_peer_reports(transition, peer)


def _current_peer_reports(transition: Transition, node: str) -> list[str]:
    """Whose vaults have lost the node's since its last word."""
    accusers = transition.state.node_runtime[node].peer_loss_reports
    if not accusers:
        return []
    heard_at = transition.read_heartbeats(node).last_seen_at
    return sorted(other for other, at in accusers.items() if at > heard_at)


def _weigh_peer_reports(transition: Transition, node: str) -> None:
    """With enough of them, or one and a failure in its job, a node is suspected when its next beat is overdue."""
    record = transition.state.nodes[node]
    accusers = _current_peer_reports(transition, node)
    if not accusers:
        return
    if node in transition.state.silent:
        _regroup_with_witness(transition, node)
        return
    running = (job for job in jobs_seated_on(transition.state, node) if job.state is JobState.RUNNING)
    failing = any(_job_failure(transition, job) or not _has_resumed(job) for job in running)
    if record.state is not NodeState.HEALTHY or (len(accusers) < transition.policy.min_peer_witnesses and not failing):
        return
    pulse = transition.read_heartbeats(node)
    due = (
        pulse.silent_since
        + suspect_timeout_after_peer_loss_s(transition.policy, pulse.longest_pause_s)
        + transition.state.observer_lag_s
    )
    if transition.now < due:
        transition.schedule(due, "node", node)
    else:
        _suspect(
            transition, node, f"{_describe_silence(transition, node)}, and its vault is lost to {join_names(accusers)}"
        )


def _regroup_with_witness(transition: Transition, node: str) -> None:
    """Jobs in which somebody else says that a rank is missing need not wait for the end of grace."""
    for job in jobs_seated_on(transition.state, node):
        if job.state is JobState.RUNNING and (witness := _witness(transition, job, node)):
            regroup_without_missing(transition, job, witness)


def _job_failure(transition: Transition, job: JobRecord) -> str:
    """What ranks of the job say that went wrong; empty while all seems to run."""
    live = transition.state.job_runtime[job.job]
    if live.failed_collective_ranks:
        return f"a collective of rank {min(live.failed_collective_ranks)} failed"
    return f"rank {min(live.stalled_ranks)} stands still" if live.stalled_ranks else ""


def _witness(transition: Transition, job: JobRecord, node: str) -> str:
    """What in the job says that the doubtful ``node`` is missing; empty when nothing does.

    Other vaults that lost the node's, and a generation that has not resumed, are witnesses too, but only after a
    moment: an agent may just be starting again, and so may a generation.
    """
    if failure := _job_failure(transition, job):
        return failure
    spec, settle_s = running_generation(job), transition.policy.collective_settle_s
    due = _unresponsive_since(transition, node) + settle_s
    if transition.now < due:
        transition.schedule(due, "node", node)
        return ""
    if accusers := _current_peer_reports(transition, node):
        return f"its vault is lost to {join_names(accusers)}"
    if _has_resumed(job) or spec is None:
        return ""
    if transition.now < job.generation_opened_at + settle_s:
        transition.schedule(job.generation_opened_at + settle_s, "node", node)
        return ""
    return f"generation {spec.number} has not resumed"


def _has_resumed(job: JobRecord) -> bool:
    return job.generation_resumed_at is not None or job.outgoing_generation is not None


def _unresponsive_since(transition: Transition, node: str) -> float:
    gone_at = transition.state.node_runtime[node].disconnected_at
    if gone_at is not None:
        return gone_at
    return (
        transition.state.nodes[node].since
        if node in transition.state.silent
        else transition.state.rejoin_window_ends_at
    )


# --- deadlines ---------------------------------------------------------------------------------------------------


def check_silence(transition: Transition, node: str) -> bool:
    """The node's silence deadline: suspect it, lose it, or look again when it can be late at all. Whether it was only
    found to have been heard in time."""
    transition.state.node_runtime[node].has_silence_deadline = False
    if not transition.state.nodes[node].reachable:
        return True
    answer, due = _judge_silence(transition, node)
    if transition.state.nodes[node].reachable:
        _watch_until(transition, node, due)
    return answer is Liveness.PRESENT


def _judge_silence(transition: Transition, node: str) -> tuple[Liveness, float]:
    """What the node's silence means, which is acted on; and when it may mean more."""
    policy, pulse, slack_s = transition.policy, transition.read_heartbeats(node), transition.state.observer_lag_s
    answer = classify_silence(policy, pulse.longest_pause_s, transition.now - pulse.silent_since - slack_s)
    if answer is Liveness.PRESENT:
        return answer, pulse.silent_since + suspect_timeout_s(policy, pulse.longest_pause_s) + slack_s
    if answer is Liveness.SUSPECT:
        _suspect(transition, node, _describe_silence(transition, node))
        return answer, pulse.silent_since + loss_timeout_s(policy, pulse.longest_pause_s) + slack_s
    correlation.mark_silent(transition, node)
    if correlation.is_silence_excused(transition, node, pulse.silent_since):
        _suspect(
            transition, node, _describe_silence(transition, node)
        )  # where a late Tick brought no look before this one
        return answer, correlation.excused_until(transition, pulse.silent_since)
    gone_at = transition.state.node_runtime[node].disconnected_at
    declare_lost(
        transition,
        node,
        _describe_silence(transition, node) if gone_at is None else _describe_disconnect(transition, node, gone_at),
    )
    return answer, transition.now


def _describe_silence(transition: Transition, node: str) -> str:
    pulse = transition.read_heartbeats(node)
    if node in transition.state.unseen:
        return f"{node} has not been heard since this controller began, {transition.now - pulse.silent_since:.1f} s ago"
    return f"{node} said nothing for {transition.now - pulse.silent_since:.1f} s"


def _suspect(transition: Transition, node: str, sentence: str) -> None:
    correlation.mark_silent(transition, node)
    if transition.state.nodes[node].state is NodeState.HEALTHY:
        set_state(transition, node, NodeState.SUSPECT, sentence)
        _audit_unless_correlated(transition, "node.suspect", node, sentence)
    _regroup_with_witness(transition, node)


def check_node(transition: Transition, node: str) -> None:
    """A node's other deadlines: the end of grace after a disconnection, or of quarantine; a witness who may now be
    heard."""
    record, live = transition.state.nodes[node], transition.state.node_runtime[node]
    _check_rejoined(transition, node)
    if live.disconnected_at is not None and record.reachable:
        _check_disconnected(transition, node, live.disconnected_at)
    elif node in transition.state.silent:
        _judge_silence(transition, node)
        _regroup_with_witness(transition, node)
    elif record.state is NodeState.QUARANTINED:
        check_quarantine(transition, node)
    elif record.state is NodeState.PROBATION:
        check_probation(transition, node)
    else:
        _weigh_peer_reports(transition, node)


def _check_disconnected(transition: Transition, node: str, disconnected_at: float) -> None:
    due = disconnected_at + transition.policy.disconnect_grace_s + transition.state.observer_lag_s
    if transition.now < due:
        _regroup_with_witness(transition, node)
        transition.schedule(due, "node", node)
    elif correlation.is_silence_excused(transition, node, disconnected_at):
        _regroup_with_witness(transition, node)
        transition.schedule(correlation.excused_until(transition, disconnected_at), "node", node)
    else:
        declare_lost(transition, node, _describe_disconnect(transition, node, disconnected_at))


def _describe_disconnect(transition: Transition, node: str, disconnected_at: float) -> str:
    return f"{node} did not come back within {transition.now - disconnected_at:.1f} s after its connection closed"


def expect_launchers(transition: Transition, node: str) -> None:
    """The agent began a new life: launchers on its node have to join again, or are taken for gone. Of a job that is
    over, nobody is expected any more."""
    live = transition.state.node_runtime[node]
    unconfirmed = False
    for name in live.open:
        job = transition.state.jobs[name]
        launcher = job.launchers.get(node)
        if launcher is not None:
            launcher.has_rejoined, unconfirmed = False, True
            transition.mark_job_changed(name)
    if unconfirmed:
        live.launcher_rejoin_due = transition.now + transition.policy.launcher_rejoin_grace_s
        transition.schedule(live.launcher_rejoin_due, "node", node)


def _check_rejoined(transition: Transition, node: str) -> None:
    live = transition.state.node_runtime[node]
    if live.launcher_rejoin_due is None or transition.now < live.launcher_rejoin_due:
        return
    live.launcher_rejoin_due = None
    drop_launchers(
        transition, node, f"the launcher on {node} did not join again after its agent's restart", include_rejoined=False
    )


def drop_launchers(transition: Transition, node: str, sentence: str, *, include_rejoined: bool) -> None:
    """Takes the node's launchers for gone: those that have not joined again, or (``confirmed``) all of them."""
    for name in transition.state.node_runtime[node].jobs:
        job = transition.state.jobs[name]
        launcher = job.launchers.get(node)
        if launcher is not None and (include_rejoined or not launcher.has_rejoined):
            remove_launcher(transition, job, node, sentence)


def declare_lost(transition: Transition, node: str, sentence: str) -> None:
    """The node is gone: its jobs go on without it, once all that are lost in this turn are known. This accuses nobody;
    it may come back by way of probation."""
    state = transition.state
    record = state.nodes[node]
    record_loss(transition, node, sentence)
    record.reachable, record.lost_at = False, transition.now
    correlation.remove_expected(transition, node)
    state.unseen.discard(node)
    if record.state in (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION):
        set_state(transition, node, NodeState.LOST, sentence)
    transition.mark_node_changed(node)
    transition.audit("node.lost", sentence, node=node)
    for job in jobs_seated_on(state, node):
        if job.state is JobState.RUNNING:
            transition.lost_nodes_by_job.setdefault(job.job, {})[node] = sentence


# ---- flapping
# A node that is lost again and again: it comes back by itself each time, and each time costs its job a regrouping.
#
# What counts is a loss that is the node's own: of one in service, to which nothing was being done, while nothing spoke
# for a fault of the network or of this controller. A loss that others share, a moment before or after, is taken back.

FLAPPING_SUBJECT = "node"
FLAPPING_KEY = f"{FindingKind.NODE_FLAPPING}/{FLAPPING_SUBJECT}"


def record_loss(transition: Transition, node: str, sentence: str) -> None:
    """The node is about to be given up, for the reason in ``sentence``: counts that, and names who is lost too often.

    How many others make it no fault of a node's is the rule's ``correlated_...``. O(nodes lost within that time).
    """
    record, policy = transition.state.nodes[node], transition.policy
    if not policy.rules.has_rule_for(FindingKind.NODE_FLAPPING) or not _counts_as_own_loss(transition, record):
        return
    record.loss_times = [
        *(at for at in record.loss_times if at > transition.now - policy.node_flap_window_s),
        transition.now,
    ]
    transition.mark_node_changed(node)
    if why := _common_cause(transition, node):
        for other, at in transition.state.recent_losses.items():
            _withdraw_loss(transition, other, at, why)
    elif len(record.loss_times) >= policy.node_flap_count:
        _raise_flapping(transition, node, record, sentence)


def _counts_as_own_loss(transition: Transition, record: NodeRecord) -> bool:
    if record.state not in IN_SERVICE or out_of_service_reason(record, transition.now):
        return False
    if (
        record.readmission_plan is not None and record.readmission_plan.pending_remediation_id
    ):  # a reboot may be under way
        return False
    return (
        transition.state.correlated_silence is None
        and transition.read_heartbeats(record.node).silent_since >= transition.state.correlated_silence_ended_at
    )


def _common_cause(transition: Transition, node: str) -> str:
    """What nodes that were lost in the same time have in common, in words; empty where it may be chance."""
    state, rule = transition.state, transition.policy.rules.default_rule(FindingKind.NODE_FLAPPING)
    since = transition.now - rule.correlated_s
    lately = {other: at for other, at in state.recent_losses.items() if at >= since and other in state.nodes}
    state.recent_losses = {**lately, node: transition.now}
    return common_cause(state, rule, state.recent_losses, node)


def _withdraw_loss(transition: Transition, node: str, at: float, reason: str) -> None:
    record = transition.state.nodes[node]
    if at not in record.loss_times:
        return
    record.loss_times = [other for other in record.loss_times if other != at]
    transition.mark_node_changed(node)
    if FLAPPING_KEY in record.controller_findings and len(record.loss_times) < transition.policy.node_flap_count:
        clear_controller_findings(
            transition,
            node,
            [FLAPPING_KEY],
            f"{FLAPPING_KEY} of {node} is taken back: {reason} were lost at once, which is no node's own",
        )


def _raise_flapping(transition: Transition, node: str, record: NodeRecord, sentence: str) -> None:
    count, window_s = len(record.loss_times), transition.policy.node_flap_window_s
    finding = Finding(
        kind=FindingKind.NODE_FLAPPING,
        subject=FLAPPING_SUBJECT,
        severity=Severity.WARNING,
        message=f"{node} was lost {count} times within {window_s / 3600:g} h, the last time because {sentence}",
        value=float(count),
        threshold=float(transition.policy.node_flap_count),
        since=transition.now,
        trace=transition.trace,
    )
    raise_controller_finding(transition, node, finding, window_s)
