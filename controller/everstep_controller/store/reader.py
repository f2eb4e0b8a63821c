"""Read history for operators, and the state that a controller starts from. Blocking, for the reading thread."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, NamedTuple

from sqlalchemy import Column, ColumnElement, Connection, Row, Table, asc, desc, func, select, tuple_, union_all

from everstep_controller.store import table_access, tables
from everstep_controller.store.rows import EventLogRow, LoadedState, OutboxRow, VersionRow, decode_cursor, encode_cursor
from everstep_controller.store.table_access import SET_BACK

# ---- read ahead
# A standby rereads only records that have changed. PostgreSQL only: a row version is identified by its place (``ctid``)
# and its writing transaction (``xmin``) while the server runs. A server that was restored from a copy, or a replica
# promoted without the last transactions, reuses these numbers.


class RowVersions(NamedTuple):
    """Versions of node records as they were read."""

    server: str  # server run for which the versions are valid
    nodes: Mapping[str, str]  # version by node


NO_ROW_VERSIONS = RowVersions("", {})

_SERVER = "SELECT extract(epoch FROM pg_postmaster_start_time())::text"
_ROW_VERSIONS = "SELECT node, xmin::text || ctid::text AS mark FROM nodes"
_ROWS = "SELECT node, xmin::text || ctid::text AS row_version, doc FROM nodes WHERE node = ANY(%(nodes)s)"


class NodeChanges(NamedTuple):
    """Node records that changed since an earlier reading."""

    server: str  # as in ``RowVersions``
    unchanged: Set[str]  # nodes with an unchanged record
    rows: Sequence[Row[Any]]  # with ``node``, ``row_version`` and ``doc``


def changed_nodes(connection: Connection, row_versions: RowVersions) -> NodeChanges:
    """Return the records that changed since ``row_versions`` was read."""
    server: str = connection.exec_driver_sql(_SERVER).scalar_one()
    before = row_versions.nodes if row_versions.server == server else NO_ROW_VERSIONS.nodes
    marks = {row.node: row.mark for row in connection.exec_driver_sql(_ROW_VERSIONS)}
    same = {node for node, mark in marks.items() if before.get(node) == mark}
    rows = connection.exec_driver_sql(_ROWS, {"nodes": list(marks.keys() - same)})
    return NodeChanges(server, same, rows.all())


HistoryRow = dict[str, Any]
Page = tuple[list[HistoryRow], str]
"""Rows, and the cursor of the next page (empty if there is none)."""


class HistoryList(NamedTuple):
    """A table whose rows are listed in pages, newest first by the columns of ``order``."""

    table: Table
    order: Mapping[str, type]
    order_in_job: Mapping[str, type] | None = None  # order of the rows of one job


FINDINGS = HistoryList(tables.findings, {"id": int})
VERDICTS = HistoryList(tables.verdicts, {"at": float, "id": str})
CHECKPOINTS = HistoryList(tables.versions, {"committed_at": float, "job": str}, {"generation": int, "step": int})
REMEDIATIONS = HistoryList(tables.remediations, {"requested_at": float, "id": str})
GENERATIONS = HistoryList(tables.generations, {"issued_at": float, "job": str, "number": int}, {"number": int})


def list_page(
    connection: Connection,
    history: HistoryList,
    cursor: str,
    limit: int,
    *,
    is_null: tuple[str, bool | None] = ("", None),
    **wanted: str,
) -> Page:
    """Return the rows of a list after ``cursor``, and the next cursor. Raises MalformedMessage.

    ``wanted`` are values of columns (empty: any); ``is_null`` is a column, and whether it must be NULL (None: either).
    """
    table = history.table
    order = history.order_in_job if history.order_in_job is not None and wanted.get("job") else history.order
    statement = select(table).where(*(table.c[name] == value for name, value in wanted.items() if value))
    column, must_be_null = is_null
    if must_be_null is not None:
        statement = statement.where(table.c[column].is_(None) if must_be_null else table.c[column].is_not(None))
    columns = [table.c[name] for name in order]
    place = decode_cursor(cursor, tuple(order.values()))
    if place is not None:
        statement = statement.where(tuple_(*columns) < place)
    statement = statement.order_by(*(desc(column) for column in columns)).limit(limit + 1)
    rows = [dict(row) for row in connection.execute(statement).mappings()]
    if len(rows) <= limit:
        return rows, ""
    last = rows[limit - 1]
    return rows[:limit], encode_cursor(kind(last[name]) for name, kind in order.items())


def newest_versions(connection: Connection, job: str, limit: int, *, verified: bool = False) -> list[VersionRow]:
    """Return the job's newest (or newest verified) versions, newest first."""
    columns = tables.versions.c
    newest = select(tables.versions).where(columns.job == job).order_by(desc(columns.generation), desc(columns.step))
    if verified:
        newest = newest.where(columns.verified_at.is_not(None))
    return [VersionRow(**row) for row in connection.execute(newest.limit(limit)).mappings()]


