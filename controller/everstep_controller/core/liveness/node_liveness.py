"""Is a node there? Suspect before lost; witnesses shorten the wait, doubt of oneself lengthens it.

How long a node may be silent is worked out in ``suspicion``, whether a silence is its own in ``correlation``. Numbers
settle races: a word counts for the life (incarnation) of the agent that said it, and what another life said, or was
said to have lost, is dropped before it comes here.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from everstep.vocabulary import Finding, FindingKind, JobState, NodeState, Severity
from everstep.wire.v1.training import PeerLost
from everstep_controller.core.health.evidence import clear_own, raise_own
from everstep_controller.core.health.node_state import IN_SERVICE, kept_out, set_state
from everstep_controller.core.health.outbreaks import common_cause
from everstep_controller.core.health.quarantine import begin_probation, check_probation, check_quarantine
from everstep_controller.core.jobs.joining import offer_to_jobs
from everstep_controller.core.jobs.losses import lose_doubtful, remove_launcher, running_spec
from everstep_controller.core.jobs.membership import jobs_seated_on, most_nodes, seats_of
from everstep_controller.core.liveness import correlation
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import JobRecord, NodeRecord
from everstep_controller.core.state import Hearing, Pulse
from everstep_controller.core.transition import Turn
from everstep_controller.core.wording import named

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

MARGIN = 2.0
"""A silence of so many times the longest pause is a doubt: the next may be the longest yet, hardly by that much."""
MARGIN_WHEN_ACCUSED = 1.5
"""The same for a node that others say is gone."""
FORGET_S = 600.0
"""Time constant in which a pause is forgotten: a job that pauses its agents does so within minutes again."""


class Answer(Enum):
    """What a silence means."""

    PRESENT = "present"
    SUSPECT = "suspect"
    LOST = "lost"


def take_word(policy: CorePolicy, hearing: Hearing, pulse: Pulse, now: float) -> None:
    """A word of a node: its silence is over, and the pause before it is learned. Runs for every heartbeat.

    Where nobody was heard for long before it, it was the observer that did not listen, and nothing is learned. Of a
    pause beyond the ceiling no more than that is.
    """
    if now - hearing.last_at > deaf_after_s(policy):
        hearing.since = now
    hearing.last_at = now
    began = pulse.heard_at if pulse.heard_at > hearing.since else hearing.since
    if now > began:
        pulse.longest_s = longest(pulse.longest_s, min(now - began, policy.suspect_at_most_s / MARGIN))
    pulse.heard_at = now


def longest(before_s: float, pause_s: float) -> float:
    """The longest pause of lately, after one more. What was longest fades with ``FORGET_S``."""
    return max(pause_s, before_s * (1.0 - pause_s / FORGET_S))


def deaf_after_s(policy: CorePolicy) -> float:
    """Half the floor: longer than any interval between beats (settings hold that), and short enough that what was sent
    meanwhile is read before the floor is reached."""
    return policy.suspect_after_s / 2


def patience_s(policy: CorePolicy, longest_s: float) -> float:
    """Seconds of silence after which a node is suspected."""
    return min(max(MARGIN * longest_s, policy.suspect_after_s), policy.suspect_at_most_s)


def patience_when_accused_s(policy: CorePolicy, longest_s: float) -> float:
    """The same for a node that others say is gone: its next beat is overdue."""
    return min(max(MARGIN_WHEN_ACCUSED * longest_s, policy.accused_after_s), patience_s(policy, longest_s))


def loss_s(policy: CorePolicy, longest_s: float) -> float:
    """Seconds of silence after which it is lost: the policy's time between doubt and loss, after the doubt."""
    return patience_s(policy, longest_s) + policy.dead_after_s - policy.suspect_after_s


def judge(policy: CorePolicy, longest_s: float, silent_s: float) -> Answer:
    """What a silence of ``silent_s`` means for a node whose longest pause lately was ``longest_s``."""
    if silent_s < patience_s(policy, longest_s):
        return Answer.PRESENT
    return Answer.SUSPECT if silent_s < loss_s(policy, longest_s) else Answer.LOST


def watch(turn: Turn, node: str) -> None:
    """Queues the node's silence deadline; there is at most one in the queue."""
    if not turn.state.live_nodes[node].watched:
        pulse = turn.pulse(node)
        _watch_until(turn, node, pulse.since + patience_s(turn.policy, pulse.longest_s))


