"""Create the schema: documents, history, verdicts, audit log, outbox, lease, credentials and remediations."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SQLITE_TRIGGERS = (
    """
CREATE TRIGGER audit_refuses_UPDATE BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
""",
    # INSERT OR REPLACE deletes the old row without asking the triggers for DELETE, unless recursive_triggers is on.
    """
CREATE TRIGGER audit_refuses_INSERT BEFORE INSERT ON audit
WHEN NEW.id <= (SELECT max(id) FROM audit)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
""",
    """
CREATE TRIGGER audit_refuses_DELETE BEFORE DELETE ON audit
WHEN OLD.id > COALESCE((SELECT value FROM meta WHERE key = CASE
  WHEN (OLD.kind LIKE 'operator.%' OR OLD.kind LIKE 'credential.%') AND OLD.kind <> 'credential.enrolled'
  THEN 'orders_pruned' ELSE 'audit_pruned' END), 0)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
""",
)
_POSTGRESQL_TRIGGERS = (
    """
CREATE FUNCTION everstep_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$
""",
    """
CREATE TRIGGER audit_is_append_only BEFORE UPDATE OR TRUNCATE ON audit
FOR EACH STATEMENT EXECUTE FUNCTION everstep_append_only()
""",
    """
CREATE FUNCTION everstep_keeps_what_is_retained() RETURNS trigger LANGUAGE plpgsql AS
$$ DECLARE pruned bigint := COALESCE((SELECT value FROM meta WHERE key = 'audit_pruned'), 0);
orders_pruned bigint := COALESCE((SELECT value FROM meta WHERE key = 'orders_pruned'), 0);
BEGIN
IF EXISTS (SELECT 1 FROM gone WHERE id > CASE
  WHEN (kind LIKE 'operator.%' OR kind LIKE 'credential.%') AND kind <> 'credential.enrolled'
  THEN orders_pruned ELSE pruned END) THEN RAISE EXCEPTION 'the audit log is append-only'; END IF;
RETURN NULL;
END $$
""",
    """
