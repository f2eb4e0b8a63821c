"""Lead nodes back to service: quarantine until the causes clear, then probation with diagnostics."""

from __future__ import annotations

from everstep.clock import Backoff
from everstep.vocabulary import Action, Decision, Finding, FindingKind, NodeState, ProbeKind, Severity
from everstep_controller.core.health import diagnostics, node_state, offences, outbreaks
from everstep_controller.core.health.diagnostics import ProbeOutcome, find_partner, start_probe
from everstep_controller.core.health.node_state import out_of_service_reason, set_state
from everstep_controller.core.policy import LADDER_ACTIONS, BlameIsolationMethod, next_ladder_step
from everstep_controller.core.records import (
    DIAGNOSTICS_DONE,
    DiagnosticsStatus,
    NodeQuarantine,
    NodeRecord,
    ReadmissionPlan,
)
from everstep_controller.core.seats.job_index import clear_exclusion, offer_to_jobs
from everstep_controller.core.seats.membership import is_computing
from everstep_controller.core.transition import Transition

RANK_FINDING_KINDS = (str(FindingKind.RANK_FLAPPING), str(FindingKind.RANK_STRAGGLER))
"""Findings for which jobs blame a node, and which the jobs forgive after its readmission."""


def begin_quarantine(
    transition: Transition,
    node: str,
    sentence: str,
    causes: tuple[Finding, ...],
    *,
    action: Action,
    wait_s: float = 0.0,
    offence_weight: float = offences.EVICTION_WEIGHT,
) -> None:
    """Keep the node out until ``causes`` clear and its waiting time (at least ``wait_s``) has passed."""
    record = transition.state.nodes[node]
    served_s = offences.add_offence(transition, node, offence_weight) if offence_weight else 0.0
    record.quarantine.causes, record.quarantine.cause_cleared_at, record.quarantine.required_action = [], {}, action
    record.quarantine.plan = _next_plan(record.quarantine.plan, offence_weight)
    for finding in causes:
        add_cause(transition, node, finding)
    set_state(transition, node, NodeState.QUARANTINED, sentence)
    least_s = max(wait_s, served_s, transition.policy.readmission.quarantine_min_s)
    record.quarantine.earliest_end = transition.now + least_s
    record.quarantine.diagnostics = DiagnosticsStatus.NOT_STARTED
    transition.schedule_node(record.quarantine.earliest_end, node)
    transition.schedule_treatment(transition.now, node)


def _next_plan(previous: ReadmissionPlan | None, offence_weight: float) -> ReadmissionPlan:
    """Return a new plan that keeps the diagnostics, and the ladder of an action that may still be carried out."""
    plan = ReadmissionPlan(offence_weight=offence_weight)
    if previous is not None:
        plan.required_diagnostics, plan.required_passes = previous.required_diagnostics, previous.required_passes
        if previous.pending_remediation_id:
            plan.rule_id, plan.ladder, plan.ladder_step = previous.rule_id, previous.ladder, previous.ladder_step
            plan.pending_remediation_id = previous.pending_remediation_id
            plan.remediation_deadline = previous.remediation_deadline
    return plan


def add_cause(transition: Transition, node: str, finding: Finding) -> None:
    """Add a cause that must clear. The strongest action among all causes is due."""
    record = transition.state.nodes[node]
    if finding.key in record.quarantine.causes:
        return
    record.quarantine.causes.append(finding.key)
    transition.mark_node_changed(node)
    rule = transition.policy.rules.rule_for(finding)
    plan = record.quarantine.plan = record.quarantine.plan or ReadmissionPlan()
    if plan.pending_remediation_id and (plan.rule_id, plan.ladder) == (rule.id, rule.ladder):
        ladder_step = plan.ladder_step  # the action under way for this rule has not failed yet
    else:
        ladder_step = next_ladder_step(rule, finding, record.history.ladder_steps.get(rule.id, []), transition.now)
    action, gravity = rule.ladder[ladder_step], LADDER_ACTIONS.index
    outbreaks.record_ladder_step(record, rule, action, transition.now)
    is_first = not plan.rule_id
    if is_first or (not plan.pending_remediation_id and gravity(action) > gravity(plan.ladder[plan.ladder_step])):
        plan.rule_id, plan.ladder, plan.ladder_step, plan.settle_deadline = rule.id, rule.ladder, ladder_step, 0.0
        record.quarantine.required_action = action
    plan.required_diagnostics = tuple(dict.fromkeys([*plan.required_diagnostics, *rule.diagnostics]))
    plan.required_passes = max(plan.required_passes, rule.required_passes)
    plan.clear_s = max(plan.clear_s, rule.clear_s)
    plan.cause_signatures[finding.key] = outbreaks.signature(finding)
    plan.rollback_window_s = max(plan.rollback_window_s, rule.correlated_s)
    if finding.kind in outbreaks.NOT_SELF_CLEARING:
        record.quarantine.needs_operator = True
        record.health.defective_gpus = [gpu.uuid for gpu in record.identity.gpus] or [node]