def newest_recoveries(connection: Connection, job: str, limit: int) -> list[str]:
    """Return the job's newest recoveries (JSON), oldest first."""
    columns = tables.recoveries.c
    statement = select(columns.doc).where(columns.job == job).order_by(desc(columns.generation)).limit(limit)
    return list(connection.execute(statement).scalars())[::-1]


def newest_verdicts(connection: Connection, node: str, limit: int) -> list[str]:
    """Return the node's newest verdicts (JSON), newest first."""
    columns = tables.verdicts.c
    statement = select(columns.doc).where(columns.node == node).order_by(desc(columns.at)).limit(limit)
    return list(connection.execute(statement).scalars())


def verdicts_of_traces(
    connection: Connection, traces: Collection[str], decisions: Collection[str], *, since: float, until: float
) -> list[str]:
    """Return the verdicts (JSON) with one of the traces and decisions, given in this time, oldest first."""
    columns = tables.verdicts.c
    wanted = (columns.at >= since, columns.at <= until, columns.trace.in_(traces), columns.decision.in_(decisions))
    return list(connection.execute(select(columns.doc).where(*wanted).order_by(columns.at)).scalars())


VERDICTS_READ = 1000  # newest verdicts of a decision that are read at once


def verdicts_of_decision(connection: Connection, decision: str, *, since: float, until: float) -> list[str]:
    """Return the newest verdicts (JSON) with this decision, given in this time, oldest first."""
    columns = tables.verdicts.c
    wanted = (columns.at >= since, columns.at <= until, columns.decision == decision)
    newest = select(columns.doc).where(*wanted).order_by(desc(columns.at)).limit(VERDICTS_READ)
    return list(connection.execute(newest).scalars())[::-1]


def find_verdict(connection: Connection, verdict: str) -> str | None:
    """Return the verdict with this id (JSON), or None."""
    doc: str | None = connection.execute(select(tables.verdicts.c.doc).where(tables.verdicts.c.id == verdict)).scalar()
    return doc


class EventPage(NamedTuple):
    """The oldest events after an id."""

    rows: list[EventLogRow]
    deleted_through: int  # newest id that retention has deleted
    newest: int  # newest id of all


def _ids_of_kinds(
    connection: Connection, kinds: Sequence[str], count: list[ColumnElement[bool]], *, newest: bool, limit: int
) -> list[int]:
    """Return the first (or ``newest``) matching ids whose kind begins with one of ``kinds``, by each kind's index."""
    event_log = tables.event_log.c
    order = desc if newest else asc
    parts = []
    for kind in table_access.kinds(connection):
        if kind.startswith(tuple(kinds)):
            part = select(event_log.id).where(event_log.kind == kind, *count).order_by(order(event_log.id)).limit(limit)
            parts.append(select(part.subquery().c.id))
    if not parts:
        return []
    every = union_all(*parts).subquery()
    return list(connection.execute(select(every.c.id).order_by(order(every.c.id)).limit(limit)).scalars())


def _first_at(connection: Connection, at: float) -> int:
    """Return an id that only events at or after ``at`` reach, by bisection, since times rise with ids."""
    event_log = tables.event_log.c
    low, newest = connection.execute(select(func.min(event_log.id), func.max(event_log.id))).one()
    if newest is None:
        return 0
    high = newest + 1
    last_set_back = (
        select(event_log.id, event_log.at).where(event_log.kind == SET_BACK).order_by(desc(event_log.id)).limit(1)
    )
    if (set_back := connection.execute(last_set_back).first()) is not None:
        low, high = (set_back.id, high) if at >= set_back.at else (low, set_back.id)
    while low < high:
        middle = (low + high) // 2
        found = select(event_log.id, event_log.at).where(event_log.id >= middle).order_by(event_log.id).limit(1)
        id, when = connection.execute(found).one()
        if when < at:
            low = id + 1
        else:
            high = middle
    return int(low)


