"""Change a node's state, and remediate nodes that are out: cordons, then reset, reboot and repair within caps."""

from __future__ import annotations

import math
from collections.abc import Sequence

from everstep.vocabulary import Action, Decision, FindingKind, Mode, NodeState, Severity
from everstep.wire.v1.directives import PauseNvml
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.events import RemediationFinished
from everstep_controller.core.health.offences import collect_evidence, suspect_gpus
from everstep_controller.core.health.outbreaks import ACTION_DELAY_S, record_ladder_step, rollback_possible_until
from everstep_controller.core.policy import describe_action
from everstep_controller.core.records import IN_SERVICE, DiagnosticsStatus, HistoryKind, NodeRecord, ReadmissionPlan
from everstep_controller.core.seats.membership import jobs_seated_on
from everstep_controller.core.transition import Transition

SEAT_RECHECK_S = 1.0
"""Seconds until a node that its jobs have not left yet is checked again."""
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
    """Move a node to ``state`` for the reason in ``sentence``; cordon or uncordon it accordingly."""
    record = transition.state.nodes[node]
    is_silent = state is NodeState.HEALTHY and node in transition.state.liveness.silent_nodes
    entered = NodeState.SUSPECT if is_silent else state
    assert entered is record.state or entered in TRANSITIONS[record.state], f"{node}: {record.state} to {entered}"
    assert record.liveness.reachable or entered not in IN_SERVICE, f"{node} is out of reach and becomes {entered}"
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
        by = record.scheduling.external_cordon_by
        return f"{record.node} is cordoned by {by} and stays out until that cordon is lifted"
    if record.scheduling.hold_reason:
        return record.scheduling.hold_reason
    if now < record.scheduling.maintenance_until:
        return f"{record.node} is in maintenance"
    return record.scheduling.notice_reason


def is_held_by_notice_alone(record: NodeRecord) -> bool:
    """Return whether only a provider's notice keeps the node out of service."""
    orders = record.scheduling
    is_ordered = orders.external_cordon_by or orders.hold_reason or orders.maintenance_until
    return record.state is NodeState.HELD and bool(orders.notice_reason) and not is_ordered


REMEDIATION_KINDS = {Action.RESET_GPU: RemediationKind.RESET_GPU, Action.REBOOT_NODE: RemediationKind.REBOOT}
"""Actions that an executor can carry out."""

RESET_S = 900.0
"""Longest time in seconds that an agent lets go of NVML for a reset, as long as an executor waits for one."""


def cordon(transition: Transition, node: str, sentence: str) -> None:
    """Cordon a node that is out. Another party's cordon is left alone."""
    scheduling = transition.state.nodes[node].scheduling
    if (scheduling.cordon_failed or not scheduling.cordon_id) and not scheduling.external_cordon_by:
        scheduling.cordon_id = _request_remediation(transition, node, RemediationKind.CORDON, sentence)
        scheduling.cordon_failed = scheduling.is_cordon_dry_run = False


def uncordon(transition: Transition, node: str, sentence: str) -> None:
    """Lift Everstep's own cordon, and no other."""
    scheduling = transition.state.nodes[node].scheduling
    if scheduling.cordon_id:
        scheduling.cordon_id, scheduling.cordon_failed, scheduling.is_cordon_dry_run = "", False, False
        _request_remediation(transition, node, RemediationKind.UNCORDON, sentence)


def start_remediation(transition: Transition, node: str, action: Action, sentence: str) -> str:
    """Request a reset or reboot, count it under both caps and return its id."""
    policy, now = transition.policy, transition.now
    history, fleet = transition.state.nodes[node].history, transition.state.fleet
    history.remediation_times = append_time(history.remediation_times, now, policy.remediation.node_window_s)
    fleet.remediation_times = append_time(fleet.remediation_times, now, policy.remediation.fleet_window_s)
    due = now + policy.remediation.timeout_s
    if action is Action.RESET_GPU:
        _pause_nvml(transition, node, min(policy.remediation.timeout_s, RESET_S))
    return _request_remediation(transition, node, REMEDIATION_KINDS[action], sentence, due=due)


