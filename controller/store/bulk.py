"""Many rows through one statement.

SQLAlchemy puts the parameters of each row together again, at fifteen microseconds a row in which the interpreter can do
nothing else: a storm of findings made every agent's beat wait for that. The statement is compiled once, by SQLAlchemy
for the database at hand, and its rows go to the driver as they are: all our columns are texts and numbers, which no
driver needs converted.

PostgreSQL's driver would send many rows one by one, each a statement of its own, in three times the time. Inserts and
deletes go to it as one statement with an array for each column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Dialect, Executable
from sqlalchemy.sql.compiler import SQLCompiler

Row = dict[str, Any]

WORTH_ARRAYS = 8
"""Rows from which on one statement with arrays is quicker than one for each."""
_PARAMETER = re.compile(r"%\((\w+)\)s(?:::(\w+))?")
_INSERT = re.compile(r"(INSERT INTO \w+ \([^)]*\)) VALUES \(((?:%\(\w+\)s(?:::\w+)?(?:, )?)+)\)(.*)", re.DOTALL)
_DELETE = re.compile(r"DELETE FROM (\w+) WHERE (.*)", re.DOTALL)
_NUMBER = "DOUBLE PRECISION"
"""What a parameter is that SQLAlchemy gives no type in the text."""


def execute_many(connection: Connection, statement: Executable, rows: Sequence[Row]) -> None:
    """Runs ``statement`` (one that lives as long as the process) with each of the rows, which have all its names."""
    if not rows:
        return
    text, given = _compiled(statement, connection.dialect, tuple(rows[0]))
    if len(rows) >= WORTH_ARRAYS and connection.dialect.name == "postgresql" and (one := _with_arrays(text)):
        text, numbers = one
        arrays = {name: [row[name] for row in rows] for name in rows[0]}
        for name in numbers:  # an array is of one type: no whole numbers among others
            arrays[name] = [None if value is None else float(value) for value in arrays[name]]
        connection.exec_driver_sql(text, arrays)
        return
    connection.exec_driver_sql(text, given(rows))


@cache
def _with_arrays(text: str) -> tuple[str, tuple[str, ...]] | None:
    """The statement over arrays of its parameters, and which of those are of numbers; None for what is neither an
    insert of values nor a delete."""
    parameters = dict(_PARAMETER.findall(text))
    arrays = ", ".join(f"%({name})s::{kind or _NUMBER}[]" for name, kind in parameters.items())
    numbers = tuple(name for name, kind in parameters.items() if not kind)
    if (found := _INSERT.fullmatch(text)) and len(parameters) == found.group(2).count("%("):
        return f"{found.group(1)} SELECT * FROM unnest({arrays}){found.group(3)}", numbers  # noqa: S608 - SQLAlchemy's text
    if found := _DELETE.fullmatch(text):
        table, condition = found.groups()
        names = ", ".join(f'"{name}"' for name in parameters)
        condition = _PARAMETER.sub(r'given."\1"', condition)
        return f"DELETE FROM {table} USING unnest({arrays}) AS given({names}) WHERE {condition}", numbers  # noqa: S608
    return None


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
