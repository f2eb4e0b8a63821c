"""Alerts that a receiver may think are standing, so that whoever follows a controller tells their end."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "told_alerts",
        sa.Column("fingerprint", sa.Text, primary_key=True),
        sa.Column("doc", sa.Text, nullable=False),
    )


def downgrade() -> None:
    raise NotImplementedError("schemas go forward only: restore the backup that belongs to the older release")
