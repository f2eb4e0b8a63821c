"""Define the tables as of the newest migration.

Documents (``doc``, ``body``) are JSON of msgspec structs in text columns. The core's state is read and written whole,
so other columns exist only for lookups.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Float, Index, Integer, MetaData, PrimaryKeyConstraint, Table, Text
from sqlalchemy.types import TypeEngine

HEAD = "0001"
"""Newest migration; a database at this revision needs no migration tool at start."""

metadata = MetaData()


def _columns(kind: TypeEngine[Any], *names: str) -> list[Column[Any]]:
    """Return required columns of one type."""
    return [Column(name, kind, nullable=False) for name in names]


_TEXT, _INTEGER, _TIME = Text(), BigInteger(), Float(53)
_ROW_ID = BigInteger().with_variant(Integer, "sqlite")

fleet = Table("fleet", metadata, Column("id", Integer, primary_key=True), *_columns(_TEXT, "doc"))
"""One row: state of the fleet as a whole (eviction history, probes)."""

nodes = Table("nodes", metadata, Column("node", Text, primary_key=True), *_columns(_TEXT, "doc"))

active_findings = Table(
    "active_findings",
    metadata,
    *_columns(_TEXT, "node", "key", "doc"),
    PrimaryKeyConstraint("node", "key", name="one_finding_per_key"),
)
"""Active findings of the core's node records; ``findings`` is the history."""

jobs = Table("jobs", metadata, Column("job", Text, primary_key=True), *_columns(_TEXT, "doc"))

generations = Table(
    "generations",
    metadata,
    *_columns(_TEXT, "job", "reason", "trace", "doc"),
    *_columns(_INTEGER, "number"),
    *_columns(_TIME, "issued_at"),
    PrimaryKeyConstraint("job", "number", name="one_roster_per_number"),
    Index("generations_by_time", "issued_at"),
)

versions = Table(
    "versions",
    metadata,
    *_columns(_TEXT, "job"),
    *_columns(_INTEGER, "generation", "step", "bytes", "ranks"),
    *_columns(_TIME, "committed_at"),
    Column("verified_at", Float(53)),
    Column("audited_at", Float(53)),
    PrimaryKeyConstraint("job", "generation", "step", name="one_row_per_version"),
)

recoveries = Table(
    "recoveries",
    metadata,
    *_columns(_TEXT, "job", "doc"),
    *_columns(_INTEGER, "generation"),
    PrimaryKeyConstraint("job", "generation", name="one_recovery_per_generation"),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("id", Text, primary_key=True),
    *_columns(_TEXT, "node", "decision", "trace", "doc"),
    *_columns(_TIME, "at"),
    Index("verdicts_by_node", "node", "at"),
    Index("verdicts_by_time", "at"),
)

event_log = Table(
    "audit",
    metadata,
    Column("id", _ROW_ID, primary_key=True, autoincrement=False),
    *_columns(_TIME, "at"),
    *_columns(_TEXT, "kind", "node", "job", "trace", "sentence", "detail"),
    Column("generation", BigInteger),
    Index("audit_by_trace", "trace", "id"),
    Index("audit_by_node", "node", "id"),
    Index("audit_by_job", "job", "id"),
    Index("audit_by_kind", "kind", "id"),
)
"""The event log, whose name in the database is ``audit``. Append-only: triggers refuse UPDATE; in SQLite, INSERT under
an id that is not the newest (REPLACE would rewrite an entry so); and DELETE beyond meta's ``audit_pruned``, or beyond
``orders_pruned`` for entries by people."""

outbox = Table(
    "outbox",
    metadata,
    *_columns(_TEXT, "node", "body"),
    *_columns(_INTEGER, "seq"),
    PrimaryKeyConstraint("node", "seq", name="one_directive_per_seq"),
)

acknowledged_reports = Table(
    "acknowledged_reports",
    metadata,
    *_columns(_TEXT, "node"),
    *_columns(_INTEGER, "incarnation", "through"),
    PrimaryKeyConstraint("node", "incarnation", name="one_mark_per_incarnation"),
)

poisoned_reports = Table(
    "poisoned_reports",
    metadata,
    *_columns(_TEXT, "node"),
    *_columns(_INTEGER, "incarnation", "number"),
    PrimaryKeyConstraint("node", "incarnation", "number", name="one_row_per_report"),
)
"""Reports that ended a controller process; they are dropped when repeated."""

meta = Table("meta", metadata, Column("key", Text, primary_key=True), *_columns(_INTEGER, "value"))
"""``epoch``: number of take-overs of this database, checked by every write. ``batch``: newest batch applied.
``audit_pruned``: newest id of the event log that retention may delete; ``orders_pruned``: the same for entries by
people. ``last_writing_epoch``: newest epoch that has written; if the epoch is far ahead of it, the database is a copy.
``clock``: wall seconds when a controller was last known to run."""

lease = Table(
    "lease",
    metadata,
    Column("id", Integer, primary_key=True),
    *_columns(_INTEGER, "epoch"),
    *_columns(_TEXT, "holder", "address"),
    *_columns(_TIME, "renewed_at", "expires_at"),
    Column("successor", Text, nullable=False, server_default=""),
    Column("resigned_at", Float(53), nullable=False, server_default="0"),
    Column("resignations", Integer, nullable=False, server_default="0"),
)
"""One row: the leader, and the end of its lease by the database's clock. ``successor``: controller for which the last
leader resigned, else ""; ``resigned_at``: time of the last resignation; ``resignations``: length of the series."""

standby_contacts = Table(
    "standby_contacts",
    metadata,
    Column("controller", Text, primary_key=True),
    *_columns(_INTEGER, "nodes"),
    *_columns(_TIME, "reported_at"),
)
"""Number of nodes that contact each standby persistently, by the database's clock; PostgreSQL only. It is written
without the fence, and is not part of the fleet's state."""

credentials = Table(
    "credentials",
    metadata,
    Column("id", Text, primary_key=True),
    *_columns(_TEXT, "role", "subject", "hash", "created_by", "note"),
    *_columns(_TIME, "created_at"),
    Column("expires_at", Float(53)),
    Column("revoked_at", Float(53)),
    Column("uses_left", Integer),
    *_columns(_INTEGER, "replaces"),
    Index("credentials_by_subject", "role", "subject"),
)
"""Stored credentials. ``hash`` is SHA-256 of the secret part, never the secret. ``uses_left`` and ``replaces`` (0 or 1:
an enrolled node may enrol again) belong to join tokens."""

remediations = Table(
    "remediations",
    metadata,
    Column("id", Text, primary_key=True),
    *_columns(_TEXT, "node", "kind", "state", "detail", "doc"),
    *_columns(_TIME, "requested_at"),
    Column("ended_at", Float(53)),
    Index("remediations_by_node", "node", "requested_at"),
    Index("remediations_by_state", "state"),
)
"""Remediations; ``state`` is requested, started, confirmed, failed or superseded."""

notified_alerts = Table(
    "notified_alerts", metadata, Column("fingerprint", Text, primary_key=True), *_columns(_TEXT, "doc")
)
"""Alerts whose start may have been posted, and whose end was not."""

findings = Table(
    "findings",
    metadata,
    Column("id", _ROW_ID, primary_key=True),
    *_columns(_TEXT, "node", "key", "kind", "doc"),
    *_columns(_TIME, "at"),
    Column("cleared_at", Float(53)),
    Index("findings_by_node", "node", "id"),
    Index("findings_by_kind", "kind", "id"),
    Index("findings_by_key", "node", "key"),
)
"""History of findings; active ones are also in ``active_findings``. The migration adds partial indexes."""