def _watch_until(turn: Turn, node: str, due: float) -> None:
    turn.state.live_nodes[node].watched = True
    turn.wake(due, "silence", node)


# --- a word ------------------------------------------------------------------------------------------------------


def heard(turn: Turn, node: str) -> None:
    """The node said something, so it is there: whatever was held against its silence is refuted."""
    state = turn.state
    record, live = state.nodes[node], state.live_nodes[node]
    take_word(turn.policy, state.hearing, live.pulse, turn.now)
    live.gone_at, live.accusers = None, {}
    correlation.speak(turn, node)
    watch(turn, node)
    if record.state is NodeState.SUSPECT:
        set_state(turn, node, NodeState.HEALTHY, f"{node} was heard again: the suspicion is refuted")
        _tell(turn, "node.refuted", node, record.sentence)
        offer_to_jobs(turn, node)
    if not record.reachable:
        _returned(turn, node)
    elif record.state is NodeState.PROBATION:
        turn.proving[node] = None
    elif record.state is NodeState.QUARANTINED:
        check_quarantine(turn, node)
    if node in state.unmet:
        _met(turn, node)


def _returned(turn: Turn, node: str) -> None:
    record = turn.state.nodes[node]
    record.reachable = True
    correlation.expect(turn.state, node)
    correlation.mind(turn)
    turn.node_changed(node)
    if record.state is NodeState.LOST:
        begin_probation(turn, node, f"{node} is back")
    else:
        turn.audit("node.returned", f"{node} is heard again and stays {record.state}", node=node)
        turn.wake(turn.now, "node", node)  # its time may have been served while it was away


def _tell(turn: Turn, kind: str, node: str, sentence: str) -> None:
    """One line for one node; while many are silent at once the episode's lines speak for all."""
    if turn.state.episode is None:
        turn.audit(kind, sentence, node=node)


# --- after our own start -----------------------------------------------------------------------------------------


def _met(turn: Turn, node: str) -> None:
    """The first word that this controller hears of a node: jobs may wait for nothing else."""
    state = turn.state
    state.unmet.discard(node)
    if turn.now < state.reunion_at:  # others are on their way as well
        state.reunion_at = max(state.reunion_at, min(turn.now + turn.policy.reunion_pause_s, state.reunion_by))
    for name in state.live_nodes[node].open:
        job, pending = state.jobs[name], state.live_jobs[name].pending
        if (
            pending is not None
            and pending.reason is not None
            and not state.unmet.intersection(seats_of(job.generation))
        ):
            state.live_jobs[name].pending = msgspec.structs.replace(pending, due=turn.now)
            turn.wake(turn.now, "job", name)
        elif _lacks_nodes(job):
            offer_to_jobs(turn, node)


def _lacks_nodes(job: JobRecord) -> bool:
    if job.state is JobState.RUNNING:
        return len(seats_of(job.generation)) < most_nodes(job)
    return job.state in (JobState.FORMING, JobState.PAUSED)


def reunion_over(turn: Turn) -> None:
    """Nodes that have not come back to us by now are doubtful to jobs that have a witness."""
    if turn.now < turn.state.reunion_at:  # others came meanwhile
        turn.wake(turn.state.reunion_at, "reunion", correlation.FLEET)
        return
    for node in sorted(turn.state.unmet):
        _ask_witnesses(turn, node)


# --- disconnection -----------------------------------------------------------------------------------------------


def disconnected(turn: Turn, node: str) -> None:
    """Its connection closed. A job with a witness goes on without it at once, others give it a moment."""
    record, live = turn.state.nodes[node], turn.state.live_nodes[node]
    if live.gone_at is not None or not record.reachable:
        return
    live.gone_at = turn.now
    correlation.fall_silent(turn, node)
    sentence = f"the connection of {node} closed"
    if record.state is NodeState.HEALTHY:
        set_state(turn, node, NodeState.SUSPECT, f"{sentence}; {turn.policy.disconnect_grace_s:g} s to come back")
    _tell(turn, "node.disconnected", node, sentence)
    turn.wake(turn.now + turn.policy.collective_settle_s, "node", node)
    turn.wake(turn.now + turn.policy.disconnect_grace_s + turn.state.slack_s, "node", node)
    _ask_witnesses(turn, node)


