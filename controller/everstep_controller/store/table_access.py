"""Read and write tables, with one compiled statement for many rows.

SQLAlchemy processes the parameters of each row for fifteen microseconds, during which a storm of findings delayed every
heartbeat. Here SQLAlchemy compiles the statement once, and rows go directly to the driver: all columns are texts and
numbers, which need no conversion.

PostgreSQL's driver would send one statement per row, which takes three times as long. Inserts and deletes are sent as
one statement with an array per column.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection, Table, bindparam, delete, func, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import Insert

from everstep_controller.store import tables
from everstep_controller.store.rows import (
    DEAD_CREDENTIAL_KEPT_S,
    AlertRow,
    CredentialRow,
    EventLogRow,
    FindingRow,
    RemediationRow,
    RemediationState,
)

# ---- entries by people
# Entries that people caused in the event log have their own limit, so that nodes cannot displace them.

PREFIXES = ("operator.", "credential.")
"""Prefixes of the kinds of entries that people cause."""
OF_NODES = "credential.enrolled"
"""The only such kind that a node causes, with a join token."""

_KIND, _META = tables.event_log.c.kind, tables.meta.c
_KINDS = sa.text(
    "WITH RECURSIVE seen(kind) AS (SELECT min(kind) FROM audit UNION ALL "
    "SELECT (SELECT min(kind) FROM audit WHERE kind > seen.kind) FROM seen WHERE seen.kind IS NOT NULL) "
    "SELECT kind FROM seen WHERE kind IS NOT NULL"
)


def is_written_by_person() -> sa.ColumnElement[bool]:
    """Return the condition for an entry by a person. The event log's triggers use the same one (migration 0001)."""
    return sa.and_(sa.or_(*(_KIND.like(prefix + "%") for prefix in PREFIXES)), _KIND != OF_NODES)


def kinds(connection: Connection) -> list[str]:
    """Return all kinds of entries: a few dozen, each found by one step in the index."""
    return list(connection.execute(_KINDS).scalars())


def kinds_written_by_people(connection: Connection) -> list[str]:
    """Return the kinds that people cause."""
    return [kind for kind in kinds(connection) if kind.startswith(PREFIXES) and kind != OF_NODES]


# ---- clock mark
# The newest time that a database knows is in its newest event, or was written by its controller since.

CLOCK = "clock"
"""Key in ``meta``: wall seconds when a controller was last known to run."""
SET_BACK = "clock.set_back"
"""Kind of the event that records that the time was set back: earlier events may have later times."""


def meta_value(connection: Connection, key: str) -> int | None:
    """Return a value of ``meta``, or None."""
    value: int | None = connection.execute(select(_META.value).where(_META.key == key)).scalar()
    return value


def event_log_pruned(connection: Connection) -> int:
    """Return the newest id of the event log that retention may delete."""
    return meta_value(connection, "audit_pruned") or 0


def mark(connection: Connection, now: float) -> None:
    """Record that a controller runs at ``now``: a quiet fleet may write no event for weeks."""
    upsert(connection, tables.meta, [{"key": CLOCK, "value": int(now)}])


def newest_at(connection: Connection) -> float:
    """Return the newest known time in wall seconds; 0.0 for a new database."""
    event_log = tables.event_log.c
    event = connection.execute(select(event_log.at).order_by(event_log.id.desc()).limit(1)).scalar()
    return max(event or 0.0, float(meta_value(connection, CLOCK) or 0))


def is_copy(connection: Connection) -> bool:
    """Return whether the database is a restored copy that no controller has led over yet; its times may be old."""
    found = {row.key: row.value for row in connection.execute(select(_META.key, _META.value))}
    return "last_writing_epoch" in found and found["epoch"] - found["last_writing_epoch"] >= COPY_EPOCH_GAP


Row = dict[str, Any]

MIN_ROWS_FOR_ARRAYS = 8
"""Number of rows from which one statement with arrays is faster than one per row."""
_PARAMETER = re.compile(r"%\((\w+)\)s(?:::(\w+))?")
_INSERT = re.compile(r"(INSERT INTO \w+ \([^)]*\)) VALUES \(((?:%\(\w+\)s(?:::\w+)?(?:, )?)+)\)(.*)", re.DOTALL)
_DELETE = re.compile(r"DELETE FROM (\w+) WHERE (.*)", re.DOTALL)
_NUMBER = "DOUBLE PRECISION"
"""Type of a parameter to which SQLAlchemy gives no type in the text."""


