"""Standing findings in a table of their own, out of their nodes' documents; rosters by node instead of by rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

Document = dict[str, Any]


def _each(table: str, keys: Sequence[str], column: str, change: Callable[[Document], bool]) -> None:
    """Rewrites the documents of a table that ``change`` says it has changed."""
    rows = sa.table(table, *(sa.column(name) for name in (*keys, column)))
    connection = op.get_bind()
    for row in connection.execute(sa.select(rows)).mappings().all():
        document = json.loads(row[column]) if row[column].startswith("{") else {}
        if change(document):
            here = sa.and_(*(rows.c[key] == row[key] for key in keys))
            connection.execute(sa.update(rows).where(here).values({column: json.dumps(document)}))


def _move_findings(standing: sa.Table) -> None:
    def move(document: Document) -> bool:
        findings = document.pop("findings", {})
        rows = [{"node": document["node"], "key": key, "doc": json.dumps(finding)} for key, finding in findings.items()]
        if rows:
            op.bulk_insert(standing, rows)
        return bool(rows)

    _each("nodes", ("node",), "doc", move)


def _seat(generation: Document | None) -> bool:
    """A roster had an entry for each rank, nodes in the order of their ranks."""
    if not generation or "roster" not in generation:
        return False
    generation["seats"] = list(dict.fromkeys(member["node"] for member in generation.pop("roster")))
    return True


def _seat_in_job(document: Document) -> bool:
    return any([_seat(document.get("generation")), _seat(document.get("leaving"))])


def upgrade() -> None:
    standing = op.create_table(
        "standing_findings",
        sa.Column("node", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("doc", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("node", "key", name="one_finding_per_key"),
    )
    _move_findings(standing)
    _each("generations", ("job", "number"), "doc", _seat)
    _each("jobs", ("job",), "doc", _seat_in_job)
    _each("outbox", ("node", "seq"), "body", lambda body: _seat(body.get("spec")))


def downgrade() -> None:
    raise NotImplementedError("schemas go forward only: restore the backup that belongs to the older release")
