"""Which nodes' records have changed since they were last read: for a standby that reads ahead of its turn.

PostgreSQL only, where each version of a row has a place (``ctid``) and the number of the transaction that wrote it
(``xmin``). Both together are its mark: under the same mark stands the same text, while the server runs. One that was
restored from a copy, or a replica that was promoted without the last transactions, gives their numbers once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import NamedTuple

from sqlalchemy import Connection


class Marks(NamedTuple):
    """Of records as they were read. ``server``: the run of a server that they hold for. ``nodes``: by node."""

    server: str
    nodes: Mapping[str, str]


NONE = Marks("", {})

_SERVER = "SELECT extract(epoch FROM pg_postmaster_start_time())::text"
_MARKS = "SELECT node, xmin::text || ctid::text AS mark FROM nodes"
_ROWS = "SELECT node, xmin::text || ctid::text, doc FROM nodes WHERE node = ANY(%(nodes)s)"


class Row(NamedTuple):
    node: str
    mark: str
    doc: str


class Changes(NamedTuple):
    """``server``: as of ``Marks``. ``same``: nodes whose record is as it was."""

    server: str
    same: Set[str]
    rows: list[Row]


def changes(connection: Connection, known: Marks) -> Changes:
    """What is not as it was when ``known`` was read."""
    server: str = connection.exec_driver_sql(_SERVER).scalar_one()
    before = known.nodes if known.server == server else NONE.nodes
    marks = {row.node: row.mark for row in connection.exec_driver_sql(_MARKS)}
    same = {node for node, mark in marks.items() if before.get(node) == mark}
    rows = connection.exec_driver_sql(_ROWS, {"nodes": list(marks.keys() - same)})
    return Changes(server, same, [Row(*row) for row in rows])
