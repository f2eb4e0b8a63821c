"""Read history for operators, and the state that a controller starts from. Blocking, for the reading thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Engine,
    Select,
    Table,
    asc,
    desc,
    func,
    select,
    tuple_,
    union_all,
)

from everstep_controller.store import table_access, tables
from everstep_controller.store.database_errors import abort_connection
from everstep_controller.store.rows import AuditRow, LoadedState, OutboxRow, VersionRow, decode_cursor, encode_cursor
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
_ROWS = "SELECT node, xmin::text || ctid::text, doc FROM nodes WHERE node = ANY(%(nodes)s)"


class NodeRow(NamedTuple):
    node: str
    row_version: str
    doc: str


class NodeChanges(NamedTuple):
    """Node records that changed since an earlier reading."""

    server: str  # as in ``RowVersions``
    unchanged: Set[str]  # nodes with an unchanged record
    rows: list[NodeRow]


def changed_nodes(connection: Connection, row_versions: RowVersions) -> NodeChanges:
    """Return the records that changed since ``row_versions`` was read."""
    server: str = connection.exec_driver_sql(_SERVER).scalar_one()
    before = row_versions.nodes if row_versions.server == server else NO_ROW_VERSIONS.nodes
    marks = {row.node: row.mark for row in connection.exec_driver_sql(_ROW_VERSIONS)}
    same = {node for node, mark in marks.items() if before.get(node) == mark}
    rows = connection.exec_driver_sql(_ROWS, {"nodes": list(marks.keys() - same)})
    return NodeChanges(server, same, [NodeRow(*row) for row in rows])


# ---- history
# Pages are ordered newest first.

HistoryRow = dict[str, Any]
Page = tuple[list[HistoryRow], str]
"""Rows, and the cursor of the next page (empty if there is none)."""


def _page(
    connection: Connection, statement: Select[Any], table: Table, order: Mapping[str, type], cursor: str, limit: int
) -> Page:
    """Return rows of ``statement`` after ``cursor``, newest first by the columns of ``order``."""
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


def _where(statement: Select[Any], table: Table, **wanted: str) -> Select[Any]:
    for name, value in wanted.items():
        if value:
            statement = statement.where(table.c[name] == value)
    return statement


def findings(connection: Connection, *, node: str, kind: str, active: bool | None, cursor: str, limit: int) -> Page:
    """Return findings, by the time they were raised."""
    table = tables.findings
    statement = _where(select(table), table, node=node, kind=kind)
    if active is not None:
        statement = statement.where(table.c.cleared_at.is_(None) if active else table.c.cleared_at.is_not(None))
    return _page(connection, statement, table, {"id": int}, cursor, limit)


def verdicts(connection: Connection, *, node: str, decision: str, cursor: str, limit: int) -> Page:
    """Return verdicts."""
    table = tables.verdicts
    statement = _where(select(table), table, node=node, decision=decision)
    return _page(connection, statement, table, {"at": float, "id": str}, cursor, limit)


def checkpoints(connection: Connection, *, job: str, verified: bool | None, cursor: str, limit: int) -> Page:
    """Return committed versions."""
    table = tables.versions
    statement = _where(select(table), table, job=job)
    if verified is not None:
        statement = statement.where(table.c.verified_at.is_not(None) if verified else table.c.verified_at.is_(None))
    order = {"generation": int, "step": int} if job else {"committed_at": float, "job": str}
    return _page(connection, statement, table, order, cursor, limit)


def remediations(connection: Connection, *, node: str, state: str, cursor: str, limit: int) -> Page:
    """Return remediations."""
    table = tables.remediations
    statement = _where(select(table), table, node=node, state=state)
    return _page(connection, statement, table, {"requested_at": float, "id": str}, cursor, limit)


def generations(connection: Connection, *, job: str, cursor: str, limit: int) -> Page:
    """Return generations."""
    table = tables.generations
    statement = _where(select(table), table, job=job)
    order = {"number": int} if job else {"issued_at": float, "job": str, "number": int}
    return _page(connection, statement, table, order, cursor, limit)


T = TypeVar("T")


def newest_versions(connection: Connection, job: str, limit: int) -> list[VersionRow]:
    """Return the job's newest versions, newest first."""
    columns = tables.versions.c
    newest = select(tables.versions).where(columns.job == job).order_by(desc(columns.generation), desc(columns.step))
    return [VersionRow(**row) for row in connection.execute(newest.limit(limit)).mappings()]


