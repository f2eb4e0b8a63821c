"""The remedies' table. Every function blocks, and belongs into the transaction of its caller."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import msgspec
from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from controller.store import tables
from controller.store.records import RemedyRow, RemedyState

OPEN = (RemedyState.WANTED, RemedyState.BEGUN)


def load(connection: Connection) -> list[RemedyRow]:
    """What has not ended, oldest first."""
    table = tables.remedies
    rows = connection.execute(select(table).where(table.c.state.in_(OPEN)).order_by(table.c.requested_at, table.c.id))
    return [RemedyRow(**{**row, "state": RemedyState(row["state"])}) for row in rows.mappings()]


def write(connection: Connection, rows: Collection[RemedyRow]) -> None:
    """Inserts rows, or replaces those of the same id."""
    if not rows:
        return
    dialect: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(tables.remedies)
    changes = {column.name: insert.excluded[column.name] for column in tables.remedies.columns if column.name != "id"}
    statement = insert.on_conflict_do_update(index_elements=["id"], set_=changes)
    connection.execute(statement, [msgspec.structs.asdict(row) for row in rows])
