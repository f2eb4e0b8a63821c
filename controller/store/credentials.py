"""The credentials' table. Every function blocks, and belongs into the transaction of its caller."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from sqlalchemy import Connection, bindparam, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from controller.store import tables
from controller.store.records import CredentialRow

KEPT_DEAD_S = 30 * 86400.0
"""Seconds for which what expired or was revoked is still listed; the audit log has it for longer."""


def load(connection: Connection) -> list[CredentialRow]:
    """Every row, oldest first."""
    table = tables.credentials
    rows = connection.execute(select(table).order_by(table.c.created_at, table.c.id)).mappings()
    return [CredentialRow(**{**row, "replaces": bool(row["replaces"])}) for row in rows]


def write(connection: Connection, rows: Iterable[CredentialRow], now: float) -> None:
    """Inserts rows or replaces those of the same id, and deletes what has been dead for KEPT_DEAD_S at ``now``."""
    values = [{**msgspec.structs.asdict(row), "replaces": int(row.replaces)} for row in rows]
    if not values:
        return
    table = tables.credentials
    dialect: Any = postgresql if connection.dialect.name == "postgresql" else sqlite
    insert = dialect.insert(table)
    changes = {column.name: insert.excluded[column.name] for column in table.columns if column.name != "id"}
    connection.execute(insert.on_conflict_do_update(index_elements=["id"], set_=changes), values)
    died_at = func.coalesce(table.c.revoked_at, table.c.expires_at)
    connection.execute(delete(table).where(died_at < bindparam("then")), {"then": now - KEPT_DEAD_S})