def newest_verified(connection: Connection, job: str) -> list[VersionRow]:
    """Return the job's newest verified version, or nothing."""
    columns = tables.versions.c
    statement = (
        select(tables.versions)
        .where(columns.job == job, columns.verified_at.is_not(None))
        .order_by(desc(columns.generation), desc(columns.step))
        .limit(1)
    )
    return [VersionRow(**row) for row in connection.execute(statement).mappings()]


class EventPage(NamedTuple):
    """The oldest events after an id."""

    rows: list[AuditRow]
    deleted_through: int  # newest id that retention has deleted
    newest: int  # newest id of all


def _ids_of_kinds(
    connection: Connection, kinds: Sequence[str], count: list[ColumnElement[bool]], *, newest: bool, limit: int
) -> list[int]:
    """Return the first (or ``newest``) ``limit`` matching ids whose kind begins with one of ``kinds``.

    Up to ``limit`` ids are read for each kind in its index's order, because a range of kinds would need sorting.
    """
    audit = tables.audit.c
    order = desc if newest else asc
    parts = []
    for kind in table_access.kinds(connection):
        if kind.startswith(tuple(kinds)):
            part = select(audit.id).where(audit.kind == kind, *count).order_by(order(audit.id)).limit(limit)
            parts.append(select(part.subquery().c.id))
    if not parts:
        return []
    every = union_all(*parts).subquery()
    return list(connection.execute(select(every.c.id).order_by(order(every.c.id)).limit(limit)).scalars())


def _first_at(connection: Connection, at: float) -> int:
    """Return an id that all events at or after ``at`` reach or exceed, and no earlier event does.

    Times rise with ids (``SteadyTime``), so some twenty lookups of the primary key find it by bisection. If the time
    was set back, times rise separately before and after that event.
    """
    audit = tables.audit.c
    low, newest = connection.execute(select(func.min(audit.id), func.max(audit.id))).one()
    if newest is None:
        return 0
    high = newest + 1
    last_set_back = select(audit.id, audit.at).where(audit.kind == SET_BACK).order_by(desc(audit.id)).limit(1)
    if (set_back := connection.execute(last_set_back).first()) is not None:
        low, high = (set_back.id, high) if at >= set_back.at else (low, set_back.id)
    while low < high:
        middle = (low + high) // 2
        found = select(audit.id, audit.at).where(audit.id >= middle).order_by(audit.id).limit(1)
        id, when = connection.execute(found).one()
        if when < at:
            low = id + 1
        else:
            high = middle
    return int(low)


