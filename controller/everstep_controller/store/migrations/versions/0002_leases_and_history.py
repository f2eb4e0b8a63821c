"""Several controllers over one database, credentials, remedies, the history of findings, an audit log that ends."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_SQLITE_RETENTION = (
    "DROP TRIGGER audit_refuses_DELETE",
    """
CREATE TRIGGER audit_refuses_DELETE BEFORE DELETE ON audit
WHEN OLD.id > COALESCE((SELECT value FROM meta WHERE key = CASE
  WHEN (OLD.kind LIKE 'operator.%' OR OLD.kind LIKE 'credential.%') AND OLD.kind <> 'credential.enrolled'
  THEN 'orders_pruned' ELSE 'audit_pruned' END), 0)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
""",
)
_POSTGRESQL_RETENTION = (
    "DROP TRIGGER audit_is_append_only ON audit",
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


def _lease() -> None:
    lease = op.create_table(
        "lease",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("address", sa.Text, nullable=False),
        sa.Column("renewed_at", sa.Float(53), nullable=False),
        sa.Column("expires_at", sa.Float(53), nullable=False),
    )
    op.bulk_insert(lease, [{"id": 1, "epoch": 0, "holder": "", "address": "", "renewed_at": 0.0, "expires_at": 0.0}])
    meta = sa.table("meta", sa.column("key", sa.Text), sa.column("value", sa.BigInteger))
    op.bulk_insert(meta, [{"key": "batch", "value": 0}, {"key": "audit_pruned", "value": 0}])


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


def _remedies() -> None:
    op.create_table(
        "remedies",
        sa.Column("id", sa.Text, primary_key=True),
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("requested_at", sa.Float(53), nullable=False),
        sa.Column("ended_at", sa.Float(53)),
        sa.Column("detail", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
    )
    op.create_index("remedies_by_node", "remedies", ["node", "requested_at"])
    op.create_index("remedies_by_state", "remedies", ["state"])


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


def _indexes() -> None:
    op.create_index("audit_by_node", "audit", ["node", "id"])
    op.create_index("audit_by_job", "audit", ["job", "id"])
    op.create_index("verdicts_by_time", "verdicts", ["at"])
    op.create_index("generations_by_time", "generations", ["issued_at"])


def upgrade() -> None:
    _lease()
    _credentials()
    _remedies()
    _findings()
    _indexes()
    sqlite = op.get_bind().dialect.name == "sqlite"
    for statement in _SQLITE_RETENTION if sqlite else _POSTGRESQL_RETENTION:
        op.execute(statement)


def downgrade() -> None:
    raise NotImplementedError("schemas go forward only: restore the backup that belongs to the older release")
