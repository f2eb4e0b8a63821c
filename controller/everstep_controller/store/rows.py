"""What crosses between the loop and the database thread: plain rows and encoded documents, nothing shared."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from enum import StrEnum
from typing import Any

import msgspec

from everstep.errors import MalformedMessage


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the audit log. ``detail`` is JSON; ``at`` wall seconds."""

    id: int
    at: float
    kind: str
    sentence: str
    node: str = ""
    job: str = ""
    generation: int | None = None
    trace: str = ""
    detail: str = "{}"


class GenerationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One roster. ``doc`` is the GenerationSpec in JSON."""

    job: str
    number: int
    reason: str
    trace: str
    issued_at: float
    doc: str


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A version that was committed, and perhaps verified, at these wall times."""

    job: str
    generation: int
    step: int
    committed_at: float
    verified_at: float | None = None
    bytes: int = 0
    ranks: int = 0


class RecoveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """How a generation came to step. ``doc`` is ``everstep.wire.v1.operator.Recovery`` in JSON."""

    job: str
    generation: int
    doc: str


class VerdictRow(msgspec.Struct, frozen=True, kw_only=True):
    """One verdict. ``doc`` is the Verdict in JSON."""

    id: str
    node: str
    decision: str
    at: float
    trace: str
    doc: str


def generation_reference(job: str, number: int) -> str:
    """What an outbox row says in place of a NewGeneration, whose roster is in a table of its own: half a megabyte for
    each of 1,250 nodes would be more than a database writes in the time there is."""
    return f"@{job}/{number}"


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One directive for a node, not acknowledged yet. ``body`` is JSON; as it is stored, a ``generation_reference``
    stands for a generation."""

    node: str
    seq: int
    body: str


class PoisonedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A report that the core could not survive."""

    node: str
    incarnation: int
    number: int


DEAD_CREDENTIAL_KEPT_S = 30 * 86400.0
"""Seconds for which a credential that expired or was revoked is still listed; the audit log has it for longer."""


