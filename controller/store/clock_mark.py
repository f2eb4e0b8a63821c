"""The newest time that a database knows of: what its newest event carries, and what its controller noted since."""

from __future__ import annotations

from sqlalchemy import Connection, desc, select

from controller.store import tables
from controller.store.audit_ids import LIVES
from controller.store.upsert import upsert

CLOCK = "clock"
"""Key in ``meta``: wall seconds when a controller was last known to run."""
SET_BACK = "clock.set_back"
"""Kind of the event that says that the time was set back: earlier ones may carry later times."""
_META = tables.meta.c


def mark(connection: Connection, now: float) -> None:
    """Notes that a controller runs at ``now``. A quiet fleet writes no event for weeks, which is no reason to doubt the
    clock of the next start."""
    upsert(connection, tables.meta, [{"key": CLOCK, "value": int(now)}])


def newest_at(connection: Connection) -> float:
    """Wall seconds; 0.0 in a database that no controller has written in."""
    audit = tables.audit.c
    event = connection.execute(select(audit.at).order_by(desc(audit.id)).limit(1)).scalar()
    noted = connection.execute(select(_META.value).where(_META.key == CLOCK)).scalar()
    return max(event or 0.0, float(noted or 0))


def is_copy(connection: Connection) -> bool:
    """Whether the database is a restored copy that no controller has led over yet. Its newest time may be old."""
    found = {row.key: row.value for row in connection.execute(select(_META.key, _META.value))}
    return "led" in found and found["epoch"] - found["led"] >= LIVES
