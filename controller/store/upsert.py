"""Inserting rows, or bringing those up to date that are there."""

from __future__ import annotations

from functools import cache
from typing import Any

from sqlalchemy import Connection, Table, func
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import Insert

from controller.store.bulk import execute_many


def upsert(connection: Connection, table: Table, rows: list[dict[str, Any]], *, whole: bool = False) -> None:
    """Inserts rows, or updates every other column where the primary key is there; None leaves a column as it is,
    unless rows are ``whole``."""
    execute_many(connection, _upsert_statement(connection.dialect.name, table, whole), rows)


@cache
def _upsert_statement(dialect_name: str, table: Table, whole: bool) -> Insert:
    """Built once: putting it together takes SQLAlchemy several times as long as a transaction takes SQLite."""
    dialect: Any = postgresql if dialect_name == "postgresql" else sqlite
    statement = dialect.insert(table)
    keys = [column.name for column in table.primary_key]
    changes = {
        column.name: statement.excluded[column.name]
        if whole
        else func.coalesce(statement.excluded[column.name], column)
        for column in table.columns
        if column.name not in keys
    }
    upserting: Insert = statement.on_conflict_do_update(index_elements=keys, set_=changes)
    return upserting
