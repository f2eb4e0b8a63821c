"""What the core wants done. The shell writes all effects of one event in one transaction, then pushes the sends.

The documents in ``Put...`` effects are the live records: encode them before the next call of ``handle``.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from controller.core.records import FleetRecord, JobRecord, NodeRecord, VersionRecord
from everstep.ids import GenerationNumber, JobId, NodeId, TraceId
from everstep.vocabulary import Finding, Verdict
from everstep.wire.v1.directives import AnyDirective
from everstep.wire.v1.evidence import Evidence
from everstep.wire.v1.training import GenerationSpec


class PutFleet(msgspec.Struct, frozen=True, tag=True):
    """Write the fleet's one document."""

    doc: FleetRecord


class PutNode(msgspec.Struct, frozen=True, tag=True):
    """Write a node's document."""

    node: NodeId
    doc: NodeRecord


class PutJob(msgspec.Struct, frozen=True, tag=True):
    """Write a job's document."""

    job: JobId
    doc: JobRecord


class DropNode(msgspec.Struct, frozen=True, tag=True):
    """Delete the node's document, and what is kept for it alone: standing findings, verdicts, directives, marks."""

    node: NodeId


class DropJob(msgspec.Struct, frozen=True, tag=True):
    """Delete the job's document, with its generations, recoveries and versions."""

    job: JobId


class PutGeneration(msgspec.Struct, frozen=True, tag=True):
    """Append a generation; (job, number) is new, else the transaction must fail."""

    spec: GenerationSpec
    opened_at: float


class PutVersion(msgspec.Struct, frozen=True, tag=True):
    """Write a version by (job, generation, step): committed now, or now verified as well."""

    doc: VersionRecord


class PutVerdict(msgspec.Struct, frozen=True, tag=True):
    """Append a verdict; its id is new."""

    verdict: Verdict


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the append-only log, with the sentence a person reads. ``at`` is the ``now`` of its event."""

    kind: str
    sentence: str
    at: float
    trace: TraceId = ""
    node: NodeId | None = None
    job: JobId | None = None
    generation: GenerationNumber | None = None
    data: dict[str, str] = {}


class Audit(msgspec.Struct, frozen=True, tag=True):
    """Append to the audit log."""

    entry: AuditEntry


class Send(msgspec.Struct, frozen=True, tag=True):
    """Put a directive in the node's outbox, with the next number of its queue, and push it."""

    node: NodeId
    body: AnyDirective


class NoteFinding(msgspec.Struct, frozen=True, tag=True):
    """A finding was raised on the node, or took a graver form: for the history that people read."""

    node: NodeId
    finding: Finding
    at: float


class NoteCleared(msgspec.Struct, frozen=True, tag=True):
    """The node's finding of this key has cleared."""

    node: NodeId
    key: str
    at: float


class RemedyKind(StrEnum):
    """What the outside can do to a node.

    CORDON: take it out of service for new work, with a reason. UNCORDON: give it back (only what Everstep took).
    RESET_GPU, REBOOT: as named. REPAIR: hand it to people, with its evidence.
    """

    CORDON = "cordon"
    UNCORDON = "uncordon"
    RESET_GPU = "reset_gpu"
    REBOOT = "reboot"
    REPAIR = "repair"


class Remedy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One action on a node, told to the outside until it is confirmed or given up. ``id`` is unique for ever.

    ``gpus``: UUIDs that RESET_GPU means. ``verdict``: the id of the judgement it follows from. ``evidence``: what goes
    with a REPAIR. ``due``: when a cure counts as failed, were nothing heard of it (0.0: of others).
    """

    id: str
    node: NodeId
    kind: RemedyKind
    sentence: str
    at: float
    verdict: str = ""
    trace: TraceId = ""
    gpus: tuple[str, ...] = ()
    evidence: Evidence | None = None
    due: float = 0.0


class RequestRemedy(msgspec.Struct, frozen=True, tag=True):
    """Carry the remedy out, once; ``events.ActionReported`` tells the outcome. Remedies of a node are carried out in
    order; one that was not begun is dropped where a later one makes it pointless (a cordon by its end, a cure by the
    next step, repair, or the way back)."""

    remedy: Remedy


Effect = (
    PutFleet
    | PutNode
    | PutJob
    | DropNode
    | DropJob
    | PutGeneration
    | PutVersion
    | PutVerdict
    | Audit
    | Send
    | NoteFinding
    | NoteCleared
    | RequestRemedy
)
