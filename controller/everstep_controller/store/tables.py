"""Define the tables as of the newest migration.

Documents (``doc``, ``body``) are JSON of msgspec structs in text columns. The core's state is read and written whole,
so other columns exist only for lookups.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Float, Index, Integer, MetaData, PrimaryKeyConstraint, Table, Text

HEAD = "0001"
"""Newest migration; a database at this revision needs no migration tool at start."""

metadata = MetaData()

fleet = Table("fleet", metadata, Column("id", Integer, primary_key=True), Column("doc", Text, nullable=False))
"""One row: state of the fleet as a whole (eviction history, probes)."""

nodes = Table(
    "nodes",
    metadata,
    Column("node", Text, primary_key=True),
    Column("doc", Text, nullable=False),
)

active_findings = Table(
    "active_findings",
    metadata,
    Column("node", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("doc", Text, nullable=False),
    PrimaryKeyConstraint("node", "key", name="one_finding_per_key"),
)
"""Active findings of the core's node records; ``findings`` is the history."""

jobs = Table(
    "jobs",
    metadata,
    Column("job", Text, primary_key=True),
    Column("doc", Text, nullable=False),
)

generations = Table(
    "generations",
    metadata,
    Column("job", Text, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("trace", Text, nullable=False),
    Column("issued_at", Float(53), nullable=False),
    Column("doc", Text, nullable=False),
    PrimaryKeyConstraint("job", "number", name="one_roster_per_number"),
    Index("generations_by_time", "issued_at"),
)

versions = Table(
    "versions",
    metadata,
    Column("job", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("committed_at", Float(53), nullable=False),
    Column("verified_at", Float(53)),
    Column("bytes", BigInteger, nullable=False),
    Column("ranks", Integer, nullable=False),
    PrimaryKeyConstraint("job", "generation", "step", name="one_row_per_version"),
)

recoveries = Table(
    "recoveries",
    metadata,
    Column("job", Text, nullable=False),
    Column("generation", BigInteger, nullable=False),
    Column("doc", Text, nullable=False),
    PrimaryKeyConstraint("job", "generation", name="one_recovery_per_generation"),
)

verdicts = Table(
    "verdicts",
    metadata,
    Column("id", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("decision", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("trace", Text, nullable=False),
    Column("doc", Text, nullable=False),
    Index("verdicts_by_node", "node", "at"),
    Index("verdicts_by_time", "at"),
)

audit = Table(
    "audit",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=False),
    Column("at", Float(53), nullable=False),
    Column("kind", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("job", Text, nullable=False),
    Column("generation", BigInteger),
    Column("trace", Text, nullable=False),
    Column("sentence", Text, nullable=False),
    Column("detail", Text, nullable=False),
    Index("audit_by_trace", "trace", "id"),
    Index("audit_by_node", "node", "id"),
    Index("audit_by_job", "job", "id"),
    Index("audit_by_kind", "kind", "id"),
)
"""Append-only. Triggers refuse UPDATE; in SQLite, INSERT under an id that is not the newest (REPLACE would rewrite an
entry so); and DELETE beyond meta's ``audit_pruned``, or beyond ``orders_pruned`` for entries by people."""

outbox = Table(
    "outbox",
    metadata,
    Column("node", Text, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("body", Text, nullable=False),
    PrimaryKeyConstraint("node", "seq", name="one_directive_per_seq"),
)

acknowledged_reports = Table(
    "acknowledged_reports",
    metadata,
    Column("node", Text, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("through", BigInteger, nullable=False),
    PrimaryKeyConstraint("node", "incarnation", name="one_mark_per_life"),
)

poisoned_reports = Table(
    "poisoned_reports",
    metadata,
    Column("node", Text, nullable=False),
    Column("incarnation", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    PrimaryKeyConstraint("node", "incarnation", "number", name="one_row_per_report"),
)
"""Reports that ended a controller process; they are dropped when repeated."""

meta = Table(
    "meta",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""``epoch``: number of take-overs of this database, checked by every write. ``batch``: newest batch applied.
``audit_pruned``: newest id of the audit log that retention may delete; ``orders_pruned``: the same for entries by
people. ``last_writing_epoch``: newest epoch that has written; if the epoch is far ahead of it, the database is a copy.
``clock``: wall seconds when a controller was last known to run."""

lease = Table(
    "lease",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("address", Text, nullable=False),
    Column("renewed_at", Float(53), nullable=False),
    Column("expires_at", Float(53), nullable=False),
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
    Column("nodes", Integer, nullable=False),
    Column("reported_at", Float(53), nullable=False),
)
"""Number of nodes that contact each standby persistently, by the database's clock; PostgreSQL only. It is written
without the fence, and is not part of the fleet's state."""

credentials = Table(
    "credentials",
    metadata,
    Column("id", Text, primary_key=True),
    Column("role", Text, nullable=False),
    Column("subject", Text, nullable=False),
    Column("hash", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("created_by", Text, nullable=False),
    Column("expires_at", Float(53)),
    Column("revoked_at", Float(53)),
    Column("uses_left", Integer),
    Column("replaces", Integer, nullable=False),
    Column("note", Text, nullable=False),
    Index("credentials_by_subject", "role", "subject"),
)
"""Stored credentials. ``hash`` is SHA-256 of the secret part, never the secret. ``uses_left`` and ``replaces`` (0 or 1:
an enrolled node may enrol again) belong to join tokens."""

remediations = Table(
    "remediations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("node", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("requested_at", Float(53), nullable=False),
    Column("ended_at", Float(53)),
    Column("detail", Text, nullable=False),
    Column("doc", Text, nullable=False),
    Index("remediations_by_node", "node", "requested_at"),
    Index("remediations_by_state", "state"),
)
"""Remediations; ``state`` is requested, started, confirmed, failed or superseded."""

notified_alerts = Table(
    "notified_alerts",
    metadata,
    Column("fingerprint", Text, primary_key=True),
    Column("doc", Text, nullable=False),
)
"""Alerts whose start may have been posted, and whose end was not."""

findings = Table(
    "findings",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("node", Text, nullable=False),
    Column("key", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("at", Float(53), nullable=False),
    Column("cleared_at", Float(53)),
    Column("doc", Text, nullable=False),
    Index("findings_by_node", "node", "id"),
    Index("findings_by_kind", "kind", "id"),
    Index("findings_by_key", "node", "key"),
)
"""History of findings; active ones are also in ``active_findings``."""

_ACTIVE, _IS_OVER = findings.c.cleared_at.is_(None), findings.c.cleared_at.is_not(None)
Index("findings_active", findings.c.id, sqlite_where=_ACTIVE, postgresql_where=_ACTIVE)
Index("findings_active_by_kind", findings.c.kind, findings.c.id, sqlite_where=_ACTIVE, postgresql_where=_ACTIVE)
Index("findings_by_end", findings.c.cleared_at, sqlite_where=_IS_OVER, postgresql_where=_IS_OVER)
