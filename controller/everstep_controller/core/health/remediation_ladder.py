"""Remediate nodes that are out, step by step, within caps, each step confirmed before readmission."""

from __future__ import annotations

import math

from everstep.vocabulary import Action, Decision, FindingKind, Mode, NodeState, Severity
from everstep_controller.core.events import RemediationFinished
from everstep_controller.core.health import node_state, offences
from everstep_controller.core.health.node_state import out_of_service_reason, set_state
from everstep_controller.core.health.offences import clear_controller_findings
from everstep_controller.core.health.outbreaks import ACTION_DELAY_S, rollback_possible_until
from everstep_controller.core.jobs.membership import jobs_seated_on
from everstep_controller.core.policy import append_ladder_step, describe_action
from everstep_controller.core.records import DiagnosticsStatus, HistoryKind, NodeRecord, ReadmissionPlan
from everstep_controller.core.transition import Transition

SEAT_RECHECK_S = 1.0
"""Seconds until a node that its jobs have not left yet is checked again."""


def continue_ladder(transition: Transition, node: str) -> None:
    """Request the action that is due for the standing causes, if the policy allows."""
    record, plan = transition.state.nodes[node], transition.state.nodes[node].quarantine.plan
    if (
        plan is None
        or not plan.ladder
        or transition.policy.remediation_mode is not Mode.ENFORCE
        or transition.state.database_outage
    ):
        return
    if record.quarantine.needs_operator and not record.health.defective_gpus:
        _set_blocked(transition, record, plan, f"an operator took {node} out of service: no automatic action")
    elif why := out_of_service_reason(record, transition.now):
        _set_blocked(transition, record, plan, f"{why}: no automatic action")
    elif plan.pending_remediation_id:
        _check_remediation_deadline(transition, node, plan)
    elif plan.settle_deadline and transition.now < plan.settle_deadline:
        transition.schedule_treatment(plan.settle_deadline, node)
    elif plan.settle_deadline:
        how = "was only a dry run" if node_state.was_dry_run(record) else "was confirmed"
        _advance_ladder(transition, node, plan, f"{how}, but the finding is still active")
    else:
        _take_step(transition, node, plan)


def _check_remediation_deadline(transition: Transition, node: str, plan: ReadmissionPlan) -> None:
    if transition.now < plan.remediation_deadline:
        transition.schedule_treatment(plan.remediation_deadline, node)
        return
    plan.pending_remediation_id = ""
    _advance_ladder(transition, node, plan, f"was not reported within {transition.policy.remediation_timeout_s:g} s")


def _take_step(transition: Transition, node: str, plan: ReadmissionPlan) -> None:
    record, action = transition.state.nodes[node], plan.ladder[plan.ladder_step]
    place = f"step {plan.ladder_step + 1} of {len(plan.ladder)} of rule {plan.rule_id}"
    if _waits_for_rollback_window(transition, node, goes_to_operator=action is Action.REPAIR):
        return
    if action is Action.REPAIR:
        send_to_repair(
            transition,
            node,
            f"{node} needs manual repair: {', '.join(record.quarantine.causes)} is still active, and repair is {place}",
        )
    elif action not in node_state.REMEDIATION_KINDS:
        return
    elif jobs_seated_on(transition.state, node):
        transition.schedule_treatment(
            math.floor(transition.now) + SEAT_RECHECK_S, node
        )  # rounding to whole seconds merges repeated requests into one check
    elif why := node_state.node_remediation_cap(transition, node):
        if _waits_for_rollback_window(transition, node, goes_to_operator=True):
            return
        send_to_repair(
            transition,
            node,
            f"{node} needs manual repair: {', '.join(record.quarantine.causes)} is still active, and {why}",
        )
    elif (fleet := node_state.fleet_remediation_cap(transition))[0]:
        _set_blocked(transition, record, plan, f"{describe_action(action)} of {node} waits: {fleet[0]}")
        transition.schedule_treatment(fleet[1], node)
    else:
        sentence = f"{describe_action(action)} of {node} because of {', '.join(record.quarantine.causes)} ({place})"
        plan.pending_remediation_id = node_state.start_remediation(transition, node, action, sentence)
        plan.remediation_deadline = transition.now + transition.policy.remediation_timeout_s
        plan.blocked_reason, record.quarantine.required_action = "", action
        if (rule := transition.policy.rules.find_rule(plan.rule_id)) is not None:  # a repeat takes the next step
            record.history.ladder_steps[rule.id] = append_ladder_step(
                record.history.ladder_steps.get(rule.id, []), rule, action, transition.now
            )
        transition.audit(
            "remediation.requested", sentence, node=node, data={"remediation": plan.pending_remediation_id}
        )
        transition.schedule_treatment(plan.remediation_deadline, node)


