"""The credentials' table. Every function blocks, and belongs into the transaction of its caller."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import Connection, bindparam, delete, func, select

from controller.store import tables
from controller.store.records import KEPT_DEAD_S, CredentialRow
from controller.store.upsert import upsert


def load(connection: Connection) -> list[CredentialRow]:
    """Every row, oldest first."""
    table = tables.credentials
    rows = connection.execute(select(table).order_by(table.c.created_at, table.c.id)).mappings()
    return [CredentialRow(**{**row, "replaces": bool(row["replaces"])}) for row in rows]


def write(connection: Connection, rows: Collection[CredentialRow]) -> None:
    """Inserts rows or replaces those of the same id, and deletes what was dead for KEPT_DEAD_S when these were made."""
    values = [{**msgspec.structs.asdict(row), "replaces": int(row.replaces)} for row in rows]
    if not values:
        return
    now = max(row.revoked_at or row.created_at for row in rows)
    table = tables.credentials
    upsert(connection, table, values, whole=True)
    died_at = func.coalesce(table.c.revoked_at, table.c.expires_at)
    connection.execute(delete(table).where(died_at < bindparam("then")), {"then": now - KEPT_DEAD_S})
