"""Create all tables of ``everstep_controller.store.tables``, the triggers of the event log, and the first rows.

Nothing is released yet, so this migration follows ``tables``. The next migration must first copy today's tables here.
"""

from __future__ import annotations

from alembic import op

from everstep_controller.store import tables

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_PARTIAL_INDEXES = (
    "CREATE INDEX findings_active ON findings (id) WHERE cleared_at IS NULL",
    "CREATE INDEX findings_active_by_kind ON findings (kind, id) WHERE cleared_at IS NULL",
    "CREATE INDEX findings_by_end ON findings (cleared_at) WHERE cleared_at IS NOT NULL",
)
"""Created last: of two indexes of equal cost, SQLite takes the newer one."""

_SQLITE_TRIGGERS = (
    """
CREATE TRIGGER audit_refuses_UPDATE BEFORE UPDATE ON audit
BEGIN SELECT RAISE(ABORT, 'the event log is append-only'); END
""",
    # INSERT OR REPLACE deletes the old row without asking the triggers for DELETE, unless recursive_triggers is on.
    """
CREATE TRIGGER audit_refuses_INSERT BEFORE INSERT ON audit
WHEN NEW.id <= (SELECT max(id) FROM audit)
BEGIN SELECT RAISE(ABORT, 'the event log is append-only'); END
""",
    """
CREATE TRIGGER audit_refuses_DELETE BEFORE DELETE ON audit
WHEN OLD.id > COALESCE((SELECT value FROM meta WHERE key = CASE
  WHEN (OLD.kind LIKE 'operator.%' OR OLD.kind LIKE 'credential.%') AND OLD.kind <> 'credential.enrolled'
  THEN 'orders_pruned' ELSE 'audit_pruned' END), 0)
BEGIN SELECT RAISE(ABORT, 'the event log is append-only'); END
""",
)
_POSTGRESQL_TRIGGERS = (
    """
CREATE FUNCTION everstep_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'the event log is append-only'; END $$
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
  THEN orders_pruned ELSE pruned END) THEN RAISE EXCEPTION 'the event log is append-only'; END IF;
RETURN NULL;
END $$
""",
    """
CREATE TRIGGER audit_keeps_what_is_retained AFTER DELETE ON audit REFERENCING OLD TABLE AS gone
FOR EACH STATEMENT EXECUTE FUNCTION everstep_keeps_what_is_retained()
""",
)


def upgrade() -> None:
    connection = op.get_bind()
    tables.metadata.create_all(connection)
    op.bulk_insert(tables.meta, [{"key": key, "value": 0} for key in ("epoch", "batch", "audit_pruned")])
    first = {"id": 1, "epoch": 0, "holder": "", "address": "", "renewed_at": 0.0, "expires_at": 0.0}
    op.bulk_insert(tables.lease, [first])
    triggers = _SQLITE_TRIGGERS if connection.dialect.name == "sqlite" else _POSTGRESQL_TRIGGERS
    for statement in (*_PARTIAL_INDEXES, *triggers):
        op.execute(statement)


def downgrade() -> None:
    raise NotImplementedError("schemas go forward only: restore the backup that belongs to the older release")