def reconsider_quarantine(transition: Transition, node: str) -> None:
    """Begin probation if causes are clear for long enough, the waiting time is over and no operator is needed."""
    record = transition.state.nodes[node]
    if repair_if_repeat_offender(transition, node):
        return
    causes = [key for key in record.quarantine.causes if _is_cause_active(transition, record, key)]
    if causes != record.quarantine.causes:
        record.quarantine.causes = causes
        transition.mark_node_changed(node)
    if causes or record.quarantine.needs_operator:
        node_state.continue_ladder(transition, node)
    elif record.liveness.reachable and transition.now < record.quarantine.earliest_end:
        transition.schedule_node(record.quarantine.earliest_end, node)
    elif record.liveness.reachable:
        begin_probation(transition, node, f"{node} has no active finding any more")


def repair_if_repeat_offender(transition: Transition, node: str) -> bool:
    """Send a lemon to repair. Return False if the node is none, or if an order keeps it as it is."""
    record = transition.state.nodes[node]
    if not offences.is_repeat_offender(transition, node) or out_of_service_reason(record, transition.now):
        return False
    if node_state.waits_for_rollback_window(transition, node, goes_to_operator=True):
        return True
    node_state.send_to_repair(
        transition, node, f"{node} has failed repeatedly: {offences.describe_score(transition, node)}"
    )
    return True


def _is_cause_active(transition: Transition, record: NodeRecord, key: str) -> bool:
    if key in record.health.agent_findings or key in record.health.controller_findings:
        return True
    clear_s = record.quarantine.plan.clear_s if record.quarantine.plan else 0.0
    due = record.quarantine.cause_cleared_at.get(key, 0.0) + clear_s
    if transition.now < due:
        transition.schedule_treatment(due, record.node)
        return True
    record.quarantine.cause_cleared_at.pop(key, None)
    return False


def begin_probation(transition: Transition, node: str, reason: str) -> None:
    """Begin probation: the required diagnostics, then clean heartbeats. An order that keeps the node out wins."""
    record, live = transition.state.nodes[node], transition.state.node_runtime[node]
    plan = record.quarantine.plan or ReadmissionPlan()
    record.quarantine = NodeQuarantine(
        needs_operator=record.quarantine.needs_operator, probe_failures=record.quarantine.probe_failures, plan=plan
    )
    if why := out_of_service_reason(record, transition.now):
        set_state(transition, node, NodeState.HELD, f"{reason}; {why}")
        return
    live.heartbeats.clean_heartbeats = 0
    _reset_diagnostics(plan)
    needed = transition.policy.readmission.probation_heartbeats
    sentence = f"{reason}; on probation until it has sent {needed} clean heartbeats"
    set_state(transition, node, NodeState.PROBATION, sentence)
    transition.log_event("node.probation", sentence, node=node)
    if not _has_blocking_finding(transition, node):
        begin_diagnostics(transition, node)


def _reset_diagnostics(plan: ReadmissionPlan) -> None:
    plan.remaining_diagnostics = list(plan.required_diagnostics or (ProbeKind.ALL_REDUCE,)) * plan.required_passes
    plan.lacked_partner = False


def begin_diagnostics(transition: Transition, node: str) -> None:
    """Begin the diagnostics of a node on probation."""
    if transition.policy.probes.required:
        run_next_diagnostic(transition, node)
    else:
        transition.state.nodes[node].quarantine.diagnostics = DiagnosticsStatus.SKIPPED
    reconsider_probation(transition, node)


def _has_blocking_finding(transition: Transition, node: str) -> bool:
    """Return whether a finding stands against a node on probation, and have it judged at the end of the event."""
    if not outbreaks.blocking_findings(transition.state, transition.state.nodes[node], transition.now):
        return False
    transition.returning_nodes[node] = None
    return True


