"""Which nodes' records have changed since they were last read: for a standby that reads ahead of its turn.

PostgreSQL only, where each version of a row has a place (``ctid``) and the number of the transaction that wrote it
(``xmin``). Both together are its mark: under the same mark stands the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from sqlalchemy import Connection

Marks = Mapping[str, str]
"""By node, of its record as it was read."""
NONE: Marks = {}

_MARKS = "SELECT node, xmin::text || ctid::text AS mark FROM nodes"
_ROWS = "SELECT node, xmin::text || ctid::text, doc FROM nodes WHERE node = ANY(%(nodes)s)"


class Row(NamedTuple):
    node: str
    mark: str
    doc: str


class Changes(NamedTuple):
    """``same``: nodes whose record is as it was."""

    same: Set[str]
    rows: list[Row]


def changes(connection: Connection, known: Marks) -> Changes:
    """What is not as it was when ``known`` was read."""
    marks = {row.node: row.mark for row in connection.exec_driver_sql(_MARKS)}
    same = {node for node, mark in marks.items() if known.get(node) == mark}
    rows = connection.exec_driver_sql(_ROWS, {"nodes": list(marks.keys() - same)})
    return Changes(same, [Row(*row) for row in rows])
