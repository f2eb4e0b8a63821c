"""What operators ask of history. Every method blocks: it belongs in the reading thread."""

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

# ---- ahead
# Which nodes' records have changed since they were last read: for a standby that reads ahead of its turn.
#
# PostgreSQL only, where each version of a row has a place (``ctid``) and the number of the transaction that wrote it
# (``xmin``). Both together are its mark: under the same mark stands the same text, while the server runs. One that was
# restored from a copy, or a replica that was promoted without the last transactions, gives their numbers once more.


class RowVersions(NamedTuple):
    """Of records as they were read. ``server``: the run of a server that they hold for. ``nodes``: by node."""

    server: str
    nodes: Mapping[str, str]


NO_ROW_VERSIONS = RowVersions("", {})

_SERVER = "SELECT extract(epoch FROM pg_postmaster_start_time())::text"
_MARKS = "SELECT node, xmin::text || ctid::text AS mark FROM nodes"
_ROWS = "SELECT node, xmin::text || ctid::text, doc FROM nodes WHERE node = ANY(%(nodes)s)"


class NodeRow(NamedTuple):
    node: str
    row_version: str
    doc: str


class NodeChanges(NamedTuple):
    """``server``: as of ``Marks``. ``same``: nodes whose record is as it was."""

    server: str
    unchanged: Set[str]
    rows: list[NodeRow]


def changed_nodes(connection: Connection, row_versions: RowVersions) -> NodeChanges:
    """What is not as it was when ``known`` was read."""
    server: str = connection.exec_driver_sql(_SERVER).scalar_one()
    before = row_versions.nodes if row_versions.server == server else NO_ROW_VERSIONS.nodes
    marks = {row.node: row.mark for row in connection.exec_driver_sql(_MARKS)}
    same = {node for node, mark in marks.items() if before.get(node) == mark}
    rows = connection.exec_driver_sql(_ROWS, {"nodes": list(marks.keys() - same)})
    return NodeChanges(server, same, [NodeRow(*row) for row in rows])


# ---- history
# Pages of history, newest first. Every function blocks, and takes a connection of the reading thread.

HistoryRow = dict[str, Any]
Page = tuple[list[HistoryRow], str]
"""Rows, and the cursor of the page after them (empty: there is none)."""


def _page(
    connection: Connection, statement: Select[Any], table: Table, order: Mapping[str, type], cursor: str, limit: int
) -> Page:
    """Rows of ``statement`` from after ``cursor`` on, newest first by the columns of ``order``."""
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
    """Findings as they were seen."""
    table = tables.findings
    statement = _where(select(table), table, node=node, kind=kind)
    if active is not None:
        statement = statement.where(table.c.cleared_at.is_(None) if active else table.c.cleared_at.is_not(None))
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


def remediations(connection: Connection, *, node: str, state: str, cursor: str, limit: int) -> Page:
    """Actions asked of the outside."""
    table = tables.remediations
    statement = _where(select(table), table, node=node, state=state)
    return _page(connection, statement, table, {"requested_at": float, "id": str}, cursor, limit)


def generations(connection: Connection, *, job: str, cursor: str, limit: int) -> Page:
    """Rosters."""
    table = tables.generations
    statement = _where(select(table), table, job=job)
    order = {"number": int} if job else {"issued_at": float, "job": str, "number": int}
    return _page(connection, statement, table, order, cursor, limit)


T = TypeVar("T")


def newest_versions(connection: Connection, job: str, limit: int) -> list[VersionRow]:
    """The job's newest versions, newest first."""
    columns = tables.versions.c
    newest = select(tables.versions).where(columns.job == job).order_by(desc(columns.generation), desc(columns.step))
    return [VersionRow(**row) for row in connection.execute(newest.limit(limit)).mappings()]


def newest_verified(connection: Connection, job: str) -> list[VersionRow]:
    """The job's newest verified version, or nothing."""
    columns = tables.versions.c
    statement = (
        select(tables.versions)
        .where(columns.job == job, columns.verified_at.is_not(None))
        .order_by(desc(columns.generation), desc(columns.step))
        .limit(1)
    )
    return [VersionRow(**row) for row in connection.execute(statement).mappings()]


class EventPage(NamedTuple):
    """The oldest ``rows`` beyond an id, the newest id that retention has deleted, and the newest there is."""

    rows: list[AuditRow]
    deleted_through: int
    newest: int


