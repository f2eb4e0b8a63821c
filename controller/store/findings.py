"""The history of findings. Every function blocks, and belongs into the transaction of its caller."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import Connection, and_, bindparam, insert, update

from controller.store import tables
from controller.store.records import FindingRow

_TABLE = tables.findings
_STANDING = update(_TABLE).where(
    and_(_TABLE.c.node == bindparam("of"), _TABLE.c.key == bindparam("is"), _TABLE.c.cleared_at.is_(None))
)
_CLEAR = _STANDING.values(cleared_at=bindparam("at_s"))
_BRING_UP_TO_DATE = _STANDING.values(doc=bindparam("text"))
_RAISE = insert(_TABLE)


def write(connection: Connection, rows: Sequence[FindingRow]) -> None:
    """Takes raised and cleared findings over, in order. One that stands already is brought up to date."""
    for row in rows:
        place = {"of": row.node, "is": row.key}
        if not row.doc:
            connection.execute(_CLEAR, place | {"at_s": row.at})
        elif connection.execute(_BRING_UP_TO_DATE, place | {"text": row.doc}).rowcount == 0:
            new = {"node": row.node, "key": row.key, "kind": row.kind, "at": row.at, "doc": row.doc}
            connection.execute(_RAISE, new)