def execute_many(connection: Connection, statement: sa.Executable, rows: Sequence[Row]) -> None:
    """Run ``statement``, which must live as long as the process, with each of the rows, which have equal keys."""
    if not rows:
        return
    text, given = _compiled(statement, connection.dialect, tuple(rows[0]))
    if len(rows) >= MIN_ROWS_FOR_ARRAYS and connection.dialect.name == "postgresql" and (one := _with_arrays(text)):
        text, numbers = one
        arrays = {name: [row[name] for row in rows] for name in rows[0]}
        for name in numbers:  # an array has one type, so integers must become floats
            arrays[name] = [None if value is None else float(value) for value in arrays[name]]
        connection.exec_driver_sql(text, arrays)
        return
    connection.exec_driver_sql(text, given(rows))


@cache
def _with_arrays(text: str) -> tuple[str, tuple[str, ...]] | None:
    """Return an insert or delete over arrays, and its numeric parameters; None for any other statement."""
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
    statement: Any, dialect: sa.Dialect, names: tuple[str, ...]
) -> tuple[str, Callable[[Sequence[Row]], Sequence[Any]]]:
    """Return the statement's text for a database, and a function that makes driver parameters of rows."""
    compiled: SQLCompiler = statement.compile(dialect=dialect, column_keys=names, for_executemany=True)
    if not compiled.positional:
        return str(compiled), lambda rows: rows
    order = compiled.positiontup or []
    if len(order) == 1:
        return str(compiled), lambda rows: [(row[order[0]],) for row in rows]
    pick = itemgetter(*order)
    return str(compiled), lambda rows: [pick(row) for row in rows]


def upsert(
    connection: Connection, table: Table, rows: list[dict[str, Any]], *, overwrite_with_none: bool = False
) -> None:
    """Insert rows, or update existing ones, where None leaves a column unchanged unless ``overwrite_with_none``."""
    execute_many(connection, _upsert_statement(connection.dialect.name, table, overwrite_with_none), rows)


@cache
def _upsert_statement(dialect_name: str, table: Table, overwrite_with_none: bool) -> Insert:
    """Return the cached statement: building it takes SQLAlchemy several times as long as SQLite's transaction."""
    dialect: Any = postgresql if dialect_name == "postgresql" else sqlite
    statement = dialect.insert(table)
    keys = [column.name for column in table.primary_key]
    changes = {
        column.name: statement.excluded[column.name]
        if overwrite_with_none
        else func.coalesce(statement.excluded[column.name], column)
        for column in table.columns
        if column.name not in keys
    }
    upserting: Insert = statement.on_conflict_do_update(index_elements=keys, set_=changes)
    return upserting


# ---- alerts
# All functions below block, and run in their caller's transaction.

_DELETE_ALERT = delete(tables.notified_alerts).where(tables.notified_alerts.c.fingerprint == bindparam("of"))


def load_alerts(connection: Connection) -> list[AlertRow]:
    """Return every alert whose end was not posted."""
    table = tables.notified_alerts
    return [AlertRow(**row) for row in connection.execute(select(table).order_by(table.c.fingerprint)).mappings()]


def write_alerts(connection: Connection, notified: Collection[AlertRow], resolved: Collection[str]) -> None:
    """Insert or replace ``notified``, and delete the fingerprints in ``resolved``."""
    upsert(connection, tables.notified_alerts, [msgspec.structs.asdict(row) for row in notified])
    execute_many(connection, _DELETE_ALERT, [{"of": fingerprint} for fingerprint in resolved])


def load_credentials(connection: Connection) -> list[CredentialRow]:
    """Return every row, oldest first."""
    table = tables.credentials
    rows = connection.execute(select(table).order_by(table.c.created_at, table.c.id)).mappings()
    return [CredentialRow(**{**row, "replaces": bool(row["replaces"])}) for row in rows]


def write_credentials(connection: Connection, rows: Collection[CredentialRow]) -> None:
    """Insert or replace rows by id, and delete those that were dead for DEAD_CREDENTIAL_KEPT_S at their creation."""
    values = [{**msgspec.structs.asdict(row), "replaces": int(row.replaces)} for row in rows]
    if not values:
        return
    now = max(row.revoked_at or row.created_at for row in rows)
    table = tables.credentials
    upsert(connection, table, values, overwrite_with_none=True)
    died_at = func.coalesce(table.c.revoked_at, table.c.expires_at)
    connection.execute(delete(table).where(died_at < bindparam("then")), {"then": now - DEAD_CREDENTIAL_KEPT_S})


OPEN_STATES = (RemediationState.REQUESTED, RemediationState.STARTED)


def load_remediations(connection: Connection) -> list[RemediationRow]:
    """Return remediations that have not ended, oldest first."""
    table = tables.remediations
    rows = connection.execute(
        select(table).where(table.c.state.in_(OPEN_STATES)).order_by(table.c.requested_at, table.c.id)
    )
    return [RemediationRow(**{**row, "state": RemediationState(row["state"])}) for row in rows.mappings()]