def run_next_diagnostic(transition: Transition, node: str) -> None:
    """Run the next diagnostic if none is running."""
    quarantine = transition.state.nodes[node].quarantine
    plan = quarantine.plan = quarantine.plan or ReadmissionPlan()
    transition.mark_node_changed(node)
    if plan.remaining_diagnostics and plan.remaining_diagnostics[0] is not ProbeKind.ALL_REDUCE:
        quarantine.diagnostics = DiagnosticsStatus.RUNNING
        quarantine.probe_id = start_probe(transition, (node,), tested_node=node, kind=plan.remaining_diagnostics[0])
        return
    if plan.remaining_diagnostics:
        partner, busy = find_partner(transition, node, quarantine.probe_failures)
        if partner is not None:
            quarantine.diagnostics = DiagnosticsStatus.RUNNING
            quarantine.probe_id = start_probe(transition, (partner, node), tested_node=node)
            return
        if busy:
            quarantine.diagnostics = DiagnosticsStatus.WAITING
            transition.schedule_treatment(transition.now + transition.policy.probes.partner_wait_s, node)
            return
        plan.remaining_diagnostics = [kind for kind in plan.remaining_diagnostics if kind is not ProbeKind.ALL_REDUCE]
        plan.lacked_partner = True
        transition.log_event(
            "probe.skipped", f"no healthy partner to probe {node} with: clean heartbeats alone decide", node=node
        )
        run_next_diagnostic(transition, node)
        return
    quarantine.diagnostics = DiagnosticsStatus.SKIPPED if plan.lacked_partner else DiagnosticsStatus.PASSED


def can_retry_diagnostic(transition: Transition, node: str) -> bool:
    """Return whether a node on probation waits only for a partner or for a time that has passed."""
    record = transition.state.nodes[node]
    if record.state is not NodeState.PROBATION or record.quarantine.diagnostics is not DiagnosticsStatus.WAITING:
        return False
    lately = any(finding.kind is FindingKind.PROBE_FAILED for finding in record.health.controller_findings.values())
    return not lately and not diagnostics.is_suspect(transition, node)


def handle_probation_probe(transition: Transition, outcome: ProbeOutcome) -> None:
    """Handle the end of a diagnostic on probation."""
    node = outcome.probe.tested_node
    if node is None or transition.state.nodes[node].state is not NodeState.PROBATION:
        return
    quarantine = transition.state.nodes[node].quarantine
    if quarantine.diagnostics is not DiagnosticsStatus.RUNNING or quarantine.probe_id != outcome.probe_id:
        return
    if not outcome.failure:
        record_diagnostic_passed(transition, node)
    elif outcome.incapable_node == node:
        record_diagnostic_failed(transition, node, outcome.failure, offence_weight=0.0)
    elif outcome.has_wrong_result and len(outcome.probe.nodes) == 1:
        _record_wrong_result(transition, node, outcome)
    elif len(outcome.probe.nodes) > 1:
        _open_pair_case(transition, node, outcome)
    else:
        record_diagnostic_failed(transition, node, outcome.failure)


def record_diagnostic_passed(transition: Transition, node: str) -> None:
    """Record a passed diagnostic and run the next one."""
    record = transition.state.nodes[node]
    if record.quarantine.plan is not None:
        record.quarantine.plan.remaining_diagnostics = record.quarantine.plan.remaining_diagnostics[1:]
    run_next_diagnostic(transition, node)
    if record.quarantine.diagnostics is DiagnosticsStatus.PASSED:
        record.quarantine.probe_failures = 0
    reconsider_probation(transition, node)


def _open_pair_case(transition: Transition, node: str, outcome: ProbeOutcome) -> None:
    """Let partners known to be good decide which node of a failed pair is at fault."""
    unable = outcome.incapable_node
    finding = transition.make_finding(FindingKind.PROBE_FAILED, "all-reduce", Severity.CRITICAL, outcome.failure)
    found = dict.fromkeys((node, *(other for other in outcome.probe.nodes if other not in (node, unable))), finding)
    case = diagnostics.open_blame_case(
        transition, BlameIsolationMethod.PAIR, found, outcome.failure, incapable_partner=unable
    )
    if case is None:
        weight = 0.0 if unable else offences.FAILED_PROBE_WEIGHT
        record_diagnostic_failed(transition, node, outcome.failure, offence_weight=weight)
    else:
        transition.state.nodes[node].quarantine.diagnostics = DiagnosticsStatus.WAITING
        transition.mark_node_changed(node)


def record_diagnostic_failed(
    transition: Transition, node: str, failure: str, offence_weight: float = offences.FAILED_PROBE_WEIGHT
) -> None:
    """Return the node to quarantine for a doubled wait. One on which a job computes is only tried again."""
    record, policy = transition.state.nodes[node], transition.policy
    record.quarantine.probe_failures += 1
    waits = Backoff(floor_s=policy.probes.retry_s, ceiling_s=policy.probes.retry_max_s)
    wait_s = waits.limit_s(record.quarantine.probe_failures - 1)
    seated = is_computing(transition.state, node)
    severity = Severity.WARNING if seated else Severity.CRITICAL
    finding = transition.make_finding(FindingKind.PROBE_FAILED, "diagnostics", severity, failure)
    again = f"the next probe runs in {wait_s:g} s or later"
    if seated:
        record.quarantine.plan = record.quarantine.plan or ReadmissionPlan()
        _reset_diagnostics(record.quarantine.plan)
        record.quarantine.diagnostics = DiagnosticsStatus.WAITING
        words = f"{failure}; a job runs on {node} and no fault is proven: it stays on probation; {again}"
        transition.add_verdict(node, Decision.RECOMMEND, words, evidence=(finding,))
        transition.raise_finding(node, finding, wait_s)
        return
    sentence = f"{failure}; {node} stays out of service; {again}"
    begin_quarantine(transition, node, sentence, (), action=Action.DRAIN, wait_s=wait_s, offence_weight=offence_weight)
    transition.add_verdict(node, Decision.QUARANTINE, sentence, action=Action.DRAIN, evidence=(finding,))
    transition.raise_finding(node, finding, wait_s)


