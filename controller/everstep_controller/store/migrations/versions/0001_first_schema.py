"""First schema: the fleet's documents, the jobs' history, judgements, the audit log, delivery."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SQLITE_APPEND_ONLY = """
CREATE TRIGGER audit_refuses_{verb} BEFORE {verb} ON audit
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
"""
# INSERT OR REPLACE deletes the old row without asking the triggers for DELETE, unless recursive_triggers is on.
_SQLITE_ONLY_GROWS = """
CREATE TRIGGER audit_refuses_INSERT BEFORE INSERT ON audit
WHEN NEW.id <= (SELECT max(id) FROM audit)
BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END
"""
_POSTGRESQL_APPEND_ONLY = (
    """
CREATE FUNCTION everstep_append_only() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'the audit log is append-only'; END $$
""",
    """
CREATE TRIGGER audit_is_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON audit
FOR EACH STATEMENT EXECUTE FUNCTION everstep_append_only()
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
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(_SQLITE_APPEND_ONLY.format(verb=verb))
        op.execute(_SQLITE_ONLY_GROWS)
    else:
        for statement in _POSTGRESQL_APPEND_ONLY:
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
        "report_marks",
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
    op.bulk_insert(meta, [{"key": "epoch", "value": 0}])


def upgrade() -> None:
    _documents()
    _job_history()
    _judgements()
    _audit()
    _delivery()


def downgrade() -> None:
    raise NotImplementedError("schemas go forward only: restore the backup that belongs to the older release")
