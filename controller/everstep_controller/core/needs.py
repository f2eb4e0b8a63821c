"""List what needs a person: every matter that no automatic action will settle.

The web page, ``everstep status``, the alerts and the REST API show this list and no other. A fleet is well only if the
list is empty. An order of a person is not on it: that person has decided already.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from everstep.vocabulary import Action, Finding, JobState, Mode, NodeState, Severity
from everstep.wire.v1.operator import Need
from everstep_controller.core.health.eviction import describe_deferral
from everstep_controller.core.health.node_state import REMEDIATION_KINDS, out_of_service_reason, was_dry_run
from everstep_controller.core.health.outbreaks import active_outbreaks, signature, spared_findings_of
from everstep_controller.core.policy import describe_action
from everstep_controller.core.records import IN_SERVICE, JobRecord, NodeRecord, UndecidedReason
from everstep_controller.core.seats.membership import is_computing
from everstep_controller.core.state import FleetState, ScopeKind

LOST_PATIENCE_S = 600.0
"""Seconds for which a lost node may be away before it needs a person: the longest usual reboot."""
CLEARING_PATIENCE_S = 900.0
"""Seconds for which findings that may clear by themselves, such as a temperature, may keep a node in quarantine."""
FAILED_JOB_S = 3600.0
"""Seconds for which a failed job is listed."""
BEING_JUDGED = (UndecidedReason.BOOT_GRACE, UndecidedReason.BLAME_ISOLATION, UndecidedReason.OUTBREAK)
"""Reasons for which a finding will be judged without a person."""


class NeedKind(StrEnum):
    """Kind of a matter that needs a person."""

    DATABASE_OUTAGE = "database_outage"
    BREAKER = "breaker"
    OUTBREAK = "outbreak"
    JOB_PAUSED = "job_paused"
    JOB_FAILED = "job_failed"
    JOB_NOTICE = "job_notice"
    """Ranks of a running job that make no progress, and that no rule replaces soon (``StallNotice``)."""
    DEFERRED_EVICTION = "deferred_eviction"
    CRITICAL_FINDING = "critical_finding"
    """A critical finding on a node that serves, which no rule acts on."""
    QUARANTINE = "quarantine"
    """A quarantine whose next step is a person's."""
    REPAIR = "repair"
    LOST = "lost"
    DRY_RUN = "dry_run"
    """A remediation that only the dry run received, so it is not carried out."""


def list_needs(state: FleetState, now: float) -> list[Need]:
    """Return everything that needs a person, the gravest first. O(nodes and jobs)."""
    needs = [*_fleet_needs(state), *_job_needs(state, now)]
    for record in state.nodes.values():
        if not is_unblemished(record):
            needs += node_needs(state, record, now)
    return sorted(needs, key=lambda need: need.severity != Severity.CRITICAL)


def is_unblemished(record: NodeRecord) -> bool:
    """Return whether the node is healthy and nothing stands against it; cheap, for the most nodes of a fleet."""
    health = record.health
    if health.agent_findings or health.controller_findings or health.deferred_eviction_key:
        return False
    return record.state is NodeState.HEALTHY


def service_faults(state: FleetState, record: NodeRecord, now: float) -> list[Need]:
    """Return the faults with which the node serves and that need a person. A node with any is not healthy."""
    return list(_service_needs(state, record, now)) if record.state in IN_SERVICE else []


# The fleet and its jobs


def _fleet_needs(state: FleetState) -> Iterator[Need]:
    if state.database.outage:
        yield _need(
            NeedKind.DATABASE_OUTAGE,
            "fleet",
            state.database.outage_since,
            f"the database is unavailable: {state.database.outage}",
            "Running jobs regroup, and nothing else is decided. Repair the database.",
        )
    if state.fleet.breaker_reason:
        yield _need(
            NeedKind.BREAKER,
            "fleet",
            state.fleet.breaker_tripped_at,
            state.fleet.breaker_reason,
            "Find the cause, then reset the breaker.",
            "everstep reset-breaker --reason WHY",
        )
    for outbreak in active_outbreaks(state):
        yield _need(
            NeedKind.OUTBREAK,
            outbreak.name,
            outbreak.since,
            outbreak.sentence(len(state.nodes)),
            f"{outbreak.advice()}.",
            "everstep nodes --state outbreak",
            finding=outbreak.name,
        )


