"""What crosses between the loop and the database thread: plain rows and encoded documents, nothing shared."""

from __future__ import annotations

from typing import Any

import msgspec


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


class OutboxRow(msgspec.Struct, frozen=True, kw_only=True):
    """One directive for a node, not acknowledged yet. ``body`` is JSON."""

    node: str
    seq: int
    body: str


class PoisonedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A report that the core could not survive."""

    node: str
    incarnation: int
    number: int


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

    def died_at(self) -> float | None:
        """When it stopped, or will stop, being good; None: it has no end yet."""
        return self.expires_at if self.revoked_at is None else self.revoked_at

    def alive(self, now: float) -> bool:
        """Whether it is good at ``now``."""
        end = self.died_at()
        return end is None or now < end


class Batch(msgspec.Struct, kw_only=True):
    """Everything one transaction writes: the outcome of one or more events, none of them in part.

    ``nodes``, ``jobs`` and ``fleet`` are documents that replace what is there. ``pruned`` maps a node to the
    directive number up to which it has everything; ``marks`` maps (node, incarnation) to its newest report number.
    """

    fleet: str | None = None
    nodes: dict[str, str] = msgspec.field(default_factory=dict)
    jobs: dict[str, str] = msgspec.field(default_factory=dict)
    generations: list[GenerationRow] = msgspec.field(default_factory=list)
    versions: dict[tuple[str, int, int], VersionRow] = msgspec.field(default_factory=dict)
    recoveries: list[RecoveryRow] = msgspec.field(default_factory=list)
    verdicts: list[VerdictRow] = msgspec.field(default_factory=list)
    audit: list[AuditRow] = msgspec.field(default_factory=list)
    outbox: list[OutboxRow] = msgspec.field(default_factory=list)
    pruned: dict[str, int] = msgspec.field(default_factory=dict)
    marks: dict[tuple[str, int], int] = msgspec.field(default_factory=dict)
    poisoned: list[PoisonedRow] = msgspec.field(default_factory=list)

    def __bool__(self) -> bool:
        parts: tuple[Any, ...] = (
            self.fleet,
            self.nodes,
            self.jobs,
            self.generations,
            self.versions,
            self.recoveries,
            self.verdicts,
            self.audit,
            self.outbox,
            self.pruned,
            self.marks,
            self.poisoned,
        )
        return any(part is not None and len(part) > 0 for part in parts)


class Loaded(msgspec.Struct, frozen=True, kw_only=True):
    """What a controller starts from."""

    epoch: int
    fleet: str | None
    nodes: dict[str, str]
    jobs: dict[str, str]
    outbox: list[OutboxRow]
    marks: dict[tuple[str, int], int]
    poisoned: frozenset[tuple[str, int, int]]
    newest_audit: int
    newest_at: float
    versions: list[VersionRow]
