"""Define what operators read of the past and the rules: findings, verdicts, checkpoints, remediations, policy.

Lists are in pages, newest first. ``next`` is the ``?cursor=`` of the next page; empty on the last one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from everstep.ids import JobId, NodeId, ShortText, TraceId, Version
from everstep.vocabulary import Action, Finding, NodeState, Verdict
from everstep.wire.v1.agent import UNKNOWN_HOST, Domain, Gpu, Host
from everstep.wire.v1.base import Message, OperatorRequest, Request

# ---- evidence: one document that accompanies a node to repair

EVIDENCE_FORMAT = "everstep.evidence/1"


class EvidenceNote(Message, frozen=True, kw_only=True):
    """One event: a ``finding`` raised or ``cleared``, a ``verdict``, a ``probe``, an ``action``."""

    at: float
    kind: str
    sentence: str
    detail: dict[str, str] = {}


class Evidence(Message, frozen=True, kw_only=True):
    """Everything known against a node. Times are wall seconds.

    Attributes:
        rule: The rule that keeps it out.
        action: The remediation that is due.
        suspect_gpus: Those of ``gpus`` that findings name, with serial number and UUID.
        findings: Current findings, with threshold, source and evidence of each.
        eviction_times: When it was evicted.
        remediation_times: When it was reset or rebooted; dry runs are in ``history`` alone.
        offence_score: Score of its faults, each weighed by its age.
        history: Earlier findings and actions, oldest first.
    """

    format: str
    created_at: float
    node: NodeId
    state: NodeState
    since: float
    sentence: str
    rule: str = ""
    action: Action = Action.NONE
    domain: Domain = Domain()
    driver_version: str = ""
    agent_version: str = ""
    boot_id: str = ""
    booted_at: float = 0.0
    gpus: tuple[Gpu, ...] = ()
    host: Host = UNKNOWN_HOST
    suspect_gpus: tuple[Gpu, ...] = ()
    findings: tuple[Finding, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    eviction_times: tuple[float, ...] = ()
    remediation_times: tuple[float, ...] = ()
    offence_score: float = 0.0
    history: tuple[EvidenceNote, ...] = ()


# ---- current checkpoints of a job: ``GET /v1/jobs/{job}/checkpoints``


class CheckpointCopy(Message, frozen=True, kw_only=True):
    """A version in one of the places where it is kept.

    Attributes:
        tier: Slots in ``memory``, slots with ``parity``, or ``storage``.
        state: Complete there, or in progress.
        restorable: The job could go back to it now; ``sentence`` says why, or why not.
        since: When it was complete there, or begun.
        verified: All replicas agreed on its digests.
        url: The folder on storage, which any program can load with torch.distributed.checkpoint.
        audited: Audits have checked all ranks' work once since, without a difference.
    """

    version: Version
    storage_tier: Literal["memory", "parity", "storage"]
    state: Literal["complete", "in_progress"]
    restorable: bool
    sentence: ShortText
    since: float
    verified: bool = False
    bytes: int = 0
    url: str = ""
    audited: bool = False


class JobCheckpoints(Message, frozen=True, kw_only=True):
    """All versions that a job could go back to, in order of preference: the first restorable one is taken.

    Attributes:
        spills_failed: Number of versions that were to be written to storage, and were not.
        last_error: Why the last one was not written, or its parity was not made; empty if the newest was.
    """

    job: JobId
    sentence: ShortText
    versions: tuple[CheckpointCopy, ...] = ()
    spills_failed: int = 0
    last_error: ShortText = ""


class FindingRecord(Message, frozen=True, kw_only=True):
    """A finding of a node, current or past. ``id`` numbers observations; times are wall seconds."""

    id: int
    node: NodeId
    finding: Finding
    raised_at: float
    cleared_at: float | None = None


class FindingList(Message, frozen=True, kw_only=True):
    findings: tuple[FindingRecord, ...]
    next: str = ""


class VerdictList(Message, frozen=True, kw_only=True):
    verdicts: tuple[Verdict, ...]
    next: str = ""


class Checkpoint(Message, frozen=True, kw_only=True):
    """A version that was committed (durable in as many places as its job asks for), and perhaps verified (clean).

    Attributes:
        verified_at: When all replicas had agreed on its digests; None if they were not compared.
        audited_at: When audits had checked all ranks' work once since, without a difference; None before that.
    """

    job: JobId
    version: Version
    committed_at: float
    verified_at: float | None = None
    audited_at: float | None = None
    bytes: int = 0
    ranks: int = 0


class CheckpointList(Message, frozen=True, kw_only=True):
    checkpoints: tuple[Checkpoint, ...]
    next: str = ""


class RemediationStatus(Message, frozen=True, kw_only=True):
    """A remediation of a node that an external system was asked for, and its outcome. ``state``: requested, started,
    confirmed (read back), failed, or superseded (by a later one before it was started)."""

    id: str
    node: NodeId
    kind: str
    state: Literal["requested", "started", "confirmed", "failed", "superseded"]
    sentence: ShortText
    requested_at: float
    ended_at: float | None = None
    detail: str = ""
    verdict: str = ""
    trace: TraceId = ""


class RemediationList(Message, frozen=True, kw_only=True):
    remediations: tuple[RemediationStatus, ...]
    next: str = ""


class BudgetScope(Message, frozen=True, kw_only=True):
    """The eviction budget of the fleet, a rack or a job (``kind``) of that ``name``.

    ``next_free_at``: when the oldest eviction leaves the window. 0.0 if there is none, and while the breaker is open:
    then only a person frees the budget.
    """

    kind: str
    name: str
    limit: int
    used: int
    remaining: int
    nodes: int
    next_free_at: float = 0.0


class DeferredEviction(Message, frozen=True, kw_only=True):
    """A node whose eviction is decided but deferred, and what defers it."""

    node: NodeId
    finding: str
    deferred_by: str


class BudgetStatus(Message, frozen=True, kw_only=True):
    """The evictions that are still allowed. ``breaker``: why none is until an operator resets it; empty while evictions
    are allowed."""

    window_s: float
    breaker: str = ""
    breaker_at: float = 0.0
    scopes: tuple[BudgetScope, ...] = ()
    deferred: tuple[DeferredEviction, ...] = ()


class PolicyDocument(Message, frozen=True, kw_only=True):
    """The policy in force. ``knobs`` by dotted name (``budget.count``), ``rules`` on findings as in the policy files.
    ``origins``: where values come from that are not Everstep's own, by knob and by rule (``kind`` or ``kind.name``)."""

    knobs: dict[str, Any]
    rules: tuple[dict[str, Any], ...]
    origins: dict[str, str] = {}


