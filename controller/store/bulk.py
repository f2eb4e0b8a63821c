"""Many rows through one statement.

SQLAlchemy puts the parameters of each row together again, at fifteen microseconds a row in which the interpreter can do
nothing else: a storm of findings made every agent's beat wait for that. The statement is compiled once, by SQLAlchemy
for the database at hand, and its rows go to the driver as they are: all our columns are texts and numbers, which no
driver needs converted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.sql.compiler import SQLCompiler

Row = dict[str, Any]


def execute_many(connection: Connection, statement: Executable, rows: Sequence[Row]) -> None:
    """Runs ``statement`` (one that lives as long as the process) with each of the rows, which have all its names."""
    if rows:
        text, given = _compiled(statement, connection.dialect, tuple(rows[0]))
        connection.exec_driver_sql(text, given(rows))


@cache
def _compiled(
    statement: Any, dialect: Dialect, names: tuple[str, ...]
) -> tuple[str, Callable[[Sequence[Row]], Sequence[Any]]]:
    """The statement's text for a database, and what makes its driver's parameters of rows with these names."""
    compiled: SQLCompiler = statement.compile(dialect=dialect, column_keys=names, for_executemany=True)
    if not compiled.positional:
        return str(compiled), lambda rows: rows
    order = compiled.positiontup or []
    if len(order) == 1:
        return str(compiled), lambda rows: [(row[order[0]],) for row in rows]
    pick = itemgetter(*order)
    return str(compiled), lambda rows: [pick(row) for row in rows]