def _record_wrong_result(transition: Transition, node: str, outcome: ProbeOutcome) -> None:
    """Record a wrong result of work with a known result. If no rule evicts for it, the diagnostics still restart."""
    memory = outcome.probe.kind is ProbeKind.MEMORY
    kind = FindingKind.MEMORY_WRONG if memory else FindingKind.COMPUTE_WRONG
    action = Action.RESET_GPU if memory else Action.REPAIR
    finding = transition.make_finding(kind, str(outcome.probe.kind), Severity.CRITICAL, outcome.failure, action=action)
    transition.raise_finding(node, finding)
    if not outbreaks.blocks_service(transition.state, transition.state.nodes[node], finding, transition.now):
        record_diagnostic_failed(transition, node, outcome.failure)
    elif not is_computing(transition.state, node):  # otherwise judged like any node on which a job computes
        quarantine_again(transition, node, finding, f"{outcome.failure}; {node} stays quarantined until it is repaired")


def quarantine_again(transition: Transition, node: str, finding: Finding, sentence: str) -> None:
    """Quarantine a node that fell ill on probation. An outbreak can roll this back, as it can an eviction."""
    quarantine_before_service(
        transition, node, finding, sentence, action=finding.action, offence_weight=offences.RELAPSE_WEIGHT
    )


def quarantine_before_service(
    transition: Transition, node: str, finding: Finding, sentence: str, *, action: Action, offence_weight: float = 0.0
) -> None:
    """Quarantine a node before it served. This uses no budget, and an outbreak can roll it back."""
    begin_quarantine(transition, node, sentence, (finding,), action=action, offence_weight=offence_weight)
    record = transition.state.nodes[node]
    if record.quarantine.plan is not None:
        record.quarantine.plan.evicted_at = transition.now
    transition.add_verdict(
        node, Decision.QUARANTINE, sentence, action=record.quarantine.required_action, evidence=(finding,)
    )


def reconsider_seen_on_probation(transition: Transition) -> None:
    """Reconsider the nodes on probation that were heard in this event, after all their findings are known."""
    for node in transition.seen_on_probation:
        reconsider_probation(transition, node)
    transition.seen_on_probation.clear()


def reconsider_probation(transition: Transition, node: str) -> None:
    """Declare the node healthy if its diagnostics passed, enough clean heartbeats came and nothing is pending."""
    record = transition.state.nodes[node]
    if record.state is not NodeState.PROBATION or record.quarantine.diagnostics not in DIAGNOSTICS_DONE:
        return
    if record.quarantine.plan is not None and record.quarantine.plan.pending_remediation_id:
        return
    beats = transition.read_heartbeats(node).clean_heartbeats
    if beats < transition.policy.readmission.probation_heartbeats or not record.liveness.reachable:
        return
    if _has_blocking_finding(transition, node):
        return
    passed = record.quarantine.diagnostics is DiagnosticsStatus.PASSED
    probe = "passed its probe" if passed else "could not be probed (no partner)"
    sentence = f"{node} {probe} and sent {beats} clean heartbeats: {_describe_fitness(transition, node)}"
    plan = record.quarantine.plan
    if plan is not None and plan.rule_id.startswith(RANK_FINDING_KINDS):
        for name in transition.state.node_runtime[node].jobs:
            clear_exclusion(transition, name, node)
    set_state(transition, node, NodeState.HEALTHY, sentence)
    transition.add_verdict(node, Decision.READMIT, sentence)
    offer_to_jobs(transition, node)


def _describe_fitness(transition: Transition, node: str) -> str:
    """Return the end of the readmission sentence; findings of an outbreak may stand on a serving node."""
    record = transition.state.nodes[node]
    spared = dict.fromkeys(
        outbreaks.signature(finding) for finding in outbreaks.spared_findings_of(transition.state, record)
    )
    if not spared:
        return "it is healthy"
    return f"it is in service although it still shows {', '.join(spared)}, because that is an outbreak"