class PolicyChange(Request, frozen=True, kw_only=True):
    """A change to try: knobs by dotted name, and rules that replace, key by key, those of the same kind and name."""

    knobs: Annotated[
        dict[ShortText, float | int | bool | ShortText | list[float | int] | None], msgspec.Meta(max_length=200)
    ] = {}
    rules: Annotated[tuple[dict[ShortText, Any], ...], msgspec.Meta(max_length=200)] = ()


class PolicyCheckResult(Message, frozen=True, kw_only=True):
    """The answer whether the change could be put in force; ``error`` says why not, and how to fix it."""

    ok: bool
    error: str = ""
    changes: dict[str, str] = {}


class PolicyTrialRequest(Request, frozen=True, kw_only=True):
    """A change, and how many hours of recorded events to try it on."""

    change: PolicyChange
    hours: Annotated[float, msgspec.Meta(gt=0, le=24 * 31)] = 168.0


class RecordedSpan(Message, frozen=True, kw_only=True):
    """A part of the past that one controller recorded without a gap while it led; ``epoch`` numbers that leadership."""

    begins_at: float
    ends_at: float
    epoch: int


class PolicyTrialResult(Message, frozen=True, kw_only=True):
    """The effect that the change would have had on the recorded past, apart from operators' orders.

    Attributes:
        since: Start of the record.
        added_evictions: Evictions of nodes that did not leave and would have.
        avoided_evictions: Nodes that left and would not have, whenever it was.
        gaps: (from, to) of unrecorded times: each controller keeps its own journal.
        spans: The recorded times.
    """

    since: float
    events: int
    evictions: int
    added_evictions: tuple[Verdict, ...] = ()
    avoided_evictions: tuple[str, ...] = ()
    gaps: tuple[tuple[float, float], ...] = ()
    spans: tuple[RecordedSpan, ...] = ()
    sentence: ShortText = ""


class CancelMaintenance(OperatorRequest, frozen=True, kw_only=True):
    """Cancel maintenance that is planned for a node or a rack."""

    node: NodeId | None = None
    rack: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None


class MaintenanceRequest(OperatorRequest, frozen=True, kw_only=True):
    """A window for people to work on a node, or on all nodes of a rack. The nodes leave their jobs at a boundary at
    ``starts_at`` (wall seconds; None: now), and return through probation at ``until``."""

    starts_at: Annotated[float, msgspec.Meta(gt=0)] | None = None
    until: Annotated[float, msgspec.Meta(gt=0)]
    node: NodeId | None = None
    rack: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
