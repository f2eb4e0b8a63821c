"""Score repeat offenders, collect the evidence on a node and keep the controller's own findings.

Two measures find repeat offenders, and either suffices (H is ``offender_half_life_s``, R is
``offender_repair_score``):

- The score is the sum of ``weight * 0.5 ** (age / H)`` over all offences. It orders spares and sets how long a node
  waits. A steady rate of r offences per half-life leads to a score of about ``r / ln 2``.
- The recent weight is the sum of weights in the half-life that ends with the newest offence. It makes R mean R
  evictions within one half-life, which the score alone never reaches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from everstep.errors import NotFound
from everstep.vocabulary import Finding, Verdict
from everstep.wire.v1.agent import Gpu
from everstep.wire.v1.operator_history import EVIDENCE_FORMAT, Evidence, EvidenceNote
from everstep_controller.core.records import NodeRecord
from everstep_controller.core.state import FleetState
from everstep_controller.core.transition import ControllerFindingChange, Transition

EVICTION_WEIGHT = 1.0
RELAPSE_WEIGHT = 1.0
"""Weight of a new fault on probation."""
FAILED_PROBE_WEIGHT = 0.5
"""Less than an eviction, because partners and networks fail too."""
REMEMBERED = 128
"""Number of offences remembered one by one; a node is in repair long before it reaches this number."""


def offender_score(record: NodeRecord, now: float, half_life_s: float) -> float:
    """Return the node's decayed offence score at ``now``; 0.0 for a node without offences."""
    if not record.history.offence_score:
        return 0.0
    return record.history.offence_score * math.pow(0.5, max(0.0, now - record.history.offence_score_at) / half_life_s)


def current_offender_score(transition: Transition, node: str) -> float:
    """Return ``offender_score`` now, under the policy's half-life."""
    return offender_score(transition.state.nodes[node], transition.now, transition.policy.offender_half_life_s)


def add_offence(transition: Transition, node: str, weight: float) -> None:
    """Add an offence to the node's score."""
    record = transition.state.nodes[node]
    record.history.offence_score = current_offender_score(transition, node) + weight
    record.history.offence_score_at = transition.now
    since = transition.now - transition.policy.offender_half_life_s
    recent = [one for one in record.history.recent_offences if one[0] >= since]
    record.history.recent_offences = [*recent, (transition.now, weight)][-REMEMBERED:]
    transition.mark_node_changed(node)


def clear_offences(record: NodeRecord) -> None:
    """Forget every offence of the node, because it has been repaired."""
    record.history.offence_score, record.history.recent_offences = 0.0, []


def withdraw_offence(transition: Transition, node: str, weight: float, at: float) -> None:
    """Withdraw an offence of ``weight`` that was counted at time ``at``."""
    record = transition.state.nodes[node]
    left = weight * math.pow(0.5, (transition.now - at) / transition.policy.offender_half_life_s)
    record.history.offence_score = max(0.0, current_offender_score(transition, node) - left)
    record.history.offence_score_at = transition.now
    if (at, weight) in record.history.recent_offences:
        record.history.recent_offences.remove((at, weight))
    transition.mark_node_changed(node)


def quarantine_wait_s(transition: Transition, node: str) -> float:
    """Return the minimum seconds in quarantine: 0 for a first offence, then ``offender_wait_s``, doubled per point."""
    score, policy = current_offender_score(transition, node), transition.policy
    if score <= EVICTION_WEIGHT:
        return 0.0
    return min(policy.offender_wait_max_s, policy.offender_wait_s * math.pow(2.0, min(score - 2.0, 30.0)))


def recent_weight(transition: Transition, node: str) -> float:
    """Return the weight of the offences in the half-life before the newest; 0.0 if that is older than a half-life."""
    offences, half_life_s = transition.state.nodes[node].history.recent_offences, transition.policy.offender_half_life_s
    if not offences or offences[-1][0] < transition.now - half_life_s:
        return 0.0
    return sum(weight for at, weight in offences if at >= offences[-1][0] - half_life_s)


def is_repeat_offender(transition: Transition, node: str) -> bool:
    """Return whether the node belongs in repair by either measure, whatever its findings say now."""
    score = max(current_offender_score(transition, node), recent_weight(transition, node))
    return score >= transition.policy.offender_repair_score


def describe_score(transition: Transition, node: str) -> str:
    """Return why the node belongs in repair."""
    score, limit = current_offender_score(transition, node), transition.policy.offender_repair_score
    if score >= limit:
        return f"its offence score is {score:.1f}, and the limit is {limit:g}"
    window_s = transition.policy.offender_half_life_s
    weight = recent_weight(transition, node)
    return f"its offences of the last {window_s:g} s add up to {weight:g}, and the limit is {limit:g}"