# --- witnesses ---------------------------------------------------------------------------------------------------


def peer_lost(turn: Turn, job: JobRecord, node: str, report: PeerLost) -> None:
    """A vault lost the vault of another node. A hint: it shortens the wait for a node that is silent itself.

    A node that is heard after it is there, however many say otherwise.
    """
    state, peer = turn.state, report.peer
    strangers = peer == node or peer not in state.reachable
    if strangers or any(job.job not in state.live_nodes[one].jobs for one in (node, peer)):
        turn.ignore("peer_lost.stranger")
        return
    before = _accusers(turn, peer)
    state.live_nodes[peer].accusers[node] = turn.now
    if node not in before:
        detail = f" ({report.detail})" if report.detail else ""
        sentence = f"the vault on {node} lost the one on {peer}{detail}"
        turn.audit("peer.lost", sentence, node=peer, job=job.job, generation=job.last_number)
    _weigh_accusers(turn, peer)


def _accusers(turn: Turn, node: str) -> list[str]:
    """Whose vaults have lost the node's since its last word."""
    accusers = turn.state.live_nodes[node].accusers
    if not accusers:
        return []
    heard_at = turn.pulse(node).heard_at
    return sorted(other for other, at in accusers.items() if at > heard_at)


def _weigh_accusers(turn: Turn, node: str) -> None:
    """With enough of them, or one and a failure in its job, a node is suspected when its next beat is overdue."""
    record = turn.state.nodes[node]
    accusers = _accusers(turn, node)
    if not accusers:
        return
    if node in turn.state.silent:
        _ask_witnesses(turn, node)
        return
    running = (job for job in jobs_seated_on(turn.state, node) if job.state is JobState.RUNNING)
    failing = any(_failure(turn, job) or not _has_resumed(job) for job in running)
    if record.state is not NodeState.HEALTHY or (len(accusers) < turn.policy.peer_witnesses and not failing):
        return
    pulse = turn.pulse(node)
    due = pulse.since + patience_when_accused_s(turn.policy, pulse.longest_s) + turn.state.slack_s
    if turn.now < due:
        turn.wake(due, "node", node)
    else:
        _suspect(turn, node, f"{_unheard(turn, node)}, and its vault is lost to {named(accusers)}")


def _ask_witnesses(turn: Turn, node: str) -> None:
    """Jobs in which somebody else says that a rank is missing need not wait for the end of grace."""
    for job in jobs_seated_on(turn.state, node):
        if job.state is JobState.RUNNING and (witness := _witness(turn, job, node)):
            lose_doubtful(turn, job, witness)


def _failure(turn: Turn, job: JobRecord) -> str:
    """What ranks of the job say that went wrong; empty while all seems to run."""
    live = turn.state.live_jobs[job.job]
    if live.witnesses:
        return f"a collective of rank {min(live.witnesses)} failed"
    return f"rank {min(live.stalls)} stands still" if live.stalls else ""


def _witness(turn: Turn, job: JobRecord, node: str) -> str:
    """What in the job says that the doubtful ``node`` is missing; empty when nothing does.

    Other vaults that lost the node's, and a generation that has not resumed, are witnesses too, but only after a
    moment: an agent may just be starting again, and so may a generation.
    """
    if failure := _failure(turn, job):
        return failure
    spec, settle_s = running_spec(job), turn.policy.collective_settle_s
    due = _doubted_at(turn, node) + settle_s
    if turn.now < due:
        turn.wake(due, "node", node)
        return ""
    if accusers := _accusers(turn, node):
        return f"its vault is lost to {named(accusers)}"
    if _has_resumed(job) or spec is None:
        return ""
    if turn.now < job.opened_at + settle_s:
        turn.wake(job.opened_at + settle_s, "node", node)
        return ""
    return f"generation {spec.number} has not resumed"


def _has_resumed(job: JobRecord) -> bool:
    return job.resumed_at is not None or job.leaving is not None


def _doubted_at(turn: Turn, node: str) -> float:
    gone_at = turn.state.live_nodes[node].gone_at
    if gone_at is not None:
        return gone_at
    return turn.state.nodes[node].since if node in turn.state.silent else turn.state.reunion_at


# --- deadlines ---------------------------------------------------------------------------------------------------