def _pause_nvml(transition: Transition, node: str, seconds: float) -> None:
    """Have the node's agent close NVML for a reset; 0 seconds: open it again."""
    if transition.state.nodes[node].identity.takes_nvml_pause:
        transition.send(node, PauseNvml(seconds=seconds))


def note_dry_run(record: NodeRecord) -> None:
    """Mark the newest reset or reboot as a dry run: it counts under the caps, but was not carried out."""
    history = record.history
    known = [at for at in history.dry_run_times if at in history.remediation_times]
    history.dry_run_times = known + history.remediation_times[-1:]


def was_dry_run(record: NodeRecord) -> bool:
    """Return whether the newest reset or reboot was a dry run."""
    times = record.history.remediation_times
    return bool(times) and times[-1] in record.history.dry_run_times


def node_remediation_cap(transition: Transition, node: str) -> str:
    """Return why the node gets no further automatic remediation; "" while it may get one."""
    times, policy = transition.state.nodes[node].history.remediation_times, transition.policy
    what = "it was reset or rebooted"
    return describe_cap(times, transition.now, policy.remediation.node_window_s, policy.remediation.per_node, what)


def fleet_remediation_cap(transition: Transition) -> tuple[str, float]:
    """Return why no node is remediated now, and the time of the next one; ("", 0.0) below the fleet's cap."""
    times, window_s = transition.state.fleet.remediation_times, transition.policy.remediation.fleet_window_s
    count, at = next_allowed_at(times, transition.now, window_s, transition.policy.remediation.per_fleet)
    return (f"{count} nodes were reset or rebooted within {window_s:g} s" if count else ""), at


def _request_remediation(
    transition: Transition, node: str, kind: RemediationKind, sentence: str, due: float = 0.0
) -> str:
    """Request a remediation and return its id, which contains the epoch: other controllers may count alike."""
    state, record = transition.state, transition.state.nodes[node]
    state.fleet.remediation_count += 1
    transition.mark_fleet_changed()
    name = f"remediation-{state.epoch}-{state.fleet.remediation_count}"
    findings = record.all_findings()
    gpus = (suspect_gpus(record, findings) or record.identity.gpus) if kind is RemediationKind.RESET_GPU else ()
    words = f"{kind.replace('_', ' ')} requested: {sentence}"
    transition.append_history(node, HistoryKind.ACTION, words, {"remediation": name})
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


def append_time(times: Sequence[float], now: float, window_s: float) -> list[float]:
    """Return ``times`` within the window, and ``now``."""
    return [*_within(times, now, window_s), now]


def describe_cap(times: Sequence[float], now: float, window_s: float, limit: int, event: str) -> str:
    """Return why the cap is reached, or "" below the cap. ``event`` describes what happened to the node."""
    count = len(_within(times, now, window_s))
    return "" if count < limit else f"{event} {count} times within {window_s / 86400:g} days"


def next_allowed_at(times: Sequence[float], now: float, window_s: float, limit: int) -> tuple[int, float]:
    """Return the number of events in the window and the time of the next allowed one; (0, 0.0) below the limit."""
    recent = _within(times, now, window_s)
    return (0, 0.0) if len(recent) < limit else (len(recent), recent[-limit] + window_s)


def _within(times: Sequence[float], now: float, window_s: float) -> list[float]:
    return [at for at in times if at > now - window_s]


# The ladder: the actions of a rule, step by step, each confirmed before readmission


