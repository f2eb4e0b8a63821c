"""Nodes at the doors of controllers that stand by, and leaders that gave their lease up for it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "knocks",
        sa.Column("controller", sa.Text, primary_key=True),
        sa.Column("nodes", sa.Integer, nullable=False),
        sa.Column("told_at", sa.Float(53), nullable=False),
    )
    for column in (
        sa.Column("heir", sa.Text, nullable=False, server_default=""),
        sa.Column("resigned_at", sa.Float(53), nullable=False, server_default="0"),
        sa.Column("resignations", sa.Integer, nullable=False, server_default="0"),
    ):
        op.add_column("lease", column)


def downgrade() -> None:
    raise NotImplementedError("schemas go forward only: restore the backup that belongs to the older release")
