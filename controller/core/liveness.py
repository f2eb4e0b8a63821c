"""Is a node there? Suspect before lost; witnesses shorten the wait, doubt of oneself lengthens it."""

from __future__ import annotations

from controller.core.generations import Cause
from controller.core.jobs import offer_to_jobs
from controller.core.losses import lose_doubtful, node_left_jobs, remove_launcher, running_spec
from controller.core.membership import jobs_seated_on
from controller.core.quarantine import begin_probation, check_probation, check_quarantine, set_state
from controller.core.state import JobRecord
from controller.core.turn import Turn
from everstep.vocabulary import GenerationReason, JobState, NodeState

CORRELATED_RETRY_S = 1.0
"""How soon a correlated silence is looked at again."""


def watch(turn: Turn, node: str) -> None:
    """Queues the node's silence deadline; there is at most one in the queue."""
    live = turn.state.live_nodes[node]
    if not live.watched:
        live.watched = True
        turn.wake(turn.pulse(node).heard_at + turn.policy.suspect_after_s, "silence", node)


def heard(turn: Turn, node: str) -> None:
    """The node said something, so it is there: whatever was held against its silence is refuted."""
    state = turn.state
    record, live = state.nodes[node], state.live_nodes[node]
    live.pulse.heard_at = max(live.pulse.heard_at, turn.now)
    live.gone_at = None
    state.silent.discard(node)
    watch(turn, node)
    if record.state is NodeState.SUSPECT:
        set_state(turn, node, NodeState.HEALTHY, f"{node} was heard again: the suspicion is refuted")
        turn.audit("node.refuted", record.sentence, node=node)
        offer_to_jobs(turn, node)
    if not record.reachable:
        _returned(turn, node)
    elif record.state is NodeState.PROBATION:
        check_probation(turn, node)
    elif record.state is NodeState.QUARANTINED:
        check_quarantine(turn, node)


def _returned(turn: Turn, node: str) -> None:
    record = turn.state.nodes[node]
    record.reachable = True
    turn.state.reachable.add(node)
    turn.node_changed(node)
    if record.state is NodeState.LOST:
        begin_probation(turn, node, f"{node} is back")
    else:
        turn.audit("node.returned", f"{node} is heard again and stays {record.state}", node=node)


# --- disconnection -----------------------------------------------------------------------------------------------


def disconnected(turn: Turn, node: str) -> None:
    """Its connection closed. A job with a witness goes on without it at once, others give it a moment."""
    record, live = turn.state.nodes[node], turn.state.live_nodes[node]
    if live.gone_at is not None or not record.reachable:
        return
    live.gone_at = turn.now
    turn.state.silent.add(node)
    sentence = f"the connection of {node} closed"
    if record.state is NodeState.HEALTHY:
        set_state(turn, node, NodeState.SUSPECT, f"{sentence}; {turn.policy.disconnect_grace_s:g} s to come back")
    turn.audit("node.disconnected", sentence, node=node)
    turn.wake(turn.now + turn.policy.collective_settle_s, "node", node)
    turn.wake(turn.now + turn.policy.disconnect_grace_s + turn.state.slack_s, "node", node)
    _ask_witnesses(turn, node)


def _ask_witnesses(turn: Turn, node: str) -> None:
    """Jobs in which somebody else says that a rank is missing need not wait for the end of grace."""
    for job in jobs_seated_on(turn.state, node):
        if job.state is JobState.RUNNING and (witness := _witness(turn, job, node)):
            lose_doubtful(turn, job, witness)


def _witness(turn: Turn, job: JobRecord, node: str) -> str:
    """What in the job says that ``node`` is missing; empty when all seems to run.

    A generation that has not resumed is a witness too, but only after a moment: it may just be starting.
    """
    live, spec = turn.state.live_jobs[job.job], running_spec(job)
    if live.witnesses:
        return f"a collective of rank {min(live.witnesses)} failed"
    if live.stalls:
        return f"rank {min(live.stalls)} stands still"
    gone_at = turn.state.live_nodes[node].gone_at
    if gone_at is None or turn.now < gone_at + turn.policy.collective_settle_s:
        return ""
    if job.resumed_at is None and job.leaving is None and spec is not None:
        return f"generation {spec.number} has not resumed"
    return ""


# --- deadlines ---------------------------------------------------------------------------------------------------


