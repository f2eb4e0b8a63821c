"""What operators ask of history. Every method blocks: it belongs in the reading thread."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, asc, desc, func, select, union_all

from controller.store import people, tables
from controller.store.clock_mark import SET_BACK
from controller.store.cut import cut
from controller.store.records import AuditRow, VersionRow

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


class Following(NamedTuple):
    """The oldest ``rows`` beyond an id, the newest id that retention has deleted, and the newest there is."""

    rows: list[AuditRow]
    pruned: int
    newest: int


def _ids_of_kinds(
    connection: Connection, kinds: Sequence[str], wanted: list[ColumnElement[bool]], *, newest: bool, limit: int
) -> list[int]:
    """The first (or ``newest``) ``limit`` ids of what is ``wanted`` whose kind begins with one of ``kinds``: as many of
    each kind, in the order of its index, and of these the first. A range of kinds would have to be sorted."""
    audit = tables.audit.c
    order = desc if newest else asc
    parts = []
    for kind in people.kinds(connection):
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


class Reader:
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
            cut(connection)

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

    def following(self, after: int, limit: int) -> Following:
        """What the event stream has to know of the log beyond ``after``."""
        rows = self.events(after=after, limit=limit)  # first: what is deleted after it is no gap in these rows
        meta, newest = tables.meta.c, select(func.max(tables.audit.c.id))
        with self._connected() as connection:
            pruned = connection.execute(select(meta.value).where(meta.key == "audit_pruned")).scalar() or 0
            return Following(rows, pruned, max(pruned, connection.execute(newest).scalar() or 0))

    def page(self, query: Callable[[Connection], T]) -> T:
        """Runs a query of ``controller.store.history``."""
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
