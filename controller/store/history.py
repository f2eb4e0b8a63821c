"""Pages of history, newest first. Every function blocks, and takes a connection of the reading thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Select, Table, desc, select, tuple_

from controller.cursors import cursor_at, place_of
from controller.store import tables

Row = dict[str, Any]
Page = tuple[list[Row], str]
"""Rows, and the cursor of the page after them (empty: there is none)."""


def _page(
    connection: Connection, statement: Select[Any], table: Table, order: Mapping[str, type], cursor: str, limit: int
) -> Page:
    """Rows of ``statement`` from after ``cursor`` on, newest first by the columns of ``order``."""
    columns = [table.c[name] for name in order]
    place = place_of(cursor, tuple(order.values()))
    if place is not None:
        statement = statement.where(tuple_(*columns) < place)
    statement = statement.order_by(*(desc(column) for column in columns)).limit(limit + 1)
    rows = [dict(row) for row in connection.execute(statement).mappings()]
    if len(rows) <= limit:
        return rows, ""
    last = rows[limit - 1]
    return rows[:limit], cursor_at(kind(last[name]) for name, kind in order.items())


def _where(statement: Select[Any], table: Table, **wanted: str) -> Select[Any]:
    for name, value in wanted.items():
        if value:
            statement = statement.where(table.c[name] == value)
    return statement


def findings(connection: Connection, *, node: str, kind: str, standing: bool | None, cursor: str, limit: int) -> Page:
    """Findings as they were seen."""
    table = tables.findings
    statement = _where(select(table), table, node=node, kind=kind)
    if standing is not None:
        statement = statement.where(table.c.cleared_at.is_(None) if standing else table.c.cleared_at.is_not(None))
    return _page(connection, statement, table, {"id": int}, cursor, limit)


def verdicts(connection: Connection, *, node: str, decision: str, cursor: str, limit: int) -> Page:
    """Verdicts."""
    table = tables.verdicts
    statement = _where(select(table), table, node=node, decision=decision)
    return _page(connection, statement, table, {"at": float, "id": str}, cursor, limit)


def checkpoints(connection: Connection, *, job: str, verified: bool | None, cursor: str, limit: int) -> Page:
    """Versions that were committed."""
    table = tables.versions
    statement = _where(select(table), table, job=job)
    if verified is not None:
        statement = statement.where(table.c.verified_at.is_not(None) if verified else table.c.verified_at.is_(None))
    order = {"generation": int, "step": int} if job else {"committed_at": float, "job": str}
    return _page(connection, statement, table, order, cursor, limit)


def remedies(connection: Connection, *, node: str, state: str, cursor: str, limit: int) -> Page:
    """Actions asked of the outside."""
    table = tables.remedies
    statement = _where(select(table), table, node=node, state=state)
    return _page(connection, statement, table, {"requested_at": float, "id": str}, cursor, limit)


def generations(connection: Connection, *, job: str, cursor: str, limit: int) -> Page:
    """Rosters."""
    table = tables.generations
    statement = _where(select(table), table, job=job)
    order = {"number": int} if job else {"issued_at": float, "job": str, "number": int}
    return _page(connection, statement, table, order, cursor, limit)
