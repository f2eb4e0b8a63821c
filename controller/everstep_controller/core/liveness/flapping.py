"""Find nodes that are lost repeatedly and return by themselves, which costs their jobs a regroup each time.

Only losses of the node itself count: it was in service, and nothing indicated a fault of the network or of this
controller. A loss that other nodes share at about the same time is withdrawn.
"""

from __future__ import annotations

from everstep.vocabulary import FindingKind, Severity
from everstep_controller.core.health.node_state import out_of_service_reason
from everstep_controller.core.health.outbreaks import common_cause
from everstep_controller.core.records import IN_SERVICE, NodeRecord
from everstep_controller.core.transition import Transition

FLAPPING_SUBJECT = "node"
FLAPPING_KEY = f"{FindingKind.NODE_FLAPPING}/{FLAPPING_SUBJECT}"


def record_loss(transition: Transition, node: str, sentence: str) -> None:
    """Count a loss of the node's own, and raise a finding on a node that is lost too often."""
    record, policy = transition.state.nodes[node], transition.policy
    if not _counts_as_own_loss(transition, record):
        return
    since = transition.now - policy.liveness.flap_window_s
    record.liveness.loss_times = [*(at for at in record.liveness.loss_times if at > since), transition.now]
    transition.mark_node_changed(node)
    if why := _common_cause(transition, node):
        for other, at in transition.state.liveness.recent_losses.items():
            _withdraw_loss(transition, other, at, why)
    elif len(record.liveness.loss_times) >= policy.liveness.flap_count:
        _raise_flapping(transition, node, record, sentence)


def _counts_as_own_loss(transition: Transition, record: NodeRecord) -> bool:
    if record.state not in IN_SERVICE or out_of_service_reason(record, transition.now):
        return False
    if record.quarantine.plan is not None and record.quarantine.plan.pending_remediation_id:  # a reboot may be running
        return False
    if transition.state.liveness.correlated_silence is not None:
        return False
    return transition.read_heartbeats(record.node).silent_since >= transition.state.liveness.correlated_silence_ended_at


def _common_cause(transition: Transition, node: str) -> str:
    """Return what the nodes lost at the same time have in common; "" if it may be chance."""
    state, rule = transition.state, transition.policy.rules.default_rule(FindingKind.NODE_FLAPPING)
    since = transition.now - rule.correlated_s
    lately = {other: at for other, at in state.liveness.recent_losses.items() if at >= since and other in state.nodes}
    state.liveness.recent_losses = {**lately, node: transition.now}
    return common_cause(state, rule, state.liveness.recent_losses, node)


def _withdraw_loss(transition: Transition, node: str, at: float, reason: str) -> None:
    record = transition.state.nodes[node]
    if at not in record.liveness.loss_times:
        return
    record.liveness.loss_times = [other for other in record.liveness.loss_times if other != at]
    transition.mark_node_changed(node)
    flaps = len(record.liveness.loss_times) >= transition.policy.liveness.flap_count
    if FLAPPING_KEY in record.health.controller_findings and not flaps:
        why = f"{FLAPPING_KEY} of {node} is withdrawn: {reason} were lost at once, which points to a common cause"
        transition.clear_findings(node, [FLAPPING_KEY], why)


def _raise_flapping(transition: Transition, node: str, record: NodeRecord, sentence: str) -> None:
    count, window_s = len(record.liveness.loss_times), transition.policy.liveness.flap_window_s
    message = f"{node} was lost {count} times within {window_s / 3600:g} h, the last time because {sentence}"
    most = float(transition.policy.liveness.flap_count)
    finding = transition.make_finding(
        FindingKind.NODE_FLAPPING, FLAPPING_SUBJECT, Severity.WARNING, message, value=float(count), threshold=most
    )
    transition.raise_finding(node, finding, window_s)
