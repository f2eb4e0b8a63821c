"""Define the rows and encoded documents that pass between the event loop and the database thread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from enum import StrEnum
from typing import Any

import msgspec

from everstep.errors import MalformedMessage


class EventLogRow(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the event log."""

    id: int
    at: float  # wall seconds
    kind: str
    sentence: str
    node: str = ""
    job: str = ""
    generation: int | None = None
    trace: str = ""
    detail: str = "{}"  # JSON


class GenerationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One generation. ``doc`` is the GenerationSpec in JSON."""

    job: str
    number: int
    reason: str
    trace: str
    issued_at: float
    doc: str


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A committed and perhaps verified version; times are wall seconds."""

    job: str
    generation: int
    step: int
    committed_at: float
    verified_at: float | None = None
    audited_at: float | None = None
    bytes: int = 0
    ranks: int = 0

    def after(self, before: VersionRow) -> VersionRow:
        """Return the row with what ``before`` says of the same version and this one does not."""
        verified_at = before.verified_at if self.verified_at is None else self.verified_at
        audited_at = before.audited_at if self.audited_at is None else self.audited_at
        return msgspec.structs.replace(self, verified_at=verified_at, audited_at=audited_at)


class RecoveryRow(msgspec.Struct, frozen=True, kw_only=True):
    """A generation's recovery. ``doc`` is ``everstep.wire.v1.operator.GenerationRecovery`` in JSON."""

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
    """Return the reference that an outbox row stores instead of a NewGeneration, whose roster is stored only once."""
    return f"@{job}/{number}"


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One unacknowledged directive for a node."""

    node: str
    seq: int
    body: str  # JSON; as stored, a ``generation_reference`` replaces a generation


class PoisonedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A report that ended the controller process when it was handled."""

    node: str
    incarnation: int
    number: int


DEAD_CREDENTIAL_KEPT_S = 30 * 86400.0
"""Seconds for which an expired or revoked credential is still listed; the event log keeps it longer."""


class CredentialRow(msgspec.Struct, frozen=True, kw_only=True):
    """One stored credential; times are wall seconds."""

    id: str
    role: str
    subject: str
    hash: str  # SHA-256 of its secret, in hex
    created_at: float
    created_by: str
    expires_at: float | None = None
    revoked_at: float | None = None
    uses_left: int | None = None  # of a join token; None for any number
    replaces: bool = False  # a join token that may enrol an enrolled node again
    note: str = ""

    def ends_at(self) -> float | None:
        """Return the time at which the credential ends or ended, or None."""
        return self.expires_at if self.revoked_at is None else self.revoked_at

    def is_valid_at(self, now: float) -> bool:
        """Return whether the credential is valid at ``now``."""
        end = self.ends_at()
        return end is None or now < end


class FindingRow(msgspec.Struct, frozen=True, kw_only=True):
    """A finding raised or cleared."""

    node: str
    key: str
    kind: str
    at: float  # wall seconds
    doc: str = ""  # the Finding in JSON; empty if it was cleared


class RemediationState(StrEnum):
    """Progress of a remediation. STARTED: it may have been requested from the external system."""

    REQUESTED = "requested"
    STARTED = "started"
    CONFIRMED = "confirmed"
    FAILED = "failed"
    SUPERSEDED = "superseded"


class RemediationRow(msgspec.Struct, frozen=True, kw_only=True):
    """One remediation; times are wall seconds."""

    id: str
    node: str
    kind: str
    state: RemediationState
    requested_at: float
    doc: str  # ``core.effects.Remediation`` in JSON
    ended_at: float | None = None
    detail: str = ""


class AlertRow(msgspec.Struct, frozen=True, kw_only=True):
    """An alert that may have been posted. ``doc`` is ``everstep_controller.remediation.alerts.Alert`` in JSON."""

    fingerprint: str
    doc: str


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """The lease as read once from the database."""

    epoch: int  # epoch of the lease
    newest_epoch: int  # newest epoch over this database; larger than ``epoch`` if that one had no lease
    holder: str
    address: str
    expires_in_s: float  # by the database's clock; negative after the end
    is_lock_free: bool  # no controller holds the lock of ``epoch``
    successor: str = ""  # controller for which the holder has just resigned; else empty


class StandbyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Standbys' contacts and recent resignations, as stored beside the lease."""

    contacts: dict[str, int] = {}  # persistent nodes by standby, from the last seconds
    resignations: int = 0  # consecutive resignations, each within an hour of the one before