def _job_needs(state: FleetState, now: float) -> Iterator[Need]:
    for job in state.jobs.values():
        status = job.status
        if status.state is JobState.PAUSED:
            advice = (
                "The job continues by itself once it has enough nodes: readmit one, or start a launcher on a spare."
            )
            yield _job_need(NeedKind.JOB_PAUSED, job, status.since, status.sentence, advice)
        elif status.state is JobState.FAILED and not status.is_stopped and now - status.since < FAILED_JOB_S:
            advice = "Look at the cause, then start the job again."
            yield _job_need(NeedKind.JOB_FAILED, job, status.since, status.sentence, advice)
        elif job.is_running and (live := state.job_runtime.get(job.job)) is not None:
            notice = live.regroup.stall_notice
            if notice is not None and notice.needs_person:
                advice = "Look at the stacks, and stop the job if this will not end."
                reason = notice.sentence(now)
                yield _job_need(NeedKind.JOB_NOTICE, job, notice.since, reason, advice, severity=Severity.WARNING)


def _job_need(
    kind: NeedKind,
    job: JobRecord,
    since: float,
    reason: str,
    advice: str,
    severity: Severity = Severity.CRITICAL,
) -> Need:
    command = f"everstep events --job {job.job} --limit 20"
    return _need(kind, job.job, since, reason, advice, command, severity=severity, job=job.job)


# Nodes


def node_needs(state: FleetState, record: NodeRecord, now: float) -> Iterator[Need]:
    """Yield what needs a person on the node."""
    match record.state:
        case NodeState.HEALTHY | NodeState.SUSPECT | NodeState.PROBATION:
            yield from _service_needs(state, record, now)
        case NodeState.QUARANTINED:
            yield from _quarantine_needs(state, record, now)
        case NodeState.REPAIR:
            yield _repair_need(record)
        case NodeState.LOST if now - record.since >= LOST_PATIENCE_S:
            yield _lost_need(record)
        case NodeState.HELD if _has_critical(record) and is_computing(state, record.node):
            yield from _service_needs(state, record, now)


def _service_needs(state: FleetState, record: NodeRecord, now: float) -> Iterator[Need]:
    """Yield the faults of a node that serves: its deferred eviction, else each critical finding that stands."""
    if (key := record.health.deferred_eviction_key) and (finding := record.get_finding(key)) is not None:
        yield _deferral_need(state, record, finding, now)
    elif _has_critical(record):
        spared = {finding.key for finding in spared_findings_of(state, record)}
        for finding in record.all_findings():
            if finding.severity is Severity.CRITICAL and finding.key not in spared:
                yield from _finding_need(state, record, finding)


def _has_critical(record: NodeRecord) -> bool:
    return any(finding.severity is Severity.CRITICAL for finding in record.all_findings())


def _deferral_need(state: FleetState, record: NodeRecord, finding: Finding, now: float) -> Need:
    node, scope = record.node, record.health.eviction_deferred_by
    match ScopeKind.of(scope):
        case ScopeKind.NEEDED:
            advice = (
                f"Give the job another node, and {node} is evicted then. To evict it now and pause the job, order it."
            )
        case ScopeKind.FLEET:
            advice = "Find the cause and reset the breaker, or evict the node now."
        case ScopeKind.DATABASE:
            advice = "Repair the database, and the node is evicted then."
        case _:
            advice = (
                "Look for a common cause. The node is judged again once the budget is free; to evict it now, order it."
            )
    reason = (
        f"{node} serves with {_describe(record, finding)}; it is not evicted: {describe_deferral(state, record, now)}"
    )
    return _finding_entry(
        NeedKind.DEFERRED_EVICTION, record, finding, reason, advice, f"everstep node evict {node} --reason WHY"
    )


