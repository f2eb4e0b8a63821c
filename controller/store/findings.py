"""The history of findings. Every function blocks, and belongs into the transaction of its caller."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqlalchemy import Connection, and_, bindparam, exists, insert, literal_column, select, update

from controller.store import tables
from controller.store.bulk import execute_many
from controller.store.records import FindingRow

_TABLE = tables.findings
_COLUMNS = ("node", "key", "kind", "at", "doc")
_STANDS = and_(
    _TABLE.c.node == bindparam("of", type_=_TABLE.c.node.type),
    _TABLE.c.key == bindparam("is", type_=_TABLE.c.key.type),
    _TABLE.c.cleared_at.is_(None),
)
_CLEAR = update(_TABLE).where(_STANDS).values(cleared_at=bindparam("at_s"))
_BRING_UP_TO_DATE = update(_TABLE).where(_STANDS).values(doc=bindparam("text"))
_RAISE_WHAT_DOES_NOT_STAND = insert(_TABLE).from_select(
    _COLUMNS,
    select(*(bindparam(f"new_{name}", type_=_TABLE.c[name].type) for name in _COLUMNS)).where(
        ~exists(select(literal_column("1")).select_from(_TABLE).where(_STANDS))
    ),
)


def write(connection: Connection, rows: Sequence[FindingRow]) -> None:
    """Takes raised and cleared findings over, in order. One that stands already is brought up to date."""
    for cleared, raised in _rounds(rows):
        execute_many(connection, _CLEAR, [{"of": row.node, "is": row.key, "at_s": row.at} for row in cleared])
        latest = [{"of": first.node, "is": first.key, "text": last.doc} for first, last in raised]
        execute_many(connection, _BRING_UP_TO_DATE, latest)
        new = [
            {"of": first.node, "is": first.key}
            | {"new_node": first.node, "new_key": first.key, "new_kind": first.kind}
            | {"new_at": first.at, "new_doc": last.doc}
            for first, last in raised
        ]
        execute_many(connection, _RAISE_WHAT_DOES_NOT_STAND, new)


_Raised = tuple[FindingRow, FindingRow]
"""What a finding was when it was raised, and what it has become since."""


def _rounds(rows: Sequence[FindingRow]) -> Iterator[tuple[list[FindingRow], list[_Raised]]]:
    """What may be written together: in a round each finding is cleared or raised, and not both."""
    cleared: dict[tuple[str, str], FindingRow] = {}
    raised: dict[tuple[str, str], _Raised] = {}
    for row in rows:
        place = (row.node, row.key)
        if place in (cleared if row.doc else raised):
            yield list(cleared.values()), list(raised.values())
            cleared, raised = {}, {}
        if row.doc:
            raised[place] = (raised.get(place, (row, row))[0], row)
        else:
            cleared.setdefault(place, row)
    yield list(cleared.values()), list(raised.values())
