"""Score repeat offenders, collect the evidence on a node and let the controller's own findings expire.

Two measures find repeat offenders, and either suffices (H is ``offenders.half_life_s``, R is
``offenders.repair_score``):

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
from everstep_controller.core.transition import Transition

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
    return offender_score(transition.state.nodes[node], transition.now, transition.policy.offenders.half_life_s)


def add_offence(transition: Transition, node: str, weight: float) -> float:
    """Add an offence to the node's score. Return the minimum seconds in quarantine for it."""
    record = transition.state.nodes[node]
    record.history.offence_score = current_offender_score(transition, node) + weight
    record.history.offence_score_at = transition.now
    since = transition.now - transition.policy.offenders.half_life_s
    recent = [offence for offence in record.history.recent_offences if offence[0] >= since]
    record.history.recent_offences = [*recent, (transition.now, weight)][-REMEMBERED:]
    transition.mark_node_changed(node)
    return _quarantine_wait_s(transition, node) if weight >= EVICTION_WEIGHT else 0.0


def clear_offences(record: NodeRecord) -> None:
    """Forget every offence of the node, because it has been repaired."""
    record.history.offence_score, record.history.recent_offences = 0.0, []


def withdraw_offence(transition: Transition, node: str, weight: float, at: float) -> None:
    """Withdraw an offence of ``weight`` that was counted at time ``at``."""
    record = transition.state.nodes[node]
    left = weight * math.pow(0.5, (transition.now - at) / transition.policy.offenders.half_life_s)
    record.history.offence_score = max(0.0, current_offender_score(transition, node) - left)
    record.history.offence_score_at = transition.now
    if (at, weight) in record.history.recent_offences:
        record.history.recent_offences.remove((at, weight))
    transition.mark_node_changed(node)


def _quarantine_wait_s(transition: Transition, node: str) -> float:
    """Return the minimum seconds in quarantine: 0 for a first offence, then ``offenders.wait_s``, doubled per point."""
    score, policy = current_offender_score(transition, node), transition.policy
    if score <= EVICTION_WEIGHT:
        return 0.0
    return min(policy.offenders.wait_max_s, policy.offenders.wait_s * math.pow(2.0, min(score - 2.0, 30.0)))


def recent_weight(transition: Transition, node: str) -> float:
    """Return the weight of the offences in the half-life before the newest; 0.0 if that is older than a half-life."""
    offences = transition.state.nodes[node].history.recent_offences
    half_life_s = transition.policy.offenders.half_life_s
    if not offences or offences[-1][0] < transition.now - half_life_s:
        return 0.0
    return sum(weight for at, weight in offences if at >= offences[-1][0] - half_life_s)


def is_repeat_offender(transition: Transition, node: str) -> bool:
    """Return whether the node belongs in repair by either measure, whatever its findings say now."""
    score = max(current_offender_score(transition, node), recent_weight(transition, node))
    return score >= transition.policy.offenders.repair_score


def describe_score(transition: Transition, node: str) -> str:
    """Return why the node belongs in repair."""
    score, limit = current_offender_score(transition, node), transition.policy.offenders.repair_score
    if score >= limit:
        return f"its offence score is {score:.1f}, and the limit is {limit:g}"
    window_s = transition.policy.offenders.half_life_s
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
        offence_score=round(offender_score(record, now, state.policy.offenders.half_life_s), 3),
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


def expire_controller_findings(transition: Transition, node: str) -> None:
    """Clear findings that were not seen again in time."""
    record = transition.state.nodes[node]
    for key, until in list(record.health.controller_findings_until.items()):
        if transition.now < until:
            transition.schedule_treatment(until, node)
        else:
            transition.clear_findings(node, [key], f"{key} was not seen again on {node}")
