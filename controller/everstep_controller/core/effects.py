"""Effects of the core, their description for people and their digest.

The shell writes all effects of one event in one transaction, then pushes the directives. Documents in ``Put...``
effects are the live records: encode them before the next call of ``handle``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec
import xxhash

from everstep.ids import GenerationNumber, JobId, NodeId, TraceId
from everstep.vocabulary import Finding, Verdict
from everstep.wire.v1 import directives
from everstep.wire.v1.operator_history import Evidence
from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.records import FleetRecord, JobRecord, NodeRecord, VersionRecord


class PutFleet(msgspec.Struct, frozen=True, tag=True):
    """Write the fleet's document."""

    doc: FleetRecord


class PutNode(msgspec.Struct, frozen=True, tag=True):
    """Write a node's document."""

    node: NodeId
    doc: NodeRecord


class PutJob(msgspec.Struct, frozen=True, tag=True):
    """Write a job's document."""

    job: JobId
    doc: JobRecord


class DeleteNode(msgspec.Struct, frozen=True, tag=True):
    """Delete the node's document and everything stored for it alone: findings, verdicts, directives, marks."""

    node: NodeId


class DeleteJob(msgspec.Struct, frozen=True, tag=True):
    """Delete the job's document, with its generations, recoveries and versions."""

    job: JobId


class PutGeneration(msgspec.Struct, frozen=True, tag=True):
    """Append a generation. The transaction must fail if (job, number) exists."""

    spec: GenerationSpec
    opened_at: float


class PutVersion(msgspec.Struct, frozen=True, tag=True):
    """Write a version by (job, generation, step), at its commit and again when audits have verified it."""

    doc: VersionRecord


class PutVerdict(msgspec.Struct, frozen=True, tag=True):
    """Append a verdict with a new id."""

    verdict: Verdict


class EventLogEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the append-only event log."""

    kind: str
    """Kind of the entry, such as ``database.unavailable``."""
    sentence: str
    at: float
    """The ``now`` of the event."""
    trace: TraceId = ""
    node: NodeId | None = None
    job: JobId | None = None
    generation: GenerationNumber | None = None
    data: dict[str, str] = {}


class AppendToEventLog(msgspec.Struct, frozen=True, tag=True):
    """Append to the event log."""

    entry: EventLogEntry


class Send(msgspec.Struct, frozen=True, tag=True):
    """Put a directive in the node's outbox under the queue's next number, and push it."""

    node: NodeId
    body: directives.AnyDirective


class RecordFindingRaised(msgspec.Struct, frozen=True, tag=True):
    """Record for the history that a finding was raised or became graver."""

    node: NodeId
    finding: Finding
    at: float


class RecordFindingCleared(msgspec.Struct, frozen=True, tag=True):
    """Record for the history that the finding with this key has cleared."""

    node: NodeId
    key: str
    at: float


class RemediationKind(StrEnum):
    """Actions on a node that the core requests from outside."""

    CORDON = "cordon"
    """Take the node out of service for new work, with a reason."""
    UNCORDON = "uncordon"
    """Lift Everstep's own cordon."""
    RESET_GPU = "reset_gpu"
    REBOOT = "reboot"
    REPAIR = "repair"
    """Hand the node to people, with the evidence."""


class Remediation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One action on a node, offered to the executor until it is confirmed or given up."""

    id: str
    node: NodeId
    kind: RemediationKind
    sentence: str
    at: float
    verdict_id: str = ""
    """Id of the verdict behind the action."""
    trace: TraceId = ""
    gpu_uuids: tuple[str, ...] = ()
    """UUIDs of the GPUs that RESET_GPU resets."""
    evidence: Evidence | None = None
    """Evidence that accompanies REPAIR."""
    deadline: float = 0.0
    """Time at which a reset or reboot without a report counts as failed; 0.0 for other actions."""


class RequestRemediation(msgspec.Struct, frozen=True, tag=True):
    """Carry out the remediation once; ``events.RemediationFinished`` reports the outcome.

    Remediations of a node are carried out in order. One that has not begun is dropped if a later one makes it
    pointless: a cordon by its end; a reset or reboot by the next step, by repair or by readmission.
    """

    remediation: Remediation


Effect = (
    PutFleet
    | PutNode
    | PutJob
    | DeleteNode
    | DeleteJob
    | PutGeneration
    | PutVersion
    | PutVerdict
    | AppendToEventLog
    | Send
    | RecordFindingRaised
    | RecordFindingCleared
    | RequestRemediation
)


MAX_LISTED_NODES = 8
"""Number of a directive's receivers that are named; further ones are counted."""
_encode = msgspec.msgpack.Encoder().encode