class HistoryReader:
    """Reads history over its own connection, so that a long read delays no decision.

    For one thread, except ``abort``.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            self._connection = connection
            try:
                yield connection
            finally:
                self._connection = None

    def abort(self) -> None:
        """Make a read that hangs in the other thread fail soon. Any thread may call this."""
        connection = self._connection
        if connection is not None:
            abort_connection(connection)

    def events(
        self,
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
    ) -> list[AuditRow]:
        """Return rows with an id over ``after``, oldest first: the first (or ``newest``) ``limit`` matching rows.

        Args:
            after: rows must have a larger id.
            limit: maximum number of rows.
            trace, node, job: values to match; empty for any.
            kinds: prefixes of the kind; empty for any.
            newest: return the newest matching rows instead of the oldest.
            since, until: wall seconds; ``until`` is exclusive.
        """
        audit = tables.audit.c
        wanted = [audit.id > after]
        for column, value in ((audit.trace, trace), (audit.node, node), (audit.job, job)):
            if value:
                wanted.append(column == value)
        order = desc(audit.id) if newest else audit.id
        with self._connected() as connection:
            if since is not None:
                wanted.append(audit.id >= _first_at(connection, since))
            if until is not None:
                wanted.append(audit.id < _first_at(connection, until))
            if kinds:
                wanted = [audit.id.in_(_ids_of_kinds(connection, kinds, wanted, newest=newest, limit=limit))]
            rows = connection.execute(select(tables.audit).where(*wanted).order_by(order).limit(limit)).mappings()
            found = [AuditRow(**row) for row in rows]
        return found[::-1] if newest else found

    def events_after(self, after: int, limit: int) -> EventPage:
        """Return events after ``after`` with the facts that the event stream needs to report gaps."""
        rows = self.events(after=after, limit=limit)  # first: rows deleted after this are no gap in these rows
        meta, newest = tables.meta.c, select(func.max(tables.audit.c.id))
        with self._connected() as connection:
            pruned = connection.execute(select(meta.value).where(meta.key == "audit_pruned")).scalar() or 0
            return EventPage(rows, pruned, max(pruned, connection.execute(newest).scalar() or 0))

    def page(self, query: Callable[[Connection], T]) -> T:
        """Run a query of ``everstep_controller.store.reader``."""
        with self._connected() as connection:
            return query(connection)

    def recoveries(self, job: str, *, limit: int) -> list[str]:
        """Return the job's newest recoveries (JSON), oldest first."""
        columns = tables.recoveries.c
        statement = select(columns.doc).where(columns.job == job).order_by(desc(columns.generation)).limit(limit)
        with self._connected() as connection:
            return [row[0] for row in connection.execute(statement)][::-1]

    def verdicts(self, node: str, *, limit: int) -> list[str]:
        """Return the node's newest verdicts (JSON), newest first."""
        columns = tables.verdicts.c
        statement = select(columns.doc).where(columns.node == node).order_by(desc(columns.at)).limit(limit)
        with self._connected() as connection:
            return [row[0] for row in connection.execute(statement)]

    def verdict(self, verdict: str) -> str | None:
        """Return the verdict with this id (JSON), or None."""
        with self._connected() as connection:
            statement = select(tables.verdicts.c.doc).where(tables.verdicts.c.id == verdict)
            doc: str | None = connection.execute(statement).scalar()
            return doc

    def versions(self, job: str, *, limit: int) -> list[VersionRow]:
        """Return the job's newest committed versions, newest first."""
        with self._connected() as connection:
            return newest_versions(connection, job, limit)


# ---- starting state

VERSIONS_LOADED = 64
"""Versions per job that a controller starts with."""


def load_state(
    connection: Connection, epoch: int, batch: int, row_versions: RowVersions = NO_ROW_VERSIONS
) -> LoadedState:
    """Return the state that a controller of ``epoch`` starts from, without unchanged node records."""
    same, nodes = _nodes(connection, row_versions)
    marks, audit = tables.acknowledged_reports.c, tables.audit.c
    newest = connection.execute(select(audit.id).order_by(desc(audit.id)).limit(1)).scalar()
    pruned = select(tables.meta.c.value).where(tables.meta.c.key == "audit_pruned")
    jobs = _pairs(connection, tables.jobs.c.job, tables.jobs.c.doc)
    return LoadedState(
        epoch=epoch,
        batch=batch,
        fleet=connection.execute(select(tables.fleet.c.doc)).scalar(),
        unchanged=same,
        nodes=nodes,
        active_findings=_active_findings(connection),
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
        newest_audit=newest if newest is not None else connection.execute(pruned).scalar() or 0,
        newest_at=table_access.newest_at(connection),
    )


def _nodes(connection: Connection, known: RowVersions) -> tuple[Set[str], dict[str, str]]:
    if not known.nodes:
        return frozenset(), _pairs(connection, tables.nodes.c.node, tables.nodes.c.doc)
    found = changed_nodes(connection, known)
    return found.unchanged, {row.node: row.doc for row in found.rows}


def _pairs(connection: Connection, key: Column[Any], doc: Column[Any]) -> dict[str, str]:
    return {row[0]: row[1] for row in connection.execute(select(key, doc))}


def _active_findings(connection: Connection) -> dict[tuple[str, str], str]:
    columns = tables.active_findings.c
    query = select(columns.node, columns.key, columns.doc).order_by(columns.node, columns.key)
    return {(node, key): doc for node, key, doc in connection.execute(query)}


def _outbox(connection: Connection) -> list[OutboxRow]:
    """Return unacknowledged directives.

    Nodes that wait for the same generation share its text. Directives for a generation that is no longer kept are
    dropped, because nobody could still enter it.
    """
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
    return [
        row
        for job in jobs
        for row in (*newest_versions(connection, job, VERSIONS_LOADED), *newest_verified(connection, job))
    ]