def continue_ladder(transition: Transition, node: str) -> None:
    """Request the action that is due for the standing causes, if the policy allows."""
    record, plan = transition.state.nodes[node], transition.state.nodes[node].quarantine.plan
    if plan is None or not plan.ladder or transition.policy.remediation.mode is not Mode.ENFORCE:
        return
    if transition.state.database.outage:
        return
    if record.quarantine.needs_operator and not record.health.defective_gpus:
        _set_blocked(transition, record, plan, f"an operator took {node} out of service: no automatic action")
    elif why := out_of_service_reason(record, transition.now):
        _set_blocked(transition, record, plan, f"{why}: no automatic action")
    elif plan.pending_remediation_id:
        if transition.now < plan.remediation_deadline:
            transition.schedule_treatment(plan.remediation_deadline, node)
            return
        plan.pending_remediation_id, wait_s = "", transition.policy.remediation.timeout_s
        _advance_ladder(transition, node, plan, f"was not reported within {wait_s:g} s")
    elif plan.settle_deadline and transition.now < plan.settle_deadline:
        transition.schedule_treatment(plan.settle_deadline, node)
    elif plan.settle_deadline:
        how = "was only a dry run" if was_dry_run(record) else "was confirmed"
        _advance_ladder(transition, node, plan, f"{how}, but the finding is still active")
    else:
        _take_step(transition, node, plan)


def _take_step(transition: Transition, node: str, plan: ReadmissionPlan) -> None:
    record, action = transition.state.nodes[node], plan.ladder[plan.ladder_step]
    causes = ", ".join(record.quarantine.causes)
    place = f"step {plan.ladder_step + 1} of {len(plan.ladder)} of rule {plan.rule_id}"
    if waits_for_rollback_window(transition, node, goes_to_operator=action is Action.REPAIR):
        return
    if action is Action.REPAIR:
        why = f"{node} needs manual repair: {causes} is still active, and repair is {place}"
        send_to_repair(transition, node, why)
    elif action not in REMEDIATION_KINDS:
        return
    elif jobs_seated_on(transition.state, node):
        # rounding to whole seconds merges repeated requests into one check
        transition.schedule_treatment(math.floor(transition.now) + SEAT_RECHECK_S, node)
    elif why := node_remediation_cap(transition, node):
        if not waits_for_rollback_window(transition, node, goes_to_operator=True):
            sentence = f"{node} needs manual repair: {causes} is still active, and {why}"
            send_to_repair(transition, node, sentence)
    elif (fleet := fleet_remediation_cap(transition))[0]:
        _set_blocked(transition, record, plan, f"{describe_action(action)} of {node} waits: {fleet[0]}")
        transition.schedule_treatment(fleet[1], node)
    else:
        sentence = f"{describe_action(action)} of {node} because of {causes} ({place})"
        plan.pending_remediation_id = start_remediation(transition, node, action, sentence)
        plan.remediation_deadline = transition.now + transition.policy.remediation.timeout_s
        plan.blocked_reason, record.quarantine.required_action = "", action
        if (rule := transition.policy.rules.find_rule(plan.rule_id)) is not None:  # a repeat takes the next step
            record_ladder_step(record, rule, action, transition.now)
        data = {"remediation": plan.pending_remediation_id}
        transition.log_event("remediation.requested", sentence, node=node, data=data)
        transition.schedule_treatment(plan.remediation_deadline, node)


def waits_for_rollback_window(transition: Transition, node: str, *, goes_to_operator: bool) -> bool:
    """Return whether the action waits because an outbreak can still roll the eviction back."""
    record = transition.state.nodes[node]
    reserve = rollback_possible_until(record)
    due = reserve if goes_to_operator else min(reserve, record.since + ACTION_DELAY_S)
    if transition.now < due:
        transition.schedule_treatment(math.ceil(due), node)
    return transition.now < due


def _advance_ladder(transition: Transition, node: str, plan: ReadmissionPlan, reason: str) -> None:
    record, action = transition.state.nodes[node], plan.ladder[plan.ladder_step]
    plan.settle_deadline = 0.0
    sentence = f"{describe_action(action)} of {node} {reason}"
    transition.log_event("remediation.failed", sentence, node=node)
    transition.append_history(node, HistoryKind.ACTION, sentence)
    if plan.ladder_step + 1 < len(plan.ladder):
        plan.ladder_step += 1
    elif not out_of_service_reason(record, transition.now):  # else the last step is repeated after the order's end
        send_to_repair(transition, node, f"{node} needs manual repair: {sentence}, and no automatic action is left")
        return
    continue_ladder(transition, node)