def write_remediations(connection: Connection, rows: Collection[RemediationRow]) -> None:
    """Insert or update rows by id."""
    upsert(connection, tables.remediations, [msgspec.structs.asdict(row) for row in rows])


_TABLE = tables.findings
_COLUMNS = ("node", "key", "kind", "at", "doc")
_IS_ACTIVE = sa.and_(
    _TABLE.c.node == bindparam("of", type_=_TABLE.c.node.type),
    _TABLE.c.key == bindparam("is", type_=_TABLE.c.key.type),
    _TABLE.c.cleared_at.is_(None),
)
_CLEAR_FINDING = update(_TABLE).where(_IS_ACTIVE).values(cleared_at=bindparam("at_s"))
_UPDATE_FINDING = update(_TABLE).where(_IS_ACTIVE).values(doc=bindparam("text"))
_INSERT_IF_NOT_ACTIVE = insert(_TABLE).from_select(
    _COLUMNS,
    select(*(bindparam(f"new_{name}", type_=_TABLE.c[name].type) for name in _COLUMNS)).where(
        ~sa.exists(select(sa.literal_column("1")).select_from(_TABLE).where(_IS_ACTIVE))
    ),
)


def write_findings(connection: Connection, rows: Sequence[FindingRow]) -> None:
    """Write raised and cleared findings, in order. An active finding that is raised again is updated."""
    for cleared, raised in _conflict_free_groups(rows):
        execute_many(connection, _CLEAR_FINDING, [{"of": row.node, "is": row.key, "at_s": row.at} for row in cleared])
        latest = [{"of": first.node, "is": first.key, "text": last.doc} for first, last in raised]
        execute_many(connection, _UPDATE_FINDING, latest)
        new = [
            {"of": first.node, "is": first.key}
            | {"new_node": first.node, "new_key": first.key, "new_kind": first.kind}
            | {"new_at": first.at, "new_doc": last.doc}
            for first, last in raised
        ]
        execute_many(connection, _INSERT_IF_NOT_ACTIVE, new)


_Raised = tuple[FindingRow, FindingRow]
"""A finding as it was raised, and its newest state."""


def _conflict_free_groups(rows: Sequence[FindingRow]) -> Iterator[tuple[list[FindingRow], list[_Raised]]]:
    """Yield groups that may be written together: in a group each finding is either cleared or raised."""
    cleared: dict[tuple[str, str], FindingRow] = {}
    raised: dict[tuple[str, str], _Raised] = {}
    for row in rows:
        place = (row.node, row.key)
        if place in (cleared if row.doc else raised):
            yield list(cleared.values()), list(raised.values())
            cleared, raised = {}, {}
        if row.doc:
            raised[place] = (raised.get(place, (row, row))[0], row)
        else:
            cleared.setdefault(place, row)
    yield list(cleared.values()), list(raised.values())


# ---- ids of the event log
# After a database was restored, no id of the event log may be used twice. The epoch of a copy is COPY_EPOCH_GAP newer
# than the last epoch that wrote to it (``back_up`` or the restorer of a dump sets it). The first controller that
# finds this skips ids that may have been used since the copy was made: its ids begin at the next multiple of
# EVENT_ID_GAP.

COPY_EPOCH_GAP = 1000
"""Epochs by which a copy is ahead of its original. Numbers of directives and generations begin with the epoch, so
numbers that agents saw after the copy was made look old to them."""
EVENT_ID_GAP = 10**10
"""More entries than any fleet writes between a copy and its restoration: a thousand per second for four months."""
RESTORED = "database.restored"
"""Kind of the first entry after the skipped ids."""


def skip_used_ids(connection: Connection) -> None:
    """Continue the event log after every id that may have been used, with an entry about it."""
    event_log = tables.event_log.c
    newest = max(event_log_pruned(connection), connection.execute(select(func.max(event_log.id))).scalar() or 0)
    at = connection.execute(select(func.max(event_log.at))).scalar() or 0.0
    first = newest - newest % EVENT_ID_GAP + EVENT_ID_GAP
    sentence = (
        f"the database is a copy that ends with event {newest}: later decisions are lost, and events continue from "
        f"{first}"
    )
    row = EventLogRow(id=first, at=at, kind=RESTORED, sentence=sentence)
    connection.execute(insert(tables.event_log).values(msgspec.structs.asdict(row)))


def id_before_newest(connection: Connection, newest: int, lines: int) -> int:
    """Return the id that exactly ``lines`` entries up to ``newest`` follow; 0 or less if there are fewer."""
    while newest % EVENT_ID_GAP + 1 < lines:
        lines -= newest % EVENT_ID_GAP + 1
        before = tables.event_log.c.id < newest - newest % EVENT_ID_GAP
        newest = connection.execute(select(func.max(tables.event_log.c.id)).where(before)).scalar() or 0
        if not newest:
            return 0
    return newest - lines