def _waits_for_rollback_window(transition: Transition, node: str, *, goes_to_operator: bool) -> bool:
    """Return whether the action must wait because an outbreak can still roll the eviction back.

    A machine is left alone for ``ACTION_DELAY_S``. A node goes to people (``goes_to_operator``) only after the rollback
    window, because they would act on it.
    """
    record = transition.state.nodes[node]
    reserve = rollback_possible_until(record)
    due = reserve if goes_to_operator else min(reserve, record.since + ACTION_DELAY_S)
    if transition.now < due:
        transition.schedule_treatment(math.ceil(due), node)
    return transition.now < due


def _advance_ladder(transition: Transition, node: str, plan: ReadmissionPlan, reason: str) -> None:
    record, action = transition.state.nodes[node], plan.ladder[plan.ladder_step]
    plan.settle_deadline = 0.0
    transition.mark_node_changed(node)
    sentence = f"{describe_action(action)} of {node} {reason}"
    transition.audit("remediation.failed", sentence, node=node)
    transition.append_history(node, HistoryKind.ACTION, sentence)
    if plan.ladder_step + 1 < len(plan.ladder):
        plan.ladder_step += 1
    elif not out_of_service_reason(
        record, transition.now
    ):  # the holder may repair the node, so the last step is repeated afterwards
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
    plan = record.quarantine.plan
    if plan is not None and plan.pending_remediation_id == event.remediation_id:
        plan.pending_remediation_id = ""
        if event.dry_run:
            node_state.note_dry_run(record)
        if record.state is not NodeState.QUARANTINED:
            transition.schedule_treatment(transition.now, event.node)
        elif event.succeeded:
            _handle_confirmed(transition, event.node, plan, event)
        else:
            _advance_ladder(transition, event.node, plan, f"failed ({event.detail})")
        return
    if not event.succeeded:
        transition.audit(
            "remediation.failed", f"{event.remediation_id} of {event.node} failed: {event.detail}", node=event.node
        )
        if record.scheduling.cordon_id == event.remediation_id:
            record.scheduling.cordon_failed = True


def _outcome(event: RemediationFinished) -> str:
    return "would have been carried out (dry run: nothing was done)" if event.dry_run else "was carried out"


def _handle_confirmed(transition: Transition, node: str, plan: ReadmissionPlan, event: RemediationFinished) -> None:
    """Handle a confirmed action.

    Sensors report whether their findings clear, and diagnostics show whether memory holds its patterns. No reset
    repairs a node that computed wrongly; it stays out until an operator readmits it.
    """
    record, action = transition.state.nodes[node], plan.ladder[plan.ladder_step]
    plan.settle_deadline = transition.now + transition.policy.remediation_settle_s
    cleared_keys = [
        key for key, finding in record.health.controller_findings.items() if finding.kind is FindingKind.MEMORY_WRONG
    ]
    clear_controller_findings(transition, node, cleared_keys)
    if cleared_keys and not any(
        finding.severity is Severity.CRITICAL for finding in record.health.controller_findings.values()
    ):
        record.quarantine.needs_operator, record.health.defective_gpus = False, []
    transition.audit("remediation.confirmed", f"{describe_action(action)} of {node} {_outcome(event)}", node=node)
    transition.schedule_treatment(transition.now, node)


def _set_blocked(transition: Transition, record: NodeRecord, plan: ReadmissionPlan, sentence: str) -> None:
    """Log once why nothing is done."""
    if plan.blocked_reason == sentence:
        return
    plan.blocked_reason = sentence
    transition.mark_node_changed(record.node)
    transition.audit("remediation.blocked", sentence, node=record.node)


def send_to_repair(transition: Transition, node: str, sentence: str) -> None:
    """Keep the node out until an operator readmits it, and hand over the evidence."""
    record = transition.state.nodes[node]
    set_state(transition, node, NodeState.REPAIR, sentence)
    record.quarantine.required_action, record.health.deferred_eviction_key = Action.REPAIR, ""
    record.quarantine.diagnostics = DiagnosticsStatus.NOT_STARTED
    evidence = tuple(f for f in record.all_findings() if f.key in record.quarantine.causes)
    transition.add_verdict(node, Decision.REPAIR, sentence, action=Action.REPAIR, evidence=evidence)
    node_state.request_repair(transition, node, sentence)


def repair_if_repeat_offender(transition: Transition, node: str) -> bool:
    """Send a lemon to repair. Return False if the node is none, or if an order keeps it as it is."""
    if not offences.is_repeat_offender(transition, node) or out_of_service_reason(
        transition.state.nodes[node], transition.now
    ):
        return False
    if _waits_for_rollback_window(transition, node, goes_to_operator=True):
        return True
    send_to_repair(transition, node, f"{node} has failed repeatedly: {offences.describe_score(transition, node)}")
    return True