class CredentialRow(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody's credential. ``hash`` is the SHA-256 of its secret, in hex; times are wall seconds.

    ``uses_left`` (None: any number) and ``replaces`` belong to join tokens.
    """

    id: str
    role: str
    subject: str
    hash: str
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None
    uses_left: int | None = None
    replaces: bool = False
    note: str = ""

    def ends_at(self) -> float | None:
        """When it stopped, or will stop, being good; None: it has no end yet."""
        return self.expires_at if self.revoked_at is None else self.revoked_at

    def is_valid_at(self, now: float) -> bool:
        """Whether it is good at ``now``."""
        end = self.ends_at()
        return end is None or now < end


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A finding raised (``doc`` is the Finding in JSON), or cleared (``doc`` is empty), at ``at``."""

    node: str
    key: str
    kind: str
    at: float
    doc: str = ""


class RemediationState(StrEnum):
    """How far a remediation has come. STARTED: it may have been asked for outside."""

    REQUESTED = "requested"
    STARTED = "started"
    CONFIRMED = "confirmed"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class RemediationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One remedy asked of the outside. ``doc`` is ``core.effects.Remediation`` in JSON; times are wall seconds."""

    id: str
    node: str
    kind: str
    state: RemediationState
    requested_at: float
    doc: str
    ended_at: float | None = None
    detail: str = ""


class AlertRow(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that may have been told. ``doc`` is ``everstep_controller.remediation.alerts.Alert`` in JSON."""

    fingerprint: str
    doc: str


class Batch(msgspec.Struct, kw_only=True):
    """Everything one transaction writes: the outcome of one or more events, none of them in part.

    ``nodes``, ``jobs`` and ``fleet`` are documents that replace what is there. ``active_findings`` maps (node, key) to
    a finding's document, or to nothing where it stands no more. ``acknowledged`` maps a node to the directive number
    up to which it has everything; ``superseded`` are nodes and numbers of directives that newer ones made pointless;
    ``report_marks`` maps (node, incarnation) to its newest report number.
    ``forgotten_nodes`` and ``forgotten_jobs`` are deleted with all that is kept for them alone, before anything is
    written: what is written of one of them came after.
    ``number`` is the store's: one more than that of the batch before, so that none is applied twice.
    """

    number: int = 0

    fleet: str | None = None
    nodes: dict[str, str] = msgspec.field(default_factory=dict)
    active_findings: dict[tuple[str, str], str] = msgspec.field(default_factory=dict)
    jobs: dict[str, str] = msgspec.field(default_factory=dict)
    generations: list[GenerationRow] = msgspec.field(default_factory=list)
    versions: dict[tuple[str, int, int], VersionRow] = msgspec.field(default_factory=dict)
    recoveries: list[RecoveryRow] = msgspec.field(default_factory=list)
    verdicts: list[VerdictRow] = msgspec.field(default_factory=list)
    audit: list[AuditRow] = msgspec.field(default_factory=list)
    outbox: list[OutboxRow] = msgspec.field(default_factory=list)
    acknowledged: dict[str, int] = msgspec.field(default_factory=dict)
    superseded: list[tuple[str, int]] = msgspec.field(default_factory=list)
    report_marks: dict[tuple[str, int], int] = msgspec.field(default_factory=dict)
    poisoned: list[PoisonedRow] = msgspec.field(default_factory=list)
    credentials: dict[str, CredentialRow] = msgspec.field(default_factory=dict)
    remediations: dict[str, RemediationRow] = msgspec.field(default_factory=dict)
    findings: list[FindingRow] = msgspec.field(default_factory=list)
    forgotten_nodes: dict[str, None] = msgspec.field(default_factory=dict)
    forgotten_jobs: dict[str, None] = msgspec.field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.fleet is not None or any(len(getattr(self, name)) > 0 for name in (*_KEYED, *_LISTED))

    def merge(self, later: Batch) -> None:
        """Adds what came after, as if both had been one transaction from the start."""
        for node in later.forgotten_nodes:
            self.forget_node(node)
        for job in later.forgotten_jobs:
            self.forget_job(job)
        self.fleet = later.fleet if later.fleet is not None else self.fleet
        for name in _LISTED:
            getattr(self, name).extend(getattr(later, name))
        for place, row in later.versions.items():
            before = self.versions.get(place)
            if before is not None and row.verified_at is None:
                row = msgspec.structs.replace(row, verified_at=before.verified_at)
            self.versions[place] = row
        for name in _REPLACED:
            getattr(self, name).update(getattr(later, name))
        dropped = set(self.superseded)
        self.outbox = [
            row
            for row in self.outbox
            if row.seq > self.acknowledged.get(row.node, -1) and (row.node, row.seq) not in dropped
        ]

    def forget_node(self, node: str) -> None:
        """The node is deleted, and nothing that was to be written of it is."""
        self.forgotten_nodes[node] = None
        self.nodes.pop(node, None)
        self.acknowledged.pop(node, None)
        self.active_findings = {place: doc for place, doc in self.active_findings.items() if place[0] != node}
        self.report_marks = {place: through for place, through in self.report_marks.items() if place[0] != node}
        self.verdicts = [row for row in self.verdicts if row.node != node]
        self.outbox = [row for row in self.outbox if row.node != node]
        self.superseded = [place for place in self.superseded if place[0] != node]

    def forget_job(self, job: str) -> None:
        """The same of a job."""
        self.forgotten_jobs[job] = None
        self.jobs.pop(job, None)
        self.versions = {place: row for place, row in self.versions.items() if place[0] != job}
        self.generations = [row for row in self.generations if row.job != job]
        self.recoveries = [row for row in self.recoveries if row.job != job]

    def approximate_bytes(self) -> int:
        """About how many bytes of memory it holds."""
        texts = [self.fleet or "", *self.nodes.values(), *self.active_findings.values(), *self.jobs.values()]
        texts += [row.body for row in self.outbox] + [row.doc for row in self.generations]
        for documented in (self.recoveries, self.verdicts, self.findings, self.remediations.values()):
            texts += [row.doc for row in documented]
        texts += [text for row in self.audit for text in (row.sentence, row.detail)]
        rows = sum(len(getattr(self, name)) for name in (*_KEYED, *_LISTED))
        return sum(len(text) for text in texts) + _ROW_BYTES * rows


_REPLACED = ("nodes", "active_findings", "jobs", "acknowledged", "report_marks", "credentials", "remediations")
_KEYED = (*_REPLACED, "versions", "forgotten_nodes", "forgotten_jobs")
_LISTED = ("generations", "recoveries", "verdicts", "audit", "outbox", "superseded", "poisoned", "findings")
_ROW_BYTES = 400
"""Of an object's own in memory, beside its text."""


class LoadedState(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller starts from. ``batch``: number of the newest batch that was applied; ``same``: nodes whose
    records it has read before, which are not among ``nodes``."""

    epoch: int
    batch: int
    fleet: str | None
    unchanged: Set[str] = frozenset()
    nodes: dict[str, str]
    active_findings: dict[tuple[str, str], str]
    jobs: dict[str, str]
    outbox: list[OutboxRow]
    report_marks: dict[tuple[str, int], int]
    poisoned: frozenset[tuple[str, int, int]]
    newest_audit: int
    newest_at: float
    versions: list[VersionRow]
    credentials: list[CredentialRow] = msgspec.field(default_factory=list)
    remediations: list[RemediationRow] = msgspec.field(default_factory=list)
    alerts: list[AlertRow] = msgspec.field(default_factory=list)


# ---- cursors
# Cursors of lists: the place of the last entry that was given, opaque to clients and checked when it comes back.

_BETWEEN = "~"


def encode_cursor(values: Iterable[Any]) -> str:
    """The cursor of the page after this place."""
    return _BETWEEN.join(repr(part) if isinstance(part, float) else str(part) for part in values)


def decode_cursor(cursor: str, kinds: Sequence[type]) -> tuple[Any, ...] | None:
    """The values in a cursor; None in the empty one. Raises MalformedMessage for one that nobody was given."""
    if not cursor:
        return None
    parts = cursor.split(_BETWEEN)
    try:
        if len(parts) != len(kinds):
            raise ValueError(cursor)
        place = tuple(kind(part) for kind, part in zip(kinds, parts, strict=True))
        if not all(_is_storable(part) for part in place):
            raise ValueError(cursor)
        return place
    except ValueError:
        raise MalformedMessage(f"{cursor[:100]!r} is no cursor: give what `next` said of the page before") from None


def _is_storable(part: Any) -> bool:
    """Whether a database can compare it: integers have 64 bits there, and nothing comes after NaN."""
    if isinstance(part, float):
        return math.isfinite(part)
    return not isinstance(part, int) or -(1 << 63) <= part < 1 << 63