def _ids_of_kinds(
    connection: Connection, kinds: Sequence[str], wanted: list[ColumnElement[bool]], *, newest: bool, limit: int
) -> list[int]:
    """The first (or ``newest``) ``limit`` ids of what is ``wanted`` whose kind begins with one of ``kinds``: as many of
    each kind, in the order of its index, and of these the first. A range of kinds would have to be sorted."""
    audit = tables.audit.c
    order = desc if newest else asc
    parts = []
    for kind in table_access.kinds(connection):
        if kind.startswith(tuple(kinds)):
            part = select(audit.id).where(audit.kind == kind, *wanted).order_by(order(audit.id)).limit(limit)
            parts.append(select(part.subquery().c.id))
    if not parts:
        return []
    every = union_all(*parts).subquery()
    return list(connection.execute(select(every.c.id).order_by(order(every.c.id)).limit(limit)).scalars())


def _first_at(connection: Connection, at: float) -> int:
    """A number that all events from ``at`` on have or exceed, and none before: their times rise as their numbers do
    (``SteadyTime``), so it is found by halving, some twenty looks at the primary key. Where the time was set back they
    rise before that event, and from it on."""
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
    """What operators ask of history. A connection of its own, so that a long read delays no decision. Used from one
    thread only, but for ``abort``."""

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
        """Makes a read that hangs in the other thread fail soon. Any thread."""
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
        """Rows with an id over ``after``, oldest first: of all that match, the first (or ``newest``) ``limit``.

        ``kinds``: those whose kind begins with one of them; all where there is none. ``since``, ``until``: wall
        seconds, the end not included.
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
        """What the event stream has to know of the log beyond ``after``."""
        rows = self.events(after=after, limit=limit)  # first: what is deleted after it is no gap in these rows
        meta, newest = tables.meta.c, select(func.max(tables.audit.c.id))
        with self._connected() as connection:
            pruned = connection.execute(select(meta.value).where(meta.key == "audit_pruned")).scalar() or 0
            return EventPage(rows, pruned, max(pruned, connection.execute(newest).scalar() or 0))

    def page(self, query: Callable[[Connection], T]) -> T:
        """Runs a query of ``everstep_controller.store.reader``."""
        with self._connected() as connection:
            return query(connection)

    def recoveries(self, job: str, *, limit: int) -> list[str]:
        """The job's newest recoveries (JSON), oldest first."""
        columns = tables.recoveries.c
        statement = select(columns.doc).where(columns.job == job).order_by(desc(columns.generation)).limit(limit)
        with self._connected() as connection:
            return [row[0] for row in connection.execute(statement)][::-1]

    def verdicts(self, node: str, *, limit: int) -> list[str]:
        """The node's newest verdicts (JSON), newest first."""
        columns = tables.verdicts.c
        statement = select(columns.doc).where(columns.node == node).order_by(desc(columns.at)).limit(limit)
        with self._connected() as connection:
            return [row[0] for row in connection.execute(statement)]

    def verdict(self, verdict: str) -> str | None:
        """The verdict of this id (JSON)."""
        with self._connected() as connection:
            statement = select(tables.verdicts.c.doc).where(tables.verdicts.c.id == verdict)
            doc: str | None = connection.execute(statement).scalar()
            return doc

    def versions(self, job: str, *, limit: int) -> list[VersionRow]:
        """The job's newest committed versions, newest first."""
        with self._connected() as connection:
            return newest_versions(connection, job, limit)


# ---- load
# Reading what a controller starts from.

VERSIONS_LOADED = 64
"""Versions of each job that a controller starts with."""


def load_state(
    connection: Connection, epoch: int, batch: int, row_versions: RowVersions = NO_ROW_VERSIONS
) -> LoadedState:
    """Everything that the next life starts from, as ``epoch`` finds it, but records of nodes that are ``known``."""
    same, nodes = _nodes(connection, row_versions)
    marks, audit = tables.report_marks.c, tables.audit.c
    newest = connection.execute(select(audit.id).order_by(desc(audit.id)).limit(1)).scalar()
    pruned = select(tables.meta.c.value).where(tables.meta.c.key == "audit_pruned")
    jobs = _pairs(connection, tables.jobs.c.job, tables.jobs.c.doc)
    return LoadedState(
        epoch=epoch,
        batch=batch,
        fleet=connection.execute(select(tables.fleet.c.doc)).scalar(),
        unchanged=same,
        nodes=nodes,
        active_findings=_standing(connection),
        jobs=jobs,
        versions=_versions(connection, jobs),
        credentials=table_access.load_credentials(connection),
        remediations=table_access.load_remediations(connection),
        alerts=table_access.load_alerts(connection),
        outbox=_outbox(connection),
        report_marks={
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


def _standing(connection: Connection) -> dict[tuple[str, str], str]:
    standing = tables.active_findings.c
    query = select(standing.node, standing.key, standing.doc).order_by(standing.node, standing.key)
    return {(node, key): doc for node, key, doc in connection.execute(query)}


def _outbox(connection: Connection) -> list[OutboxRow]:
    """Directives that were not acknowledged. Nodes that wait for the same generation share its text; one that is not
    kept any more is nothing that anybody could still enter."""
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