CREATE TRIGGER audit_keeps_what_is_retained AFTER DELETE ON audit REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION everstep_keeps_what_is_retained()
""",
)


def _documents() -> None:
    op.create_table("fleet", sa.Column("id", sa.Integer, primary_key=True), sa.Column("doc", sa.Text, nullable=False))
    for table, key in (("nodes", "node"), ("jobs", "job")):
        op.create_table(table, sa.Column(key, sa.Text, primary_key=True), sa.Column("doc", sa.Text, nullable=False))


def _job_history() -> None:
    op.create_table(
        "generations",
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("trace", sa.Text, nullable=False),
        sa.Column("issued_at", sa.Float(53), nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job", "number", name="one_roster_per_number"),
    )
    op.create_index("generations_by_time", "generations", ["issued_at"])
    op.create_table(
        "versions",
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("committed_at", sa.Float(53), nullable=False),
        sa.Column("verified_at", sa.Float(53)),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("ranks", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("job", "generation", "step", name="one_row_per_version"),
    )
    op.create_table(
        "recoveries",
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("job", "generation", name="one_recovery_per_generation"),
    )


def _judgements() -> None:
    op.create_table(
        "verdicts",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("decision", sa.Text, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("trace", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
    )
    op.create_index("verdicts_by_node", "verdicts", ["node", "at"])
    op.create_index("verdicts_by_time", "verdicts", ["at"])


def _audit() -> None:
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "audit",
        sa.Column("id", number, primary_key=True, autoincrement=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger),
        sa.Column("trace", sa.Text, nullable=False),
        sa.Column("sentence", sa.Text, nullable=False),
        sa.Column("detail", sa.Text, nullable=False),
    )
    op.create_index("audit_by_trace", "audit", ["trace", "id"])
    for column in ("node", "job", "kind"):
        op.create_index(f"audit_by_{column}", "audit", [column, "id"])
    for statement in _SQLITE_TRIGGERS if op.get_bind().dialect.name == "sqlite" else _POSTGRESQL_TRIGGERS:
        op.execute(statement)


def _delivery() -> None:
    op.create_table(
        "outbox",
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("node", "seq", name="one_directive_per_seq"),
    )
    op.create_table(
        "acknowledged_reports",
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("through", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("node", "incarnation", name="one_mark_per_life"),
    )
    op.create_table(
        "poisoned_reports",
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("incarnation", sa.BigInteger, nullable=False),
        sa.Column("number", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("node", "incarnation", "number", name="one_row_per_report"),
    )
    meta = op.create_table(
        "meta", sa.Column("key", sa.Text, primary_key=True), sa.Column("value", sa.BigInteger, nullable=False)
    )
    op.bulk_insert(meta, [{"key": key, "value": 0} for key in ("epoch", "batch", "audit_pruned")])


def _lease() -> None:
    lease = op.create_table(
        "lease",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("renewed_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
        sa.Column("successor", sa.Text, nullable=False, server_default=""),
        sa.Column("resigned_at", sa.Float(53), nullable=False, server_default="0"),
        sa.Column("resignations", sa.Integer, nullable=False, server_default="0"),
    )
    op.bulk_insert(lease, [{"id": 1, "epoch": 0, "holder": "", "address": "", "renewed_at": 0.0, "expires_at": 0.0}])
    op.create_table(
        "standby_contacts",
        sa.Column("controller", sa.Text, primary_key=True),
        sa.Column("nodes", sa.Integer, nullable=False),
        sa.Column("reported_at", sa.Float(53), nullable=False),
    )


def _credentials() -> None:
    op.create_table(
        "credentials",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("subject", sa.Text, nullable=False),
        sa.Column("hash", sa.Text, nullable=False),
        sa.Column("created_at", sa.Float(53), nullable=False),
        sa.Column("created_by", sa.Text, nullable=False),
        sa.Column("expires_at", sa.Float(53)),
        sa.Column("revoked_at", sa.Float(53)),
        sa.Column("uses_left", sa.Integer),
        sa.Column("replaces", sa.Integer, nullable=False),
        sa.Column("note", sa.Text, nullable=False),
    )
    op.create_index("credentials_by_subject", "credentials", ["role", "subject"])


def _remediations() -> None:
    op.create_table(
        "remediations",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("requested_at", sa.Float(53), nullable=False),
        sa.Column("ended_at", sa.Float(53)),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
    )
    op.create_index("remediations_by_node", "remediations", ["node", "requested_at"])
    op.create_index("remediations_by_state", "remediations", ["state"])


def _notified_alerts() -> None:
    op.create_table(
        "notified_alerts",
        sa.Column("fingerprint", sa.Text, primary_key=True),
        sa.Column("doc", sa.Text, nullable=False),
    )


def _findings() -> None:
    number = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "findings",
        sa.Column("id", number, primary_key=True),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("at", sa.Float(53), nullable=False),
        sa.Column("cleared_at", sa.Float(53)),
        sa.Column("doc", sa.Text, nullable=False),
    )
    op.create_index("findings_by_node", "findings", ["node", "id"])
    op.create_index("findings_by_kind", "findings", ["kind", "id"])
    op.create_index("findings_by_key", "findings", ["node", "key"])
    active, is_over = sa.text("cleared_at IS NULL"), sa.text("cleared_at IS NOT NULL")
    for name, columns, which in (
        ("findings_active", ["id"], active),
        ("findings_active_by_kind", ["kind", "id"], active),
        ("findings_by_end", ["cleared_at"], is_over),
    ):
        op.create_index(name, "findings", columns, sqlite_where=which, postgresql_where=which)
    op.create_table(
        "active_findings",
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("node", "key", name="one_finding_per_key"),
    )


def upgrade() -> None:
    _documents()
    _job_history()
    _judgements()
    _delivery()
    _audit()
    _lease()
    _credentials()
    _remediations()
    _notified_alerts()
    _findings()


def downgrade() -> None:
    raise NotImplementedError("schemas go forward only: restore the backup that belongs to the older release")
