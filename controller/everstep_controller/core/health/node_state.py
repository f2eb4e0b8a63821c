"""Change a node's state, and request cordons, resets, reboots and repairs within caps."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.vocabulary import Action, NodeState
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.health.offences import collect_evidence, suspect_gpus
from everstep_controller.core.records import HistoryKind, NodeRecord
from everstep_controller.core.transition import Transition

CORDONED_STATES = (NodeState.QUARANTINED, NodeState.HELD, NodeState.REPAIR)
"""States in which nothing else should give the node work either."""


TRANSITIONS: dict[NodeState, tuple[NodeState, ...]] = {
    NodeState.HEALTHY: (NodeState.SUSPECT, NodeState.LOST, *CORDONED_STATES),
    NodeState.SUSPECT: (NodeState.HEALTHY, NodeState.LOST, *CORDONED_STATES),
    NodeState.PROBATION: (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.LOST, *CORDONED_STATES),
    NodeState.LOST: (NodeState.PROBATION, *CORDONED_STATES),
    NodeState.QUARANTINED: (NodeState.PROBATION, NodeState.LOST, NodeState.HELD, NodeState.REPAIR),
    NodeState.HELD: tuple(state for state in NodeState if state is not NodeState.HELD),
    NodeState.REPAIR: (NodeState.PROBATION, NodeState.LOST, NodeState.QUARANTINED),
}
"""States that may follow each state; docs/concepts/node-states.md draws them. A node registers as healthy. Any state
may be entered again for another reason."""


def set_state(transition: Transition, node: str, state: NodeState, sentence: str) -> None:
    """Move a node to ``state`` for the reason in ``sentence``; cordon or uncordon it accordingly.

    A silent node that becomes healthy by order is suspected until its next message.
    """
    record = transition.state.nodes[node]
    is_silent = state is NodeState.HEALTHY and node in transition.state.silent_nodes
    entered = NodeState.SUSPECT if is_silent else state
    assert entered is record.state or entered in TRANSITIONS[record.state], f"{node}: {record.state} to {entered}"
    record.state, record.since = entered, transition.now
    record.sentence, record.trace = sentence, transition.trace
    transition.mark_node_changed(node)
    if state in CORDONED_STATES:
        cordon(transition, node, sentence)
    elif state is NodeState.HEALTHY:
        record.quarantine.plan = None
        uncordon(transition, node, sentence)


def out_of_service_reason(record: NodeRecord, now: float) -> str:
    """Return the order that keeps the node out of service, as a sentence; "" for none."""
    if record.scheduling.external_cordon_by:
        return (
            f"{record.node} is cordoned by {record.scheduling.external_cordon_by} and stays out until that cordon is "
            "lifted"
        )
    if record.scheduling.hold_reason:
        return record.scheduling.hold_reason
    if now < record.scheduling.maintenance_until:
        return f"{record.node} is in maintenance"
    return ""


REMEDIATION_KINDS = {Action.RESET_GPU: RemediationKind.RESET_GPU, Action.REBOOT_NODE: RemediationKind.REBOOT}
"""Actions that an executor can carry out."""


def cordon(transition: Transition, node: str, sentence: str) -> None:
    """Cordon a node that is out. Another party's cordon is left alone."""
    scheduling = transition.state.nodes[node].scheduling
    if (scheduling.cordon_failed or not scheduling.cordon_id) and not scheduling.external_cordon_by:
        scheduling.cordon_id = _request_remediation(transition, node, RemediationKind.CORDON, sentence)
        scheduling.cordon_failed = False


def uncordon(transition: Transition, node: str, sentence: str) -> None:
    """Lift Everstep's own cordon, and no other."""
    scheduling = transition.state.nodes[node].scheduling
    if scheduling.cordon_id:
        scheduling.cordon_id, scheduling.cordon_failed = "", False
        _request_remediation(transition, node, RemediationKind.UNCORDON, sentence)


def request_repair(transition: Transition, node: str, sentence: str) -> None:
    """Hand the node to people with the evidence on it. Like a cordon, a repair keeps other work away."""
    scheduling = transition.state.nodes[node].scheduling
    scheduling.cordon_id = _request_remediation(transition, node, RemediationKind.REPAIR, sentence)
    scheduling.cordon_failed = False