def check_silence(turn: Turn, node: str) -> bool:
    """The node's silence deadline: suspect it, lose it, or look again when it can be late at all. Whether it was only
    found to have been heard in time."""
    turn.state.live_nodes[node].watched = False
    if not turn.state.nodes[node].reachable:
        return True
    answer, due = _judge_silence(turn, node)
    if turn.state.nodes[node].reachable:
        _watch_until(turn, node, due)
    return answer is Answer.PRESENT


def _judge_silence(turn: Turn, node: str) -> tuple[Answer, float]:
    """What the node's silence means, which is acted on; and when it may mean more."""
    policy, pulse, slack_s = turn.policy, turn.pulse(node), turn.state.slack_s
    answer = judge(policy, pulse.longest_s, turn.now - pulse.since - slack_s)
    if answer is Answer.PRESENT:
        return answer, pulse.since + patience_s(policy, pulse.longest_s) + slack_s
    if answer is Answer.SUSPECT:
        _suspect(turn, node, _unheard(turn, node))
        return answer, pulse.since + loss_s(policy, pulse.longest_s) + slack_s
    correlation.fall_silent(turn, node)
    if correlation.is_doubted(turn, node, pulse.since):
        _suspect(turn, node, _unheard(turn, node))  # where a late Tick brought no look before this one
        return answer, correlation.look_again_at(turn, pulse.since)
    gone_at = turn.state.live_nodes[node].gone_at
    lose(turn, node, _unheard(turn, node) if gone_at is None else _not_back(turn, node, gone_at))
    return answer, turn.now


def _unheard(turn: Turn, node: str) -> str:
    pulse = turn.pulse(node)
    if node in turn.state.unmet:
        return f"{node} has not been heard since this controller began, {turn.now - pulse.since:.1f} s ago"
    return f"{node} said nothing for {turn.now - pulse.since:.1f} s"


def _suspect(turn: Turn, node: str, sentence: str) -> None:
    correlation.fall_silent(turn, node)
    if turn.state.nodes[node].state is NodeState.HEALTHY:
        set_state(turn, node, NodeState.SUSPECT, sentence)
        _tell(turn, "node.suspect", node, sentence)
    _ask_witnesses(turn, node)


def check_node(turn: Turn, node: str) -> None:
    """A node's other deadlines: the end of grace after a disconnection, or of quarantine; a witness who may now be
    heard."""
    record, live = turn.state.nodes[node], turn.state.live_nodes[node]
    _check_rejoined(turn, node)
    if live.gone_at is not None and record.reachable:
        _check_gone(turn, node, live.gone_at)
    elif node in turn.state.silent:
        _judge_silence(turn, node)
        _ask_witnesses(turn, node)
    elif record.state is NodeState.QUARANTINED:
        check_quarantine(turn, node)
    elif record.state is NodeState.PROBATION:
        check_probation(turn, node)
    else:
        _weigh_accusers(turn, node)


def _check_gone(turn: Turn, node: str, gone_at: float) -> None:
    due = gone_at + turn.policy.disconnect_grace_s + turn.state.slack_s
    if turn.now < due:
        _ask_witnesses(turn, node)
        turn.wake(due, "node", node)
    elif correlation.is_doubted(turn, node, gone_at):
        _ask_witnesses(turn, node)
        turn.wake(correlation.look_again_at(turn, gone_at), "node", node)
    else:
        lose(turn, node, _not_back(turn, node, gone_at))


def _not_back(turn: Turn, node: str, gone_at: float) -> str:
    return f"{node} did not come back within {turn.now - gone_at:.1f} s after its connection closed"


def expect_launchers(turn: Turn, node: str) -> None:
    """The agent began a new life: launchers on its node have to join again, or are taken for gone. Of a job that is
    over, nobody is expected any more."""
    live = turn.state.live_nodes[node]
    unconfirmed = False
    for name in live.open:
        job = turn.state.jobs[name]
        launcher = job.launchers.get(node)
        if launcher is not None:
            launcher.confirmed, unconfirmed = False, True
            turn.job_changed(name)
    if unconfirmed:
        live.rejoin_due = turn.now + turn.policy.rejoin_grace_s
        turn.wake(live.rejoin_due, "node", node)


def _check_rejoined(turn: Turn, node: str) -> None:
    live = turn.state.live_nodes[node]
    if live.rejoin_due is None or turn.now < live.rejoin_due:
        return
    live.rejoin_due = None
    drop_launchers(turn, node, f"the launcher on {node} did not join again after its agent's restart", confirmed=False)