def _finding_need(state: FleetState, record: NodeRecord, finding: Finding) -> Iterator[Need]:
    """Yield a critical finding unless a person has accepted it, it is being judged, or a rule has dealt with it."""
    rule, node = state.policy.rules.rule_for(finding), record.node
    undecided = record.health.undecided_findings.get(finding.key)
    if finding.key in record.health.accepted_findings or undecided in BEING_JUDGED:
        return
    if rule.already_handled and rule.n_of_m[0] == 1:
        return
    mode, counts = rule.effective_mode(finding), rule.counts_against_node(finding)
    steps = record.history.ladder_steps.get(rule.id, [])
    if mode is Mode.ENFORCE and counts and steps and steps[-1][1] is Action.RESTART_RANK:
        return  # the rank was replaced, and the finding clears in its time
    if undecided is UndecidedReason.RESTART_CAP:
        why = "the fleet has used up its automatic restarts of ranks"
    elif mode is not Mode.ENFORCE:
        why = f"rule {rule.id} may only {mode}"
    elif not counts:
        why = f"rule {rule.id} has no action for it"
    elif rule.n_of_m[0] > 1:
        why = f"rule {rule.id} acts on {rule.n_of_m[0]} of {rule.n_of_m[1]} such reports"
    else:
        why = f"rule {rule.id} has not taken the node out"
    recommended = "Inspect it" if finding.action is Action.NONE else f"Recommended: {describe_action(finding.action)}"
    advice = f"{recommended}. Drain {node} first; `everstep node readmit` accepts the finding."
    reason = f"{node} serves with {_describe(record, finding)}; nothing is done about it: {why}"
    yield _finding_entry(
        NeedKind.CRITICAL_FINDING, record, finding, reason, advice, f"everstep node drain {node} --reason WHY"
    )


def _finding_entry(
    kind: NeedKind, record: NodeRecord, finding: Finding, reason: str, advice: str, command: str
) -> Need:
    gpu = gpu_label(record, finding)
    return _need(
        kind,
        record.node,
        finding.since or record.health.finding_seen_at.get(finding.key, record.since),
        reason,
        advice,
        command,
        node=record.node,
        gpu=gpu,
        finding=signature(finding) if gpu else finding.key,
    )


class ManualStep(NamedTuple):
    """A step out of quarantine that a person has to take."""

    reason: str
    advice: str
    command: str


def _quarantine_needs(state: FleetState, record: NodeRecord, now: float) -> Iterator[Need]:
    """Yield at most one need of a quarantined node: a manual step, or a remediation that only the dry run received."""
    node, dry = record.node, _dry_run_note(record)
    if (step := _manual_step(state, record, now)) is not None:
        reason = f"{node} waits for a person: {'; '.join(filter(None, (step.reason, dry)))}. {record.sentence}"
        yield _node_need(NeedKind.QUARANTINE, record, reason, step.advice, step.command)
    elif dry:
        advice = f"Do it by hand, or set remediation_backend. {node} returns by itself once its findings clear."
        command = f"everstep remediations --node {node}"
        yield _node_need(NeedKind.DRY_RUN, record, f"{node}: {dry}. {record.sentence}", advice, command)


def _manual_step(state: FleetState, record: NodeRecord, now: float) -> ManualStep | None:
    """Return the next step out of quarantine if it is a person's; None if not, or if a person keeps the node out."""
    quarantine, plan, node = record.quarantine, record.quarantine.plan, record.node
    readmit = _after_repair(node), f"everstep node readmit {node} --reason WHY"
    look = f"everstep node show {node}"
    if out_of_service_reason(record, now):
        return None
    if quarantine.needs_operator and not (plan is not None and plan.pending_remediation_id):
        return ManualStep("only an operator can readmit it", *readmit)
    if not record.liveness.reachable and now - record.liveness.lost_at >= LOST_PATIENCE_S:
        return ManualStep("its agent is not heard", "Look at its power, network and agent.", look)
    if not quarantine.causes or plan is None or not plan.ladder:
        return None
    action = plan.ladder[plan.ladder_step]
    if action is Action.REPAIR or action in REMEDIATION_KINDS:
        if state.policy.remediation.mode is Mode.ENFORCE:
            return None
        reason = f"its next step is manual: {describe_action(action)} (remediation.mode is {_mode(state)})"
        advice = f"Take this step by hand. {node} returns by itself once its findings clear."
        return ManualStep(reason, advice, look)
    if now - record.since < CLEARING_PATIENCE_S:
        return None
    return ManualStep(f"{', '.join(quarantine.causes)} has not cleared by itself", "Look for the cause.", look)


def _mode(state: FleetState) -> str:
    return str(state.policy.remediation.mode)


