"""The evidence bundle of a node, from its records."""

from __future__ import annotations

from collections.abc import Iterable

from controller.core.offenders import offender_score
from controller.core.records import NodeRecord
from controller.core.state import FleetState
from everstep.errors import NotFound
from everstep.vocabulary import Finding, Verdict
from everstep.wire.v1.agent import Gpu
from everstep.wire.v1.evidence import FORMAT, Evidence, EvidenceNote


def evidence_of(state: FleetState, node: str, now: float, verdicts: Iterable[Verdict] = ()) -> Evidence:
    """Everything known against the node. ``verdicts``: as stored, where the caller has them; sentences of the newest
    are in the history anyway. Raises NotFound."""
    record = state.nodes.get(node)
    if record is None:
        raise NotFound(f"no node {node}: `everstep nodes` lists them")
    findings = record.known()
    return Evidence(
        format=FORMAT,
        made_at=now,
        node=node,
        state=record.state,
        since=record.since,
        sentence=record.sentence,
        rule=record.course.rule if record.course else "",
        action=record.action,
        domain=record.domain,
        driver_version=record.driver_version,
        agent_version=record.agent_version,
        boot_id=record.boot_id,
        booted_at=record.booted_at,
        gpus=record.gpus,
        host=record.host,
        suspects=suspect_gpus(record, findings),
        findings=findings,
        verdicts=tuple(verdicts),
        evictions=tuple(record.evictions),
        remedied=tuple(at for at in record.remedied if at not in record.dry_runs),
        offences=round(offender_score(record, now, state.policy.offender_half_life_s), 3),
        history=tuple(
            EvidenceNote(at=note.at, what=note.what, sentence=note.sentence, detail=note.detail)
            for note in record.notes
        ),
    )


def suspect_gpus(record: NodeRecord, findings: Iterable[Finding]) -> tuple[Gpu, ...]:
    """The node's GPUs that the findings are about: named by bus id, UUID or index, or condemned by a digest."""
    named = {finding.subject for finding in findings} | set(record.condemned)
    return tuple(gpu for gpu in record.gpus if named & {gpu.uuid, gpu.pci_bus_id, str(gpu.index), f"GPU-{gpu.index}"})
