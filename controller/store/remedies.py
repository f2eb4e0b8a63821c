"""The remedies' table. Every function blocks, and belongs into the transaction of its caller."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import Connection, select

from controller.store import tables
from controller.store.records import RemedyRow, RemedyState
from controller.store.upsert import upsert

OPEN = (RemedyState.WANTED, RemedyState.BEGUN)


def load(connection: Connection) -> list[RemedyRow]:
    """What has not ended, oldest first."""
    table = tables.remedies
    rows = connection.execute(select(table).where(table.c.state.in_(OPEN)).order_by(table.c.requested_at, table.c.id))
    return [RemedyRow(**{**row, "state": RemedyState(row["state"])}) for row in rows.mappings()]


def write(connection: Connection, rows: Collection[RemedyRow]) -> None:
    """Inserts rows, or brings those of the same id up to date."""
    upsert(connection, tables.remedies, [msgspec.structs.asdict(row) for row in rows])