def _dry_run_note(record: NodeRecord) -> str:
    """Return which remediation in force only the dry run received; "" for none."""
    plan, missed = record.quarantine.plan, []
    if plan is not None and plan.settle_deadline and was_dry_run(record):
        missed.append("to reset or reboot it")
    if record.scheduling.cordon_id and record.scheduling.is_cordon_dry_run:
        missed.append("to repair it" if record.state is NodeState.REPAIR else "to keep other work away from it")
    return f"no system was asked {' or '.join(missed)} (remediation_backend is dry_run)" if missed else ""


def _repair_need(record: NodeRecord) -> Need:
    reason = "; ".join(filter(None, (record.sentence, _dry_run_note(record))))
    command = f"everstep node readmit {record.node} --reason WHY"
    return _node_need(NeedKind.REPAIR, record, reason, _after_repair(record.node), command, Severity.CRITICAL)


def _lost_need(record: NodeRecord) -> Need:
    advice = "Look at its power, network and agent. It returns by itself; if it is gone for good, forget it."
    return _node_need(
        NeedKind.LOST, record, record.sentence, advice, f"everstep node forget {record.node} --reason WHY"
    )


def _after_repair(node: str) -> str:
    return f"`everstep node show {node}` has the evidence. Readmit the node once the cause is repaired."


def _node_need(
    kind: NeedKind,
    record: NodeRecord,
    reason: str,
    advice: str,
    command: str,
    severity: Severity = Severity.WARNING,
) -> Need:
    """Return a need of a node that is out, with GPU and finding of its first cause, which stay the same meanwhile."""
    gpu, finding = _first_cause(record)
    return _need(
        kind,
        record.node,
        record.since,
        "; ".join(filter(None, (reason, record.scheduling.hold_reason))),
        advice,
        command,
        severity=severity,
        node=record.node,
        gpu=gpu,
        finding=finding,
    )


def out_of_service(record: NodeRecord) -> Need:
    """Return why the node is out, in the form of a need, for a node that returns without a person."""
    severity = Severity.CRITICAL if record.state is NodeState.REPAIR else Severity.WARNING
    advice = "It returns by itself, through a probe."
    return _node_need(
        NeedKind.QUARANTINE, record, record.sentence, advice, f"everstep node show {record.node}", severity
    )


def _first_cause(record: NodeRecord) -> tuple[str, str]:
    """Return the GPU and the signature of the finding that took the node out; empty strings for none."""
    plan = record.quarantine.plan
    if plan is None or not plan.cause_signatures:
        return "", ""
    key, name = next(iter(plan.cause_signatures.items()))
    kind, _, xid = name.partition("/")
    subject = key.removeprefix(f"{kind}/").removesuffix(f"/{xid}" if xid else "")
    gpu = _gpu(record, kind, subject)
    return gpu, name if gpu else key


def gpu_label(record: NodeRecord, finding: Finding) -> str:
    """Return the index of the GPU that the finding names, or its subject if the node's GPUs do not include it."""
    return _gpu(record, finding.kind, finding.subject)


def _gpu(record: NodeRecord, kind: str, subject: str) -> str:
    names = (
        (gpu.index, {gpu.uuid, gpu.pci_bus_id, str(gpu.index), f"GPU-{gpu.index}"}) for gpu in record.identity.gpus
    )
    index = next((index for index, known in names if subject in known), None)
    if index is not None:
        return str(index)
    return subject if kind.startswith("gpu.") else ""


def _describe(record: NodeRecord, finding: Finding) -> str:
    """Return the finding in words, with its GPU."""
    gpu = gpu_label(record, finding)
    place = f" on GPU {gpu}" if gpu else f" on {finding.subject}"
    return f"{signature(finding)}{place} ({finding.message})"


def _need(
    kind: NeedKind,
    subject: str,
    since: float,
    reason: str,
    advice: str,
    command: str = "",
    *,
    severity: Severity = Severity.CRITICAL,
    node: str = "",
    job: str = "",
    gpu: str = "",
    finding: str = "",
) -> Need:
    return Need(
        kind=str(kind),
        severity=str(severity),
        subject=subject,
        since=since,
        reason=reason,
        advice=advice,
        command=command,
        node=node,
        job=job,
        gpu=gpu,
        finding=finding,
    )
