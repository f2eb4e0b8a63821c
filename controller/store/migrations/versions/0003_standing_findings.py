"""Standing findings in a table of their own, out of their nodes' documents."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NODES = sa.table("nodes", sa.column("node", sa.Text), sa.column("doc", sa.Text))


def _move(standing: sa.Table) -> None:
    connection = op.get_bind()
    for node, text in connection.execute(sa.select(_NODES.c.node, _NODES.c.doc)).all():
        document: dict[str, Any] = json.loads(text)
        findings = document.pop("findings", None)
        if findings:
            rows = [{"node": node, "key": key, "doc": json.dumps(finding)} for key, finding in findings.items()]
            op.bulk_insert(standing, rows)
            connection.execute(sa.update(_NODES).where(_NODES.c.node == node).values(doc=json.dumps(document)))


def upgrade() -> None:
    standing = op.create_table(
        "standing_findings",
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("node", "key", name="one_finding_per_key"),
    )
    _move(standing)


def downgrade() -> None:
    raise NotImplementedError("schemas go forward only: restore the backup that belongs to the older release")