def collect_evidence(state: FleetState, node: str, now: float, verdicts: Iterable[Verdict] = ()) -> Evidence:
    """Return the evidence on a node, with stored ``verdicts`` if there are any. Raise NotFound if it is unknown."""
    record = state.nodes.get(node)
    if record is None:
        raise NotFound(f"no node {node}: `everstep nodes` lists them")
    findings, history = record.all_findings(), record.history
    return Evidence(
        format=EVIDENCE_FORMAT,
        created_at=now,
        node=node,
        state=record.state,
        since=record.since,
        sentence=record.sentence,
        rule=record.quarantine.plan.rule_id if record.quarantine.plan else "",
        action=record.quarantine.required_action,
        domain=record.identity.domain,
        driver_version=record.identity.driver_version,
        agent_version=record.identity.agent_version,
        boot_id=record.identity.boot_id,
        booted_at=record.identity.booted_at,
        gpus=record.identity.gpus,
        host=record.identity.host,
        suspect_gpus=suspect_gpus(record, findings),
        findings=findings,
        verdicts=tuple(verdicts),
        eviction_times=tuple(record.history.eviction_times),
        remediation_times=tuple(at for at in history.remediation_times if at not in history.dry_run_times),
        offence_score=round(offender_score(record, now, state.policy.offender_half_life_s), 3),
        history=tuple(
            EvidenceNote(at=note.at, kind=note.kind, sentence=note.sentence, detail=note.detail)
            for note in record.history.entries
        ),
    )


def suspect_gpus(record: NodeRecord, findings: Iterable[Finding]) -> tuple[Gpu, ...]:
    """Return the GPUs that the findings name by bus id, UUID or index, or that computed wrongly."""
    named = {finding.subject for finding in findings} | set(record.health.defective_gpus)
    return tuple(
        gpu for gpu in record.identity.gpus if named & {gpu.uuid, gpu.pci_bus_id, str(gpu.index), f"GPU-{gpu.index}"}
    )


# Controller findings: findings that the controller itself raises on a node.
#
# A finding is stored at once and judged by its rule at the end of the event (``findings.judge_controller_findings``),
# or earlier if a rule needs the result.


def raise_controller_finding(
    transition: Transition, node: str, finding: Finding, lasts_s: float = 0.0, proof: str = ""
) -> None:
    """Store a finding until it is cleared, or until it was not seen for ``lasts_s`` seconds (0.0: no limit)."""
    record = transition.state.nodes[node]
    before = record.health.controller_findings.get(finding.key)
    transition.controller_finding_changes.append(ControllerFindingChange(node, before, finding, proof))
    record.health.controller_findings[finding.key] = finding
    transition.mark_node_changed(node)
    record.health.controller_findings_until.pop(finding.key, None)
    if lasts_s:
        extend_controller_finding(transition, node, finding.key, lasts_s)


def extend_controller_finding(transition: Transition, node: str, key: str, lasts_s: float) -> None:
    """Extend a standing finding by ``lasts_s`` seconds from now."""
    record = transition.state.nodes[node]
    record.health.controller_findings_until[key] = transition.now + lasts_s
    transition.mark_node_changed(node)
    transition.schedule_treatment(record.health.controller_findings_until[key], node)


def clear_controller_findings(
    transition: Transition, node: str, keys: Iterable[str] | None = None, reason: str = ""
) -> None:
    """Clear the findings with these keys, or all. ``reason`` is the sentence for the audit log."""
    record = transition.state.nodes[node]
    for key in list(record.health.controller_findings if keys is None else keys):
        finding = record.health.controller_findings.pop(key, None)
        record.health.controller_findings_until.pop(key, None)
        if finding is None:
            continue
        if key in record.quarantine.causes:
            record.quarantine.cause_cleared_at[key] = transition.now
        transition.mark_node_changed(node)
        transition.controller_finding_changes.append(ControllerFindingChange(node, finding, None, reason))


def expire_controller_findings(transition: Transition, node: str) -> None:
    """Clear findings that were not seen again in time."""
    record = transition.state.nodes[node]
    for key, until in list(record.health.controller_findings_until.items()):
        if transition.now < until:
            transition.schedule_treatment(until, node)
        else:
            clear_controller_findings(transition, node, [key], f"{key} was not seen again on {node}")
