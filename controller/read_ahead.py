"""What a standby has read before its turn comes: the nodes' records, which are most of what a leader starts from.

A fleet whose leader died waits while the next one restores its state. Records change seldom (a beat changes none), so a
standby that looks now and then has nearly all of them decoded by then, and reads the few others in the transaction that
takes the database over.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from sqlalchemy import Connection

from controller.core.records import NodeRecord
from controller.store.ahead import NONE, Marks, changes
from everstep.errors import UNREADABLE


class Known(NamedTuple):
    """Records and their marks, by node. Never changed: the next reading makes another one."""

    marks: Marks
    records: dict[str, NodeRecord]


NOTHING = Known(NONE, {})


def read(connection: Connection, known: Known) -> Known:
    """``known`` brought up to date. Raises what the database raises. For a thread of its own."""
    found = changes(connection, known.marks)
    marks = {node: known.marks.nodes[node] for node in found.same}
    records = {node: known.records[node] for node in found.same}
    for row in found.rows:
        try:
            records[row.node] = msgspec.json.decode(row.doc, type=NodeRecord)
        except UNREADABLE:  # of another release: who leads says so
            continue
        marks[row.node] = row.mark
    return Known(Marks(found.server, marks), records)