class Batch(msgspec.Struct, kw_only=True):
    """Everything that one transaction writes. Deletions of forgotten nodes and jobs come first."""

    number: int = 0  # assigned by the store in sequence, so that no batch is applied twice

    fleet: str | None = None  # document that replaces the stored one
    nodes: dict[str, str] = {}  # documents, replacing stored ones
    active_findings: dict[tuple[str, str], str] = {}  # document by (node, key); empty if cleared
    jobs: dict[str, str] = {}  # documents, replacing stored ones
    generations: list[GenerationRow] = []
    versions: dict[tuple[str, int, int], VersionRow] = {}
    recoveries: list[RecoveryRow] = []
    verdicts: list[VerdictRow] = []
    event_log: list[EventLogRow] = []
    outbox: list[OutboxRow] = []
    acknowledged: dict[str, int] = {}  # directive number up to which each node has everything
    superseded: list[tuple[str, int]] = []  # nodes and numbers of directives that newer ones replace
    acknowledged_reports: dict[tuple[str, int], int] = {}  # newest report number by (node, incarnation)
    poisoned: list[PoisonedRow] = []
    credentials: dict[str, CredentialRow] = {}
    remediations: dict[str, RemediationRow] = {}
    findings: list[FindingRow] = []
    forgotten_nodes: dict[str, None] = {}  # deleted with all their own data
    forgotten_jobs: dict[str, None] = {}  # deleted with all their own data

    def __bool__(self) -> bool:
        return self.fleet is not None or any(len(getattr(self, name)) > 0 for name in (*_KEYED, *_LISTED))

    def merge(self, later: Batch) -> None:
        """Add a later batch, as if both were one transaction."""
        for node in later.forgotten_nodes:
            self.forget_node(node)
        for job in later.forgotten_jobs:
            self.forget_job(job)
        self.fleet = later.fleet if later.fleet is not None else self.fleet
        for name in _LISTED:
            getattr(self, name).extend(getattr(later, name))
        for place, row in later.versions.items():
            before = self.versions.get(place)
            self.versions[place] = row if before is None else row.after(before)
        for name in _REPLACED:
            getattr(self, name).update(getattr(later, name))
        dropped, through = set(self.superseded), self.acknowledged
        kept = (row for row in self.outbox if row.seq > through.get(row.node, -1))
        self.outbox = [row for row in kept if (row.node, row.seq) not in dropped]

    def forget_node(self, node: str) -> None:
        """Delete the node, and drop pending writes about it."""
        self.forgotten_nodes[node] = None
        self.nodes.pop(node, None)
        self.acknowledged.pop(node, None)
        self.active_findings = {place: doc for place, doc in self.active_findings.items() if place[0] != node}
        marks = self.acknowledged_reports
        self.acknowledged_reports = {place: through for place, through in marks.items() if place[0] != node}
        self.verdicts = [row for row in self.verdicts if row.node != node]
        self.outbox = [row for row in self.outbox if row.node != node]
        self.superseded = [place for place in self.superseded if place[0] != node]

    def forget_job(self, job: str) -> None:
        """Delete the job, and drop pending writes about it."""
        self.forgotten_jobs[job] = None
        self.jobs.pop(job, None)
        self.versions = {place: row for place, row in self.versions.items() if place[0] != job}
        self.generations = [row for row in self.generations if row.job != job]
        self.recoveries = [row for row in self.recoveries if row.job != job]

    def approximate_bytes(self) -> int:
        """Return the approximate memory use in bytes."""
        texts = [self.fleet or "", *self.nodes.values(), *self.active_findings.values(), *self.jobs.values()]
        texts += [row.body for row in self.outbox] + [row.doc for row in self.generations]
        for documented in (self.recoveries, self.verdicts, self.findings, self.remediations.values()):
            texts += [row.doc for row in documented]
        texts += [text for row in self.event_log for text in (row.sentence, row.detail)]
        rows = sum(len(getattr(self, name)) for name in (*_KEYED, *_LISTED))
        return sum(len(text) for text in texts) + _ROW_BYTES * rows


_REPLACED = ("nodes", "active_findings", "jobs", "acknowledged", "acknowledged_reports", "credentials", "remediations")
_KEYED = (*_REPLACED, "versions", "forgotten_nodes", "forgotten_jobs")
_LISTED = ("generations", "recoveries", "verdicts", "event_log", "outbox", "superseded", "poisoned", "findings")
_ROW_BYTES = 400
"""Approximate memory of an object besides its text, in bytes."""


class LoadedState(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a controller starts from."""

    epoch: int
    batch: int  # number of the newest batch applied
    fleet: str | None
    unchanged: Set[str] = frozenset()  # nodes whose records were read before, and are not in ``nodes``
    nodes: dict[str, str]
    active_findings: dict[tuple[str, str], str]
    jobs: dict[str, str]
    outbox: list[OutboxRow]
    acknowledged_reports: dict[tuple[str, int], int]
    poisoned: frozenset[tuple[str, int, int]]
    newest_event: int
    newest_at: float
    versions: list[VersionRow]
    credentials: list[CredentialRow] = []
    remediations: list[RemediationRow] = []
    alerts: list[AlertRow] = []


# ---- cursors
# A list's cursor is the place of the last entry returned, opaque to clients and checked when it returns.

_CURSOR_SEPARATOR = "~"


def encode_cursor(values: Iterable[Any]) -> str:
    """Return the cursor of the page after this place."""
    return _CURSOR_SEPARATOR.join(repr(part) if isinstance(part, float) else str(part) for part in values)


def decode_cursor(cursor: str, kinds: Sequence[type]) -> tuple[Any, ...] | None:
    """Return a cursor's values, or None for the empty one. Raises MalformedMessage for an invalid cursor."""
    if not cursor:
        return None
    parts = cursor.split(_CURSOR_SEPARATOR)
    try:
        place = tuple(kind(part) for kind, part in zip(kinds, parts, strict=True))
        if not all(_is_storable(part) for part in place):
            raise ValueError(cursor)
        return place
    except ValueError:
        raise MalformedMessage(f"{cursor[:100]!r} is not a cursor: give the `next` of the page before") from None


def _is_storable(part: Any) -> bool:
    """Return whether a database can compare the value: integers have 64 bits, and NaN has no order."""
    if isinstance(part, float):
        return math.isfinite(part)
    return not isinstance(part, int) or -(1 << 63) <= part < 1 << 63
