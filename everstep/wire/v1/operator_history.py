"""What operators read of the past and of the rules: findings, verdicts, checkpoints, remedies, budget, policy.

Lists are in pages, newest first. ``next`` is what to give as ``?cursor=`` for the page after; empty on the last one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from everstep.ids import JobId, NodeId, TraceId, Version
from everstep.vocabulary import Action, Finding, NodeState, Verdict
from everstep.wire.v1.agent import UNKNOWN_HOST, Domain, Gpu, Host
from everstep.wire.v1.base import Message, OperatorRequest, Request, ShortText

# ---- evidence
# What goes with a node that is sent to repair: one document for whoever has to mend or replace the hardware.

EVIDENCE_FORMAT = "everstep.evidence/1"


class EvidenceNote(Message, frozen=True, kw_only=True):
    """One thing that happened: a ``finding`` raised or ``cleared``, a ``verdict``, a ``probe``, an ``action``."""

    at: float
    kind: str
    sentence: str
    detail: dict[str, str] = {}


class Evidence(Message, frozen=True, kw_only=True):
    """Everything known against a node. Times are wall seconds.

    ``suspects`` are those of ``gpus`` that findings name, with serial number and UUID. ``findings`` stand now, with
    threshold, source and evidence of each; ``history`` tells, oldest first, what stood and was done before.
    ``evictions`` and ``remedied``: when it was taken out, and reset or rebooted; what was only a dry run is in
    ``history`` alone. ``offences``: its score (each weighed by how long ago it was). ``rule`` and ``action``: by what
    it is out, and the cure that is due.
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


# ---- kept
# What operators read of a job's checkpoints as they are now: ``GET /v1/jobs/{job}/checkpoints``.


class CheckpointCopy(Message, frozen=True, kw_only=True):
    """A version in one of the places where it is kept.

    ``place``: slots in ``memory``, slots with ``parity``, or ``storage``. ``state``: whole there, or on its ``way``.
    ``restorable``: the job could go back to it now; ``sentence`` says why, or why not. ``at``: since when it is there,
    or on its way. ``url``: the folder on storage, which any program loads by torch.distributed.checkpoint.
    """

    version: Version
    tier: Literal["memory", "parity", "storage"]
    state: Literal["complete", "in_progress"]
    restorable: bool
    sentence: ShortText
    since: float
    verified: bool = False
    bytes: int = 0
    url: str = ""


class JobCheckpoints(Message, frozen=True, kw_only=True):
    """All that a job could go back to, in the order in which it would: what stands first and is restorable is taken.

    ``spills_lost``: versions that were to be written to storage, and never got there; ``trouble``: why the last one
    did not, or the last one's parity was not made, empty where the newest was.
    """

    job: JobId
    sentence: ShortText
    versions: tuple[CheckpointCopy, ...] = ()
    spills_lost: int = 0
    last_error: ShortText = ""


class FindingRecord(Message, frozen=True, kw_only=True):
    """A finding of a node, standing or past. ``id`` numbers what was seen; times are wall seconds."""

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
    """A version that was committed (durable in as many places as its job asks for), and perhaps verified (clean)."""

    job: JobId
    version: Version
    committed_at: float
    verified_at: float | None = None
    bytes: int = 0
    ranks: int = 0


class CheckpointList(Message, frozen=True, kw_only=True):
    checkpoints: tuple[Checkpoint, ...]
    next: str = ""


class RemediationStatus(Message, frozen=True, kw_only=True):
    """An action on a node that was asked of the outside, and what came of it. ``state``: wanted, begun, confirmed (read
    back), failed or superseded (a later one came before it was begun)."""

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
    """The budget of the ``kind`` fleet, rack or job of that ``name``: evictions in the window, and when the oldest of
    them leaves it. ``frees_at`` is 0.0 where none is in it, and while the breaker is latched: no time frees anything
    then, a person does."""

    kind: str
    name: str
    limit: int
    used: int
    left: int
    nodes: int
    frees_at: float = 0.0


class DeferredEviction(Message, frozen=True, kw_only=True):
    """A node that is convicted and stays, and what holds its eviction."""

    node: NodeId
    finding: str
    deferred_by: str


class BudgetStatus(Message, frozen=True, kw_only=True):
    """What may still be evicted. ``breaker``: why nobody is until an operator resets it; empty while evictions are
    allowed."""

    window_s: float
    breaker: str = ""
    breaker_at: float = 0.0
    scopes: tuple[BudgetScope, ...] = ()
    deferred: tuple[DeferredEviction, ...] = ()


class PolicyDocument(Message, frozen=True, kw_only=True):
    """The policy in force. ``knobs`` as in docs/reference/settings, ``rules`` on findings as in the policy files."""

    knobs: dict[str, Any]
    rules: tuple[dict[str, Any], ...]


class PolicyChange(Request, frozen=True, kw_only=True):
    """A change to try: knobs by name, and rules that replace, key by key, those of the same kind and name."""

    knobs: Annotated[dict[str, float | int | bool | str | list[float | int] | None], msgspec.Meta(max_length=200)] = {}
    rules: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(max_length=200)] = ()


class PolicyCheckResult(Message, frozen=True, kw_only=True):
    """Whether the change could be put in force; ``complaint`` says why not, and how to mend it."""

    ok: bool
    error: str = ""
    changes: dict[str, str] = {}


class PolicyTrialRequest(Request, frozen=True, kw_only=True):
    """A change, and how far back to try it on what was recorded."""

    change: PolicyChange
    hours: Annotated[float, msgspec.Meta(gt=0, le=24 * 31)] = 168.0


class RecordedSpan(Message, frozen=True, kw_only=True):
    """Of the past, what one controller recorded without a gap while it led; ``epoch``: that leadership's number."""

    begins_at: float
    ends_at: float
    epoch: int


class PolicyTrialResult(Message, frozen=True, kw_only=True):
    """What the change would have done with the recorded past, apart from what operators ordered.

    ``also``: evictions of nodes that did not leave and would have, ``not_then``: of nodes that left and would not have;
    by node, whenever it was. ``since``: where the record begins. ``stretches``: what is recorded since then, ``gaps``:
    (from, to) of what is not: each controller keeps a journal of its own."""

    since: float
    events: int
    evictions: int
    added_evictions: tuple[Verdict, ...] = ()
    avoided_evictions: tuple[str, ...] = ()
    gaps: tuple[tuple[float, float], ...] = ()
    spans: tuple[RecordedSpan, ...] = ()
    sentence: ShortText = ""


class CancelMaintenance(OperatorRequest, frozen=True, kw_only=True):
    """What is planned for a node, or for a rack, is not to begin."""

    node: NodeId | None = None
    rack: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None


class MaintenanceRequest(OperatorRequest, frozen=True, kw_only=True):
    """A window for people to work on a node, or on all nodes of a rack.

    They leave their jobs at a boundary at ``starts_at`` (wall seconds; None: now), and come back by probation at
    ``until``."""

    starts_at: Annotated[float, msgspec.Meta(gt=0)] | None = None
    until: Annotated[float, msgspec.Meta(gt=0)]
    node: NodeId | None = None
    rack: Annotated[str, msgspec.Meta(min_length=1, max_length=64)] | None = None