def describe(effects: Iterable[Effect]) -> Iterator[str]:
    """Yield one line per decision, and one per directive with all its receivers."""
    sends: dict[str, list[str]] = {}
    for effect in effects:
        if isinstance(effect, PutGeneration):
            copies = [f"{node}->{'+'.join(to) or '-'}" for node, to in effect.spec.replica_nodes.items()]
            spec, restore = effect.spec, _describe_restore_rule(effect)
            yield f"generation {spec.number} ({spec.reason}): {spec.sentence}"
            yield f"  restore {restore}; store on {spec.store_node}; copies {_join_names(copies)}"
        elif isinstance(effect, PutVerdict):
            yield f"verdict {effect.verdict.id} ({effect.verdict.decision}): {effect.verdict.sentence}"
        elif isinstance(effect, PutVersion):
            clean = ", verified" if effect.doc.verified_at is not None else ""
            audited = f"version {effect.doc.version} verified by audits"
            yield audited if effect.doc.audited_at is not None else f"version {effect.doc.version} committed{clean}"
        elif isinstance(effect, RequestRemediation):
            one = effect.remediation
            yield f"remediation {one.id} ({one.kind} {one.node}): {one.sentence}"
        elif (
            isinstance(effect, AppendToEventLog)
            and effect.entry.kind != "generation"
            and not effect.entry.kind.startswith("verdict.")
        ):
            yield f"{effect.entry.kind}: {effect.entry.sentence}"
        elif isinstance(effect, Send):
            sends.setdefault(_describe_directive(effect), []).append(effect.node)
    for directive, nodes in sends.items():
        yield f"to {_join_names(nodes)}: {directive}"


def digest(effects: Iterable[Effect]) -> int:
    """Return the xxh3-64 digest of all decisions: without jobs' secrets, and of records only the judgements."""
    hashed, sent = xxhash.xxh3_64(), None
    for effect in effects:
        if isinstance(effect, Send) and effect.body == sent:  # one directive for a whole job is encoded once
            hashed.update(effect.node.encode() + b"\0")
        else:
            hashed.update(_encode(_digest_input(effect)))
        sent = effect.body if isinstance(effect, Send) else None
    return hashed.intdigest()


def _digest_input(effect: Effect) -> object:
    match effect:
        case PutFleet():
            return effect.doc.breaker_reason
        case PutNode(doc=node):
            orders, way = node.scheduling, node.quarantine
            held = orders.hold_reason, orders.external_cordon_by, node.health.eviction_deferred_by
            way_back = way.required_action, way.causes, way.plan, way.earliest_end, node.history.offence_score
            times = (orders.maintenance_until, *filter(None, [orders.notice_reason]))  # as in journals without notices
            return effect.node, node.state, node.sentence, (*held, *times), way_back
        case PutJob(doc=job):
            member, ceiling = job.membership, job.commits.restore_ceiling
            excluded, number = list(member.excluded_nodes), job.progress.last_number
            return effect.job, job.status.state, number, excluded, ceiling, member.node_limit
        case PutGeneration():
            return _without_secret(effect.spec)
        case Send(body=directives.NewGeneration(spec=spec)):
            return effect.node, _without_secret(spec)
    return effect


def _without_secret(spec: GenerationSpec) -> GenerationSpec:
    return msgspec.structs.replace(spec, secret="")


def _join_names(names: list[str]) -> str:
    more = [f"and {len(names) - MAX_LISTED_NODES} more"] if len(names) > MAX_LISTED_NODES else []
    return " ".join([*names[:MAX_LISTED_NODES], *more])


def _describe_restore_rule(effect: PutGeneration) -> str:
    rule = effect.spec.restore
    bounds = [f"from {rule.floor}" if rule.floor else "", f"up to {rule.ceiling}" if rule.ceiling else ""]
    return "nothing" if rule.from_scratch else " ".join(filter(None, bounds)) or "the newest complete version"


def _describe_directive(effect: Send) -> str:
    body = effect.body
    match body:
        case directives.NewGeneration():
            return f"new generation {body.spec.number} of {body.spec.job}"
        case directives.KillRank():
            return f"kill rank {body.rank} of generation {body.generation}"
        case directives.StopJob():
            return f"stop {body.job} ({'succeeded' if body.ok else 'failed'}): {body.reason}"
        case directives.VersionNotice():
            so_far = f"committed {body.committed}" if body.committed else "nothing committed yet"
            return so_far if body.candidate is None else f"{so_far}, next after step {body.candidate}"
        case directives.SpillVersion():
            return f"write {body.version} to {body.url}"
        case directives.ProtectVersion():
            return f"make parity of {body.version}, {len(body.groups)} shards"
        case directives.RunProbe():
            return f"run {body.probe} among {' '.join(body.nodes)}"
        case directives.PauseNvml():
            return f"close NVML for {body.seconds:g} s" if body.seconds else "open NVML again"
