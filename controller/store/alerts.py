"""The table of alerts that were told. Every function blocks, and belongs into the transaction of its caller."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from sqlalchemy import Connection, bindparam, delete, select

from controller.store import tables
from controller.store.bulk import execute_many
from controller.store.records import AlertRow
from controller.store.upsert import upsert

_OVER = delete(tables.told_alerts).where(tables.told_alerts.c.fingerprint == bindparam("of"))


def load(connection: Connection) -> list[AlertRow]:
    """Every alert whose end has not been told."""
    table = tables.told_alerts
    return [AlertRow(**row) for row in connection.execute(select(table).order_by(table.c.fingerprint)).mappings()]


def write(connection: Connection, told: Collection[AlertRow], over: Collection[str]) -> None:
    """Inserts or replaces ``told``, and deletes those whose fingerprints are in ``over``."""
    upsert(connection, tables.told_alerts, [msgspec.structs.asdict(row) for row in told])
    execute_many(connection, _OVER, [{"of": fingerprint} for fingerprint in over])