def check_silence(turn: Turn, node: str) -> bool:
    """The node's silence deadline: suspect it, lose it, or look again when it can be late at all.

    True where it was heard in time, and nothing followed.
    """
    state, policy = turn.state, turn.policy
    record, live = state.nodes[node], state.live_nodes[node]
    live.watched = False
    if not record.reachable:
        return True
    heard_at = turn.pulse(node).heard_at
    silent_s = turn.now - heard_at - state.slack_s
    if silent_s < policy.suspect_after_s:
        _watch_again(turn, node, heard_at + policy.suspect_after_s + state.slack_s)
        return True
    if silent_s < policy.dead_after_s:
        _suspect(turn, node)
        _watch_again(turn, node, heard_at + policy.dead_after_s + state.slack_s)
    elif not _believe(turn, node):
        _watch_again(turn, node, turn.now + CORRELATED_RETRY_S)
    else:
        lose(turn, node, f"{node} said nothing for {turn.now - heard_at:.1f} s")
    return False


def _watch_again(turn: Turn, node: str, due: float) -> None:
    turn.state.live_nodes[node].watched = True
    turn.wake(due, "silence", node)


def _suspect(turn: Turn, node: str) -> None:
    record = turn.state.nodes[node]
    turn.state.silent.add(node)
    if record.state is NodeState.HEALTHY:
        sentence = f"{node} said nothing for {turn.now - turn.pulse(node).heard_at:.1f} s"
        set_state(turn, node, NodeState.SUSPECT, sentence)
        turn.audit("node.suspect", sentence, node=node)
    _ask_witnesses(turn, node)


def check_node(turn: Turn, node: str) -> None:
    """A node's other deadlines: the end of grace after a disconnection, or of quarantine."""
    record, live = turn.state.nodes[node], turn.state.live_nodes[node]
    _check_rejoined(turn, node)
    if live.gone_at is not None and record.reachable:
        due = live.gone_at + turn.policy.disconnect_grace_s + turn.state.slack_s
        if turn.now < due:
            _ask_witnesses(turn, node)
            turn.wake(due, "node", node)
        elif not _believe(turn, node):
            turn.wake(turn.now + CORRELATED_RETRY_S, "node", node)
        else:
            lose(
                turn,
                node,
                f"{node} did not come back within {turn.now - live.gone_at:.1f} s after its connection closed",
            )
    elif record.state is NodeState.QUARANTINED:
        check_quarantine(turn, node)
    elif record.state is NodeState.PROBATION:
        check_probation(turn, node)


def expect_launchers(turn: Turn, node: str) -> None:
    """The agent began a new life: launchers on its node have to join again, or are taken for gone."""
    live = turn.state.live_nodes[node]
    unconfirmed = False
    for name in live.jobs:
        launcher = turn.state.jobs[name].launchers.get(node)
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


def _believe(turn: Turn, node: str) -> bool:
    """Whether silence is the node's own; too many at once speak against the network, or against ourselves."""
    state, policy = turn.state, turn.policy
    silent, known = len(state.silent), len(state.reachable)
    mass = silent >= max(policy.correlated_minimum, policy.correlated_share * known)
    if not mass and (silent < known or known < 2):
        state.correlated = False
        return True
    live = state.live_nodes[node]
    since = turn.pulse(node).heard_at if live.gone_at is None else live.gone_at
    if turn.now - since >= policy.correlated_patience_s:
        return True
    if not state.correlated:
        state.correlated = True
        turn.audit(
            "fleet.correlated_silence",
            f"{silent} of {known} nodes are silent at once: the network or this controller is suspected, "
            f"no node is lost on silence alone for {policy.correlated_patience_s:g} s",
        )
    return False


def lose(turn: Turn, node: str, sentence: str) -> None:
    """The node is gone: its jobs go on without it. This accuses nobody; it may come back by way of probation."""
    state = turn.state
    record = state.nodes[node]
    record.reachable = False
    state.reachable.discard(node)
    state.silent.discard(node)
    if record.state in (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION):
        set_state(turn, node, NodeState.LOST, sentence)
    turn.node_changed(node)
    turn.audit("node.lost", sentence, node=node)
    node_left_jobs(turn, node, Cause(reason=GenerationReason.NODE_LOST, sentence=sentence, trace=turn.trace))
