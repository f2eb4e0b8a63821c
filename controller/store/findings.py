"""The history of findings. Every function blocks, and belongs into the transaction of its caller."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, and_, insert, update

from controller.store import tables
from controller.store.records import FindingRow


def write(connection: Connection, rows: Sequence[FindingRow]) -> None:
    """Takes raised and cleared findings over, in order. One that stands already is brought up to date."""
    table = tables.findings
    for row in rows:
        standing = and_(table.c.node == row.node, table.c.key == row.key, table.c.cleared_at.is_(None))
        if not row.doc:
            connection.execute(update(table).where(standing).values(cleared_at=row.at))
        elif connection.execute(update(table).where(standing).values(doc=row.doc)).rowcount == 0:
            connection.execute(insert(table).values(node=row.node, key=row.key, kind=row.kind, at=row.at, doc=row.doc))
