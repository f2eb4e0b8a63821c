"""Ids of the audit log's lines after a database went back in time: none is used twice, whatever readers have seen.

The epoch of a copy is LIVES newer than that of the last life that wrote in it (``backup`` sees to that, or whoever
restores a dump). The first life that finds it so leaves out what may have been given since the copy was made: its ids
begin at the next multiple of ROOM.
"""

from __future__ import annotations

from sqlalchemy import Connection, func, insert, select

from controller.store import tables

LIVES = 1000
"""How many lives newer than its original a copy is. Numbers of directives and generations begin with the life's; what
agents have seen of the lives after the copy was made must look old to them."""
ROOM = 10**10
"""More lines than any fleet writes between a copy and its return: a thousand a second for four months."""
RESTORED = "store.restored"
"""Kind of the first line after the ids that were left out."""


def leave_room(connection: Connection) -> None:
    """Lets the audit log go on beyond every id that may have been given, with a line that says so."""
    audit, meta = tables.audit.c, tables.meta.c
    pruned = connection.execute(select(meta.value).where(meta.key == "audit_pruned")).scalar() or 0
    newest = max(pruned, connection.execute(select(func.max(audit.id))).scalar() or 0)
    at = connection.execute(select(func.max(audit.at))).scalar() or 0.0
    first = newest - newest % ROOM + ROOM
    sentence = (
        f"the database is a copy that ends with event {newest}: what was decided after it was made is lost, and events "
        f"go on from {first}"
    )
    row = {
        "id": first,
        "at": at,
        "kind": RESTORED,
        "node": "",
        "job": "",
        "generation": None,
        "trace": "",
        "sentence": sentence,
        "detail": "{}",
    }
    connection.execute(insert(tables.audit).values(row))


def followed_by(connection: Connection, newest: int, lines: int) -> int:
    """The id that just so many lines follow, of which ``newest`` is the last; 0 or less where there are not so many."""
    while newest % ROOM + 1 < lines:
        lines -= newest % ROOM + 1
        before = tables.audit.c.id < newest - newest % ROOM
        newest = connection.execute(select(func.max(tables.audit.c.id)).where(before)).scalar() or 0
        if not newest:
            return 0
    return newest - lines
