"""Inserting rows, or bringing those up to date that are there."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Connection, Table, func
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import Insert


def upsert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Inserts rows, or updates every other column where the primary key is there; None leaves a column as it is."""
    if rows:
        connection.execute(_upsert_statement(connection.dialect.name, table), rows)


@cache
def _upsert_statement(dialect_name: str, table: Table) -> Insert:
    """Built once: putting it together takes SQLAlchemy several times as long as a transaction takes SQLite."""
    dialect: Any = postgresql if dialect_name == "postgresql" else sqlite
    statement = dialect.insert(table)
    keys = [column.name for column in table.primary_key]
    changes = {
        column.name: func.coalesce(statement.excluded[column.name], column)
        for column in table.columns
        if column.name not in keys
    }
    upserting: Insert = statement.on_conflict_do_update(index_elements=keys, set_=changes)
    return upserting