def handle_remediation_finished(transition: Transition, event: RemediationFinished) -> None:
    """Handle the outcome of an action. Success leads to the diagnostics, failure to the next step."""
    record = transition.state.nodes.get(event.node)
    if record is None:
        transition.count_ignored("remediation_finished.unknown")
        return
    how = _outcome(event) if event.succeeded else f"failed: {event.detail}"
    transition.append_history(
        event.node, HistoryKind.ACTION, f"{event.remediation_id} {how}", {"remediation": event.remediation_id}
    )
    if event.dry_run and record.scheduling.cordon_id == event.remediation_id:
        record.scheduling.is_cordon_dry_run = True
        transition.mark_node_changed(event.node)
    plan = record.quarantine.plan
    if plan is not None and plan.pending_remediation_id == event.remediation_id:
        plan.pending_remediation_id = ""
        if plan.ladder[plan.ladder_step] is Action.RESET_GPU:
            _pause_nvml(transition, event.node, 0.0)
        if event.dry_run:
            note_dry_run(record)
        if record.state is not NodeState.QUARANTINED:
            transition.schedule_treatment(transition.now, event.node)
        elif event.succeeded:
            _handle_confirmed(transition, event.node, plan, event)
        else:
            _advance_ladder(transition, event.node, plan, f"failed ({event.detail})")
        return
    if not event.succeeded:
        sentence = f"{event.remediation_id} of {event.node} failed: {event.detail}"
        transition.log_event("remediation.failed", sentence, node=event.node)
        if record.scheduling.cordon_id == event.remediation_id:
            record.scheduling.cordon_failed = True


def _outcome(event: RemediationFinished) -> str:
    return "would have been carried out (dry run: nothing was done)" if event.dry_run else "was carried out"


def _handle_confirmed(transition: Transition, node: str, plan: ReadmissionPlan, event: RemediationFinished) -> None:
    """Handle a confirmed action. No reset repairs a node that computed wrongly: an operator must readmit it."""
    record, action = transition.state.nodes[node], plan.ladder[plan.ladder_step]
    plan.settle_deadline = transition.now + transition.policy.remediation.settle_s
    own = record.health.controller_findings
    cleared_keys = [key for key, finding in own.items() if finding.kind is FindingKind.MEMORY_WRONG]
    transition.clear_findings(node, cleared_keys)
    if cleared_keys and not any(finding.severity is Severity.CRITICAL for finding in own.values()):
        record.quarantine.needs_operator, record.health.defective_gpus = False, []
    transition.log_event("remediation.confirmed", f"{describe_action(action)} of {node} {_outcome(event)}", node=node)
    transition.schedule_treatment(transition.now, node)


def _set_blocked(transition: Transition, record: NodeRecord, plan: ReadmissionPlan, sentence: str) -> None:
    """Log once why nothing is done."""
    if plan.blocked_reason == sentence:
        return
    plan.blocked_reason = sentence
    transition.mark_node_changed(record.node)
    transition.log_event("remediation.blocked", sentence, node=record.node)


def send_to_repair(transition: Transition, node: str, sentence: str) -> None:
    """Keep the node out until an operator readmits it, and hand over the evidence."""
    record = transition.state.nodes[node]
    set_state(transition, node, NodeState.REPAIR, sentence)
    record.quarantine.required_action, record.health.deferred_eviction_key = Action.REPAIR, ""
    record.quarantine.diagnostics = DiagnosticsStatus.NOT_STARTED
    evidence = tuple(f for f in record.all_findings() if f.key in record.quarantine.causes)
    transition.add_verdict(node, Decision.REPAIR, sentence, action=Action.REPAIR, evidence=evidence)
    # like a cordon, a repair keeps other work away
    record.scheduling.cordon_id = _request_remediation(transition, node, RemediationKind.REPAIR, sentence)
    record.scheduling.cordon_failed = record.scheduling.is_cordon_dry_run = False