def start_remediation(transition: Transition, node: str, action: Action, sentence: str) -> str:
    """Request a reset or reboot and count it under both caps. Return its id; the request expires after
    ``remediation_timeout_s``."""
    record, fleet = transition.state.nodes[node], transition.state.fleet
    record.history.remediation_times = append_time(
        record.history.remediation_times, transition.now, transition.policy.remediation_node_window_s
    )
    fleet.remediation_times = append_time(
        fleet.remediation_times, transition.now, transition.policy.remediation_fleet_window_s
    )
    return _request_remediation(
        transition,
        node,
        REMEDIATION_KINDS[action],
        sentence,
        due=transition.now + transition.policy.remediation_timeout_s,
    )


def note_dry_run(record: NodeRecord) -> None:
    """Mark the newest reset or reboot as a dry run: it counts under the caps, but was not carried out."""
    record.history.dry_run_times = [
        at for at in record.history.dry_run_times if at in record.history.remediation_times
    ] + record.history.remediation_times[-1:]


def was_dry_run(record: NodeRecord) -> bool:
    """Return whether the newest reset or reboot was a dry run."""
    return (
        bool(record.history.remediation_times) and record.history.remediation_times[-1] in record.history.dry_run_times
    )


def node_remediation_cap(transition: Transition, node: str) -> str:
    """Return why the node gets no further automatic remediation; "" while it may get one."""
    times, policy = transition.state.nodes[node].history.remediation_times, transition.policy
    what = "it was reset or rebooted"
    return describe_cap(times, transition.now, policy.remediation_node_window_s, policy.remediations_per_node, what)


def fleet_remediation_cap(transition: Transition) -> tuple[str, float]:
    """Return why no node is remediated now, and the time of the next one; ("", 0.0) below the fleet's cap."""
    times, window_s = transition.state.fleet.remediation_times, transition.policy.remediation_fleet_window_s
    count, at = next_allowed_at(times, transition.now, window_s, transition.policy.remediations_per_fleet)
    return (f"{count} nodes were reset or rebooted within {window_s:g} s" if count else ""), at


def _request_remediation(
    transition: Transition, node: str, kind: RemediationKind, sentence: str, due: float = 0.0
) -> str:
    """Request a remediation and return its id. The id contains the epoch, because another controller may count to the
    same number during a database outage."""
    state, record = transition.state, transition.state.nodes[node]
    state.fleet.remediation_count += 1
    transition.mark_fleet_changed()
    transition.mark_node_changed(node)
    name = f"remediation-{state.epoch}-{state.fleet.remediation_count}"
    findings = record.all_findings()
    gpus = (suspect_gpus(record, findings) or record.identity.gpus) if kind is RemediationKind.RESET_GPU else ()
    transition.append_history(
        node, HistoryKind.ACTION, f"{kind.replace('_', ' ')} requested: {sentence}", {"remediation": name}
    )
    transition.request_remediation(
        Remediation(
            id=name,
            node=node,
            kind=kind,
            sentence=sentence,
            at=transition.now,
            verdict_id=record.history.current_verdict_id if kind is not RemediationKind.CORDON else "",
            trace=transition.trace,
            gpu_uuids=tuple(gpu.uuid for gpu in gpus),
            evidence=collect_evidence(state, node, transition.now) if kind is RemediationKind.REPAIR else None,
            deadline=due,
        )
    )
    return name


# Caps


def append_time(times: Sequence[float], now: float, window_s: float) -> list[float]:
    """Return ``times`` within the window, and ``now``."""
    return [*_within(times, now, window_s), now]


def describe_cap(times: Sequence[float], now: float, window_s: float, limit: int, event: str) -> str:
    """Return why the cap is reached, or "" below the cap. ``event`` describes what happened to the node."""
    count = len(_within(times, now, window_s))
    return "" if count < limit else f"{event} {count} times within {window_s / 86400:g} days"


def next_allowed_at(times: Sequence[float], now: float, window_s: float, limit: int) -> tuple[int, float]:
    """Return the number of events in the window and the time of the next allowed one; (0, 0.0) if one is allowed
    now."""
    recent = _within(times, now, window_s)
    return (0, 0.0) if len(recent) < limit else (len(recent), recent[-limit] + window_s)


def _within(times: Sequence[float], now: float, window_s: float) -> list[float]:
    return [at for at in times if at > now - window_s]