def events(
    connection: Connection,
    *,
    after: int,
    limit: int,
    trace: str = "",
    node: str = "",
    job: str = "",
    kinds: Sequence[str] = (),
    newest: bool = False,
    since: float | None = None,
    until: float | None = None,
) -> list[EventLogRow]:
    """Return rows with an id over ``after``, oldest first: the first (or ``newest``) ``limit`` matching rows.

    ``kinds`` are prefixes. An empty filter matches any. ``since`` and ``until`` (exclusive) are wall seconds.
    """
    event_log = tables.event_log.c
    wanted = [event_log.id > after]
    for column, value in ((event_log.trace, trace), (event_log.node, node), (event_log.job, job)):
        if value:
            wanted.append(column == value)
    if since is not None:
        wanted.append(event_log.id >= _first_at(connection, since))
    if until is not None:
        wanted.append(event_log.id < _first_at(connection, until))
    if kinds:
        wanted = [event_log.id.in_(_ids_of_kinds(connection, kinds, wanted, newest=newest, limit=limit))]
    order = desc(event_log.id) if newest else event_log.id
    rows = connection.execute(select(tables.event_log).where(*wanted).order_by(order).limit(limit)).mappings()
    found = [EventLogRow(**row) for row in rows]
    return found[::-1] if newest else found


def events_after(connection: Connection, after: int, limit: int) -> EventPage:
    """Return events after ``after`` with the facts that the event stream needs to report gaps."""
    rows = events(connection, after=after, limit=limit)  # first: rows deleted after this are no gap in these rows
    pruned = table_access.event_log_pruned(connection)
    newest = connection.execute(select(func.max(tables.event_log.c.id))).scalar() or 0
    return EventPage(rows, pruned, max(pruned, newest))


VERSIONS_LOADED = 64
"""Versions per job that a controller starts with."""


def load_state(
    connection: Connection, epoch: int, batch: int, row_versions: RowVersions = NO_ROW_VERSIONS
) -> LoadedState:
    """Return the state that a controller of ``epoch`` starts from, without unchanged node records."""
    unchanged: Set[str] = frozenset()
    if row_versions.nodes:
        found = changed_nodes(connection, row_versions)
        unchanged, nodes = found.unchanged, {row.node: row.doc for row in found.rows}
    else:
        nodes = _pairs(connection, tables.nodes.c.node, tables.nodes.c.doc)
    marks, event_log, findings = tables.acknowledged_reports.c, tables.event_log.c, tables.active_findings.c
    active = select(findings.node, findings.key, findings.doc).order_by(findings.node, findings.key)
    newest = connection.execute(select(func.max(event_log.id))).scalar()
    jobs = _pairs(connection, tables.jobs.c.job, tables.jobs.c.doc)
    return LoadedState(
        epoch=epoch,
        batch=batch,
        fleet=connection.execute(select(tables.fleet.c.doc)).scalar(),
        unchanged=unchanged,
        nodes=nodes,
        active_findings={(node, key): doc for node, key, doc in connection.execute(active)},
        jobs=jobs,
        versions=_versions(connection, jobs),
        credentials=table_access.load_credentials(connection),
        remediations=table_access.load_remediations(connection),
        alerts=table_access.load_alerts(connection),
        outbox=_outbox(connection),
        acknowledged_reports={
            (node, incarnation): through
            for node, incarnation, through in connection.execute(select(marks.node, marks.incarnation, marks.through))
        },
        poisoned=frozenset(
            (row.node, row.incarnation, row.number) for row in connection.execute(select(tables.poisoned_reports))
        ),
        newest_event=newest if newest is not None else table_access.event_log_pruned(connection),
        newest_at=table_access.newest_at(connection),
    )


def _pairs(connection: Connection, key: Column[Any], doc: Column[Any]) -> dict[str, str]:
    return {row[0]: row[1] for row in connection.execute(select(key, doc))}


def _outbox(connection: Connection) -> list[OutboxRow]:
    """Return unacknowledged directives, except those for a generation that is no longer stored."""
    outbox, generations = tables.outbox.c, tables.generations.c
    stored = connection.execute(select(outbox.node, outbox.seq, outbox.body).order_by(outbox.node, outbox.seq)).all()
    texts: dict[str, str] = {}
    for reference in {row.body for row in stored if row.body.startswith("@")}:
        job, _, number = reference[1:].partition("/")
        wanted = select(generations.doc).where(generations.job == job, generations.number == int(number))
        if (doc := connection.execute(wanted).scalar()) is not None:
            texts[reference] = f'{{"type":"NewGeneration","spec":{doc}}}'
    return [
        OutboxRow(node=row.node, seq=row.seq, body=texts.get(row.body, row.body))
        for row in stored
        if not row.body.startswith("@") or row.body in texts
    ]


def _versions(connection: Connection, jobs: dict[str, str]) -> list[VersionRow]:
    found: list[VersionRow] = []
    for job in jobs:
        found += newest_versions(connection, job, VERSIONS_LOADED)
        found += newest_versions(connection, job, 1, verified=True)
    return found
