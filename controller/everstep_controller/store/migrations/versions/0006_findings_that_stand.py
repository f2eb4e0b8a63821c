"""Findings that stand, and those that are over by their end: both were looked for among all."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    stands, is_over = sa.text("cleared_at IS NULL"), sa.text("cleared_at IS NOT NULL")
    for name, columns, which in (
        ("findings_standing", ["id"], stands),
        ("findings_standing_by_kind", ["kind", "id"], stands),
        ("findings_by_end", ["cleared_at"], is_over),
    ):
        op.create_index(name, "findings", columns, sqlite_where=which, postgresql_where=which)


def downgrade() -> None:
    raise NotImplementedError("schemas go forward only: restore the backup that belongs to the older release")