def drop_launchers(turn: Turn, node: str, sentence: str, *, confirmed: bool) -> None:
    """Takes the node's launchers for gone: those that have not joined again, or (``confirmed``) all of them."""
    for name in turn.state.live_nodes[node].jobs:
        job = turn.state.jobs[name]
        launcher = job.launchers.get(node)
        if launcher is not None and (confirmed or not launcher.confirmed):
            remove_launcher(turn, job, node, sentence)


def lose(turn: Turn, node: str, sentence: str) -> None:
    """The node is gone: its jobs go on without it, once all that are lost in this turn are known. This accuses nobody;
    it may come back by way of probation."""
    state = turn.state
    record = state.nodes[node]
    note_loss(turn, node, sentence)
    record.reachable, record.lost_at = False, turn.now
    correlation.give_up(turn, node)
    state.unmet.discard(node)
    if record.state in (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION):
        set_state(turn, node, NodeState.LOST, sentence)
    turn.node_changed(node)
    turn.audit("node.lost", sentence, node=node)
    for job in jobs_seated_on(state, node):
        if job.state is JobState.RUNNING:
            turn.departed.setdefault(job.job, {})[node] = sentence


# ---- flapping
# A node that is lost again and again: it comes back by itself each time, and each time costs its job a regrouping.
#
# What counts is a loss that is the node's own: of one in service, to which nothing was being done, while nothing spoke
# for a fault of the network or of this controller. A loss that others share, a moment before or after, is taken back.

SUBJECT = "node"
KEY = f"{FindingKind.NODE_FLAPPING}/{SUBJECT}"


def note_loss(turn: Turn, node: str, sentence: str) -> None:
    """The node is about to be given up, for the reason in ``sentence``: counts that, and names who is lost too often.

    How many others make it no fault of a node's is the rule's ``correlated_...``. O(nodes lost within that time).
    """
    record, policy = turn.state.nodes[node], turn.policy
    if not policy.rules.judges(FindingKind.NODE_FLAPPING) or not _is_its_own(turn, record):
        return
    record.lost = [*(at for at in record.lost if at > turn.now - policy.node_flap_window_s), turn.now]
    turn.node_changed(node)
    if why := _shared(turn, node):
        for other, at in turn.state.lost_lately.items():
            _take_back(turn, other, at, why)
    elif len(record.lost) >= policy.node_flap_count:
        _name(turn, node, record, sentence)


def _is_its_own(turn: Turn, record: NodeRecord) -> bool:
    if record.state not in IN_SERVICE or kept_out(record, turn.now):
        return False
    if record.course is not None and record.course.remedy:  # a reboot may be under way
        return False
    return turn.state.episode is None and turn.pulse(record.node).since >= turn.state.calm_since


def _shared(turn: Turn, node: str) -> str:
    """What nodes that were lost in the same time have in common, in words; empty where it may be chance."""
    state, rule = turn.state, turn.policy.rules.of_kind(FindingKind.NODE_FLAPPING)
    since = turn.now - rule.correlated_s
    lately = {other: at for other, at in state.lost_lately.items() if at >= since and other in state.nodes}
    state.lost_lately = {**lately, node: turn.now}
    return common_cause(state, rule, state.lost_lately, node)


def _take_back(turn: Turn, node: str, at: float, why: str) -> None:
    record = turn.state.nodes[node]
    if at not in record.lost:
        return
    record.lost = [other for other in record.lost if other != at]
    turn.node_changed(node)
    if KEY in record.own and len(record.lost) < turn.policy.node_flap_count:
        clear_own(turn, node, [KEY], f"{KEY} of {node} is taken back: {why} were lost at once, which is no node's own")


def _name(turn: Turn, node: str, record: NodeRecord, sentence: str) -> None:
    count, window_s = len(record.lost), turn.policy.node_flap_window_s
    finding = Finding(
        kind=FindingKind.NODE_FLAPPING,
        subject=SUBJECT,
        severity=Severity.WARNING,
        message=f"{node} was lost {count} times within {window_s / 3600:g} h, the last time because {sentence}",
        value=float(count),
        threshold=float(turn.policy.node_flap_count),
        since=turn.now,
        trace=turn.trace,
    )
    raise_own(turn, node, finding, window_s)
