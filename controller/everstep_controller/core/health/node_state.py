"""What is asked of the outside: cordons that follow a node's state, and resets, reboots and repairs under caps."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.vocabulary import Action, NodeState
from everstep_controller.core import records
from everstep_controller.core.effects import Remedy, RemedyKind
from everstep_controller.core.health.evidence import evidence_of, suspect_gpus
from everstep_controller.core.records import NodeRecord
from everstep_controller.core.transition import Turn

# ---- standing
# Where a node stands: every change of its state goes through here, and the scheduler is told of it.

OUT = (NodeState.QUARANTINED, NodeState.HELD, NodeState.REPAIR)
"""States in which nobody else should give the node work either."""
IN_SERVICE = (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.PROBATION)
"""Those in which a node serves, or is about to."""


def set_state(turn: Turn, node: str, state: NodeState, sentence: str) -> None:
    """Moves a node to ``state``, for the reason in ``sentence``; cordons it with the scheduler, or gives it back.

    One that is healthy by somebody's word, and silent, is suspected until its own next word.
    """
    record = turn.state.nodes[node]
    doubted = state is NodeState.HEALTHY and node in turn.state.silent
    record.state, record.since = NodeState.SUSPECT if doubted else state, turn.now
    record.sentence, record.trace = sentence, turn.trace
    turn.node_changed(node)
    if state in OUT:
        cordon(turn, node, sentence)
    elif state is NodeState.HEALTHY:
        record.course = None
        uncordon(turn, node, sentence)


def kept_out(record: NodeRecord, now: float) -> str:
    """Whose word keeps the node out of service, in a sentence; empty where nobody's does."""
    if record.foreign:
        return f"{record.node} is cordoned by {record.foreign}, and stays out until that is lifted"
    if record.hold:
        return record.hold
    if now < record.maintenance_until:
        return f"{record.node} is in maintenance"
    return ""


KINDS = {Action.RESET_GPU: RemedyKind.RESET_GPU, Action.REBOOT_NODE: RemedyKind.REBOOT}
"""Cures that a machine can be asked to carry out by itself."""


PERHAPS = "perhaps"
"""For the id of a cordon that failed (``NodeRecord.cordoned``): who did not answer may have carried it out."""


def cordon(turn: Turn, node: str, sentence: str) -> None:
    """Nobody else gives the node work while it is out. Where somebody else has cordoned it, that is left alone."""
    record = turn.state.nodes[node]
    if record.cordoned in ("", PERHAPS) and not record.foreign:
        record.cordoned = _request(turn, node, RemedyKind.CORDON, sentence)


def uncordon(turn: Turn, node: str, sentence: str) -> None:
    """Gives back what Everstep took, and only that."""
    record = turn.state.nodes[node]
    if record.cordoned:
        record.cordoned = ""
        _request(turn, node, RemedyKind.UNCORDON, sentence)


def repair(turn: Turn, node: str, sentence: str) -> None:
    """Hands the node to people, with everything known against it; it keeps others away as a cordon does."""
    turn.state.nodes[node].cordoned = _request(turn, node, RemedyKind.REPAIR, sentence)


def treat(turn: Turn, node: str, cure: Action, sentence: str) -> str:
    """Asks for a reset or a reboot, and counts it under both caps. Returns the remedy's id; nobody is to work at it any
    more when ``remedy_timeout_s`` is over."""
    record, fleet = turn.state.nodes[node], turn.state.fleet
    record.remedied = noted(record.remedied, turn.now, turn.policy.remedy_node_window_s)
    fleet.remedied = noted(fleet.remedied, turn.now, turn.policy.remedy_fleet_window_s)
    return _request(turn, node, KINDS[cure], sentence, due=turn.now + turn.policy.remedy_timeout_s)


def note_dry_run(record: NodeRecord) -> None:
    """The node's newest reset or reboot was only a dry run: it counts under the caps, and was never carried out."""
    record.dry_runs = [at for at in record.dry_runs if at in record.remedied] + record.remedied[-1:]


def was_dry_run(record: NodeRecord) -> bool:
    """Whether the node's newest reset or reboot was only a dry run."""
    return bool(record.remedied) and record.remedied[-1] in record.dry_runs


def remediation_cap(turn: Turn, node: str) -> str:
    """Why the node gets no further automatic remedy, in words; empty while it may."""
    times, policy = turn.state.nodes[node].remedied, turn.policy
    what = "it was reset or rebooted"
    return times_cap(times, turn.now, policy.remedy_node_window_s, policy.remedies_per_node, what)


def fleet_cap(turn: Turn) -> tuple[str, float]:
    """Why nobody is treated now, and when the next one may be; ("", 0.0) while the fleet's cap is not reached."""
    times, window_s = turn.state.fleet.remedied, turn.policy.remedy_fleet_window_s
    count, at = next_at(times, turn.now, window_s, turn.policy.remedies_per_fleet)
    return (f"{count} nodes were reset or rebooted within {window_s:g} s" if count else ""), at


def _request(turn: Turn, node: str, kind: RemedyKind, sentence: str, due: float = 0.0) -> str:
    """Ids hold the controller's life: one whose database is away may give a number that another gives too."""
    state, record = turn.state, turn.state.nodes[node]
    state.fleet.remedies += 1
    turn.fleet_changed()
    turn.node_changed(node)
    name = f"remedy-{state.epoch}-{state.fleet.remedies}"
    standing = record.known()
    gpus = (suspect_gpus(record, standing) or record.gpus) if kind is RemedyKind.RESET_GPU else ()
    records.enter(record, turn.now, "action", f"{kind.replace('_', ' ')} asked for: {sentence}", {"remedy": name})
    turn.remedy(
        Remedy(
            id=name,
            node=node,
            kind=kind,
            sentence=sentence,
            at=turn.now,
            verdict=record.stands_by if kind is not RemedyKind.CORDON else "",
            trace=turn.trace,
            gpus=tuple(gpu.uuid for gpu in gpus),
            evidence=evidence_of(state, node, turn.now) if kind is RemedyKind.REPAIR else None,
            due=due,
        )
    )
    return name


# ---- caps
# How often something was done lately, to one node and in the fleet, and whether that is enough.


def noted(times: Sequence[float], now: float, window_s: float) -> list[float]:
    """``times`` within the window, and now."""
    return [*_within(times, now, window_s), now]


def times_cap(times: Sequence[float], now: float, window_s: float, most: int, what: str) -> str:
    """Why it is not done once more, in words; empty while it may be. ``what``: what happened to the node."""
    count = len(_within(times, now, window_s))
    return "" if count < most else f"{what} {count} times within {window_s / 86400:g} days"


def next_at(times: Sequence[float], now: float, window_s: float, most: int) -> tuple[int, float]:
    """How often it was done in the fleet, and when it may be again; (0, 0.0) while it may be now."""
    recent = _within(times, now, window_s)
    return (0, 0.0) if len(recent) < most else (len(recent), recent[-most] + window_s)


def _within(times: Sequence[float], now: float, window_s: float) -> list[float]:
    return [at for at in times if at > now - window_s]
