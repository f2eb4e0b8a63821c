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
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from operator import itemgetter
from typing import Any

import msgspec
from sqlalchemy import (
    ColumnElement,
    Connection,
    Dialect,
    Executable,
    Table,
    and_,
    bindparam,
    delete,
    desc,
    exists,
    func,
    insert,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.dml import Insert

from everstep_controller.store import tables
from everstep_controller.store.rows import (
    DEAD_CREDENTIAL_KEPT_S,
    AlertRow,
    CredentialRow,
    FindingRow,
    RemediationRow,
    RemediationState,
)

# ---- people
# Which lines of the audit log people wrote. They have a quota of their own, so that no node pushes them out.

PREFIXES = ("operator.", "credential.")
"""How the kinds of lines begin that tell what people ordered."""
OF_NODES = "credential.enrolled"
"""The one among them that a node writes, with a join token."""

_KIND = tables.audit.c.kind
_KINDS = text(
    "WITH RECURSIVE seen(kind) AS (SELECT min(kind) FROM audit UNION ALL "
    "SELECT (SELECT min(kind) FROM audit WHERE kind > seen.kind) FROM seen WHERE seen.kind IS NOT NULL) "
    "SELECT kind FROM seen WHERE kind IS NOT NULL"
)


def is_written_by_person() -> ColumnElement[bool]:
    """Whether a line is theirs. The triggers of the audit log say the same (migration 0002)."""
    return and_(or_(*(_KIND.like(prefix + "%") for prefix in PREFIXES)), _KIND != OF_NODES)


def kinds(connection: Connection) -> list[str]:
    """Every kind of line that there is: a few dozen, each by one step in the index."""
    return list(connection.execute(_KINDS).scalars())


def kinds_written_by_people(connection: Connection) -> list[str]:
    """Those of them that people wrote."""
    return [kind for kind in kinds(connection) if kind.startswith(PREFIXES) and kind != OF_NODES]


# ---- clock mark
# The newest time that a database knows of: what its newest event carries, and what its controller noted since.

CLOCK = "clock"
"""Key in ``meta``: wall seconds when a controller was last known to run."""
SET_BACK = "clock.set_back"
"""Kind of the event that says that the time was set back: earlier ones may carry later times."""
_META = tables.meta.c


def mark(connection: Connection, now: float) -> None:
    """Notes that a controller runs at ``now``. A quiet fleet writes no event for weeks, which is no reason to doubt the
    clock of the next start."""
    upsert(connection, tables.meta, [{"key": CLOCK, "value": int(now)}])


def newest_at(connection: Connection) -> float:
    """Wall seconds; 0.0 in a database that no controller has written in."""
    audit = tables.audit.c
    event = connection.execute(select(audit.at).order_by(desc(audit.id)).limit(1)).scalar()
    noted = connection.execute(select(_META.value).where(_META.key == CLOCK)).scalar()
    return max(event or 0.0, float(noted or 0))


def is_copy(connection: Connection) -> bool:
    """Whether the database is a restored copy that no controller has led over yet. Its newest time may be old."""
    found = {row.key: row.value for row in connection.execute(select(_META.key, _META.value))}
    return "last_writing_epoch" in found and found["epoch"] - found["last_writing_epoch"] >= COPY_EPOCH_GAP


Row = dict[str, Any]

MIN_ROWS_FOR_ARRAYS = 8
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
    if len(rows) >= MIN_ROWS_FOR_ARRAYS and connection.dialect.name == "postgresql" and (one := _with_arrays(text)):
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


# ---- upsert
# Inserting rows, or bringing those up to date that are there.


def upsert(
    connection: Connection, table: Table, rows: list[dict[str, Any]], *, overwrite_with_none: bool = False
) -> None:
    """Inserts rows, or updates every other column where the primary key is there; None leaves a column as it is,
    unless ``overwrite_with_none``."""
    execute_many(connection, _upsert_statement(connection.dialect.name, table, overwrite_with_none), rows)


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


# ---- alerts
# The table of alerts that were told. Every function blocks, and belongs into the transaction of its caller.

_OVER = delete(tables.notified_alerts).where(tables.notified_alerts.c.fingerprint == bindparam("of"))


def load_alerts(connection: Connection) -> list[AlertRow]:
    """Every alert whose end has not been told."""
    table = tables.notified_alerts
    return [AlertRow(**row) for row in connection.execute(select(table).order_by(table.c.fingerprint)).mappings()]


def write_alerts(connection: Connection, notified: Collection[AlertRow], resolved: Collection[str]) -> None:
    """Inserts or replaces ``told``, and deletes those whose fingerprints are in ``over``."""
    upsert(connection, tables.notified_alerts, [msgspec.structs.asdict(row) for row in notified])
    execute_many(connection, _OVER, [{"of": fingerprint} for fingerprint in resolved])


# ---- credentials
# The credentials' table. Every function blocks, and belongs into the transaction of its caller.


def load_credentials(connection: Connection) -> list[CredentialRow]:
    """Every row, oldest first."""
    table = tables.credentials
    rows = connection.execute(select(table).order_by(table.c.created_at, table.c.id)).mappings()
    return [CredentialRow(**{**row, "replaces": bool(row["replaces"])}) for row in rows]


def write_credentials(connection: Connection, rows: Collection[CredentialRow]) -> None:
    """Inserts rows or replaces those of the same id, and deletes what was dead for KEPT_DEAD_S when these were made."""
    values = [{**msgspec.structs.asdict(row), "replaces": int(row.replaces)} for row in rows]
    if not values:
        return
    now = max(row.revoked_at or row.created_at for row in rows)
    table = tables.credentials
    upsert(connection, table, values, overwrite_with_none=True)
    died_at = func.coalesce(table.c.revoked_at, table.c.expires_at)
    connection.execute(delete(table).where(died_at < bindparam("then")), {"then": now - DEAD_CREDENTIAL_KEPT_S})


# ---- remedies
# The remedies' table. Every function blocks, and belongs into the transaction of its caller.

OPEN_STATES = (RemediationState.REQUESTED, RemediationState.STARTED)


def load_remediations(connection: Connection) -> list[RemediationRow]:
    """What has not ended, oldest first."""
    table = tables.remediations
    rows = connection.execute(
        select(table).where(table.c.state.in_(OPEN_STATES)).order_by(table.c.requested_at, table.c.id)
    )
    return [RemediationRow(**{**row, "state": RemediationState(row["state"])}) for row in rows.mappings()]


def write_remediations(connection: Connection, rows: Collection[RemediationRow]) -> None:
    """Inserts rows, or brings those of the same id up to date."""
    upsert(connection, tables.remediations, [msgspec.structs.asdict(row) for row in rows])


# ---- findings
# The history of findings. Every function blocks, and belongs into the transaction of its caller.

_TABLE = tables.findings
_COLUMNS = ("node", "key", "kind", "at", "doc")
_STANDS = and_(
    _TABLE.c.node == bindparam("of", type_=_TABLE.c.node.type),
    _TABLE.c.key == bindparam("is", type_=_TABLE.c.key.type),
    _TABLE.c.cleared_at.is_(None),
)
_CLEAR = update(_TABLE).where(_STANDS).values(cleared_at=bindparam("at_s"))
_BRING_UP_TO_DATE = update(_TABLE).where(_STANDS).values(doc=bindparam("text"))
_RAISE_WHAT_DOES_NOT_STAND = insert(_TABLE).from_select(
    _COLUMNS,
    select(*(bindparam(f"new_{name}", type_=_TABLE.c[name].type) for name in _COLUMNS)).where(
        ~exists(select(literal_column("1")).select_from(_TABLE).where(_STANDS))
    ),
)


def write_findings(connection: Connection, rows: Sequence[FindingRow]) -> None:
    """Takes raised and cleared findings over, in order. One that stands already is brought up to date."""
    for cleared, raised in _rounds(rows):
        execute_many(connection, _CLEAR, [{"of": row.node, "is": row.key, "at_s": row.at} for row in cleared])
        latest = [{"of": first.node, "is": first.key, "text": last.doc} for first, last in raised]
        execute_many(connection, _BRING_UP_TO_DATE, latest)
        new = [
            {"of": first.node, "is": first.key}
            | {"new_node": first.node, "new_key": first.key, "new_kind": first.kind}
            | {"new_at": first.at, "new_doc": last.doc}
            for first, last in raised
        ]
        execute_many(connection, _RAISE_WHAT_DOES_NOT_STAND, new)


_Raised = tuple[FindingRow, FindingRow]
"""What a finding was when it was raised, and what it has become since."""


def _rounds(rows: Sequence[FindingRow]) -> Iterator[tuple[list[FindingRow], list[_Raised]]]:
    """What may be written together: in a round each finding is cleared or raised, and not both."""
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


# ---- audit ids
# Ids of the audit log's lines after a database went back in time: none is used twice, whatever readers have seen.
#
# The epoch of a copy is LIVES newer than that of the last life that wrote in it (``backup`` sees to that, or whoever
# restores a dump). The first life that finds it so leaves out what may have been given since the copy was made: its ids
# begin at the next multiple of ROOM.

COPY_EPOCH_GAP = 1000
"""How many lives newer than its original a copy is. Numbers of directives and generations begin with the life's; what
agents have seen of the lives after the copy was made must look old to them."""
AUDIT_ID_GAP = 10**10
"""More lines than any fleet writes between a copy and its return: a thousand a second for four months."""
RESTORED = "database.restored"
"""Kind of the first line after the ids that were left out."""


def skip_used_ids(connection: Connection) -> None:
    """Lets the audit log go on beyond every id that may have been given, with a line that says so."""
    audit, meta = tables.audit.c, tables.meta.c
    pruned = connection.execute(select(meta.value).where(meta.key == "audit_pruned")).scalar() or 0
    newest = max(pruned, connection.execute(select(func.max(audit.id))).scalar() or 0)
    at = connection.execute(select(func.max(audit.at))).scalar() or 0.0
    first = newest - newest % AUDIT_ID_GAP + AUDIT_ID_GAP
    sentence = (
        f"the database is a copy that ends with event {newest}: what was decided after it was made is lost, and events "
        f"go on from {first}"
    )
    row = {
        "id": first,
        "at": at,
        "kind": RESTORED,
        "node": "",
        "job": "",
        "generation": None,
        "trace": "",
        "sentence": sentence,
        "detail": "{}",
    }
    connection.execute(insert(tables.audit).values(row))


def id_before_newest(connection: Connection, newest: int, lines: int) -> int:
    """The id that just so many lines follow, of which ``newest`` is the last; 0 or less where there are not so many."""
    while newest % AUDIT_ID_GAP + 1 < lines:
        lines -= newest % AUDIT_ID_GAP + 1
        before = tables.audit.c.id < newest - newest % AUDIT_ID_GAP
        newest = connection.execute(select(func.max(tables.audit.c.id)).where(before)).scalar() or 0
        if not newest:
            return 0
    return newest - lines
