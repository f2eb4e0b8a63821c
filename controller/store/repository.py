"""Reading and writing the tables. Every method blocks: it belongs in the thread that owns the connection."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import msgspec
from sqlalchemy import Column, Connection, Engine, Table, and_, delete, desc, func, insert, select, tuple_, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.sql.dml import Insert

from controller.store import tables
from controller.store.database import writing
from controller.store.records import AuditRow, Batch, GenerationRow, Loaded, OutboxRow, VersionRow
from everstep.errors import Unavailable

_FLEET_ROW = 1
VERSIONS_LOADED = 64
"""Versions of each job that a controller starts with."""
VERSIONS_KEPT = 1000
"""Versions of each job that stay in the table: a job commits about two a second."""
_PRUNE_EVERY = 500


class Superseded(Unavailable):
    """Another controller took this database over; this one must not write any more."""


def _upsert(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Inserts rows, or updates every other column where the primary key is there; None leaves a column as it is."""
    if rows:
        connection.execute(_upsert_statement(connection.dialect.name, table), rows)


@cache
def _upsert_statement(dialect_name: str, table: Table) -> Insert:
    """Built once: putting it together takes SQLAlchemy several times as long as a transaction takes SQLite."""
    dialect: Any = postgresql if dialect_name == "postgresql" else sqlite
    statement = dialect.insert(table)
    keys = [column.name for column in table.primary_key]
    changes = {
        column.name: func.coalesce(statement.excluded[column.name], column)
        for column in table.columns
        if column.name not in keys
    }
    upsert: Insert = statement.on_conflict_do_update(index_elements=keys, set_=changes)
    return upsert


def _insert(connection: Connection, table: Table, rows: Iterable[msgspec.Struct]) -> None:
    values = [msgspec.structs.asdict(row) for row in rows]
    if values:
        connection.execute(insert(table), values)


def _pairs(connection: Connection, key: Column[Any], doc: Column[Any]) -> dict[str, str]:
    return {row[0]: row[1] for row in connection.execute(select(key, doc))}


def _versions(connection: Connection, job: str, limit: int) -> list[VersionRow]:
    columns = tables.versions.c
    newest = select(tables.versions).where(columns.job == job).order_by(desc(columns.generation), desc(columns.step))
    return [VersionRow(**row) for row in connection.execute(newest.limit(limit)).mappings()]


def _newest_verified(connection: Connection, job: str) -> list[VersionRow]:
    columns = tables.versions.c
    statement = (
        select(tables.versions)
        .where(columns.job == job, columns.verified_at.is_not(None))
        .order_by(desc(columns.generation), desc(columns.step))
        .limit(1)
    )
    return [VersionRow(**row) for row in connection.execute(statement).mappings()]


class Writer:
    """The one writing connection. Used from one thread only.

    Raises (from every method) sqlalchemy.exc.DBAPIError where the database fails, and Superseded where another
    controller has taken it over since ``take_over``.
    """

    def __init__(self, engine: Engine) -> None:
        self._connection = writing(engine.connect())
        self._epoch = 0
        self._versions_written = 0

    def close(self) -> None:
        self._connection.close()

    def take_over(self) -> Loaded:
        """Fences every earlier controller off and reads what there is, in one transaction."""
        connection = self._connection
        with connection.begin():
            epoch = tables.meta.c.key == "epoch"
            connection.execute(update(tables.meta).where(epoch).values(value=tables.meta.c.value + 1))
            self._epoch = connection.execute(select(tables.meta.c.value).where(epoch)).scalar_one()
            return self._load()

    def _load(self) -> Loaded:
        connection, outbox, marks = self._connection, tables.outbox.c, tables.report_marks.c
        jobs = _pairs(connection, tables.jobs.c.job, tables.jobs.c.doc)
        return Loaded(
            epoch=self._epoch,
            fleet=connection.execute(select(tables.fleet.c.doc)).scalar(),
            nodes=_pairs(connection, tables.nodes.c.node, tables.nodes.c.doc),
            jobs=jobs,
            versions=[
                row
                for job in jobs
                for row in (*_versions(connection, job, VERSIONS_LOADED), *_newest_verified(connection, job))
            ],
            outbox=[
                OutboxRow(node=node, seq=seq, body=body)
                for node, seq, body in connection.execute(
                    select(outbox.node, outbox.seq, outbox.body).order_by(outbox.node, outbox.seq)
                )
            ],
            marks={
                (node, incarnation): through
                for node, incarnation, through in connection.execute(
                    select(marks.node, marks.incarnation, marks.through)
                )
            },
            poisoned=frozenset(
                (row.node, row.incarnation, row.number) for row in connection.execute(select(tables.poisoned_reports))
            ),
            newest_audit=connection.execute(select(func.max(tables.audit.c.id))).scalar() or 0,
            newest_at=connection.execute(select(tables.audit.c.at).order_by(desc(tables.audit.c.id)).limit(1)).scalar()
            or 0.0,
        )

    def commit(self, batch: Batch) -> None:
        """Writes the batch in one transaction: all of it is durable on return, none of it after an exception."""
        connection = self._connection
        with connection.begin():
            self._check_epoch()
            self._write_documents(batch)
            for table, rows in (
                (tables.generations, batch.generations),
                (tables.recoveries, batch.recoveries),
                (tables.verdicts, batch.verdicts),
                (tables.audit, batch.audit),
                (tables.outbox, batch.outbox),
                (tables.poisoned_reports, batch.poisoned),
            ):
                _insert(connection, table, rows)
            _upsert(connection, tables.versions, [msgspec.structs.asdict(row) for row in batch.versions.values()])
            self._write_delivery(batch)
            self._prune_versions(batch)

    def _check_epoch(self) -> None:
        statement = select(tables.meta.c.value).where(tables.meta.c.key == "epoch").with_for_update()
        epoch = self._connection.execute(statement).scalar_one()
        if epoch != self._epoch:
            raise Superseded(
                f"another controller took the database over (epoch {epoch}, this one has {self._epoch}): "
                "run one controller per database"
            )

    def _write_documents(self, batch: Batch) -> None:
        connection = self._connection
        _upsert(connection, tables.nodes, [{"node": node, "doc": doc} for node, doc in batch.nodes.items()])
        _upsert(connection, tables.jobs, [{"job": job, "doc": doc} for job, doc in batch.jobs.items()])
        if batch.fleet is not None:
            _upsert(connection, tables.fleet, [{"id": _FLEET_ROW, "doc": batch.fleet}])

    def _write_delivery(self, batch: Batch) -> None:
        connection, outbox, marks = self._connection, tables.outbox, tables.report_marks
        for node, through in batch.pruned.items():
            connection.execute(delete(outbox).where(and_(outbox.c.node == node, outbox.c.seq <= through)))
        for (node, incarnation), through in batch.marks.items():
            _upsert(connection, marks, [{"node": node, "incarnation": incarnation, "through": through}])
            older = and_(marks.c.node == node, marks.c.incarnation < incarnation)
            connection.execute(delete(marks).where(older))

    def _prune_versions(self, batch: Batch) -> None:
        """Now and then deletes what is older than the newest VERSIONS_KEPT, but never the newest verified one."""
        self._versions_written += len(batch.versions)
        if self._versions_written < _PRUNE_EVERY:
            return
        self._versions_written = 0
        connection, columns = self._connection, tables.versions.c
        for job in {row.job for row in batch.versions.values()}:
            kept = _versions(connection, job, VERSIONS_KEPT)
            oldest = min((row.generation, row.step) for row in kept)
            verified = [(row.generation, row.step) for row in _newest_verified(connection, job)]
            place = tuple_(columns.generation, columns.step)
            connection.execute(
                delete(tables.versions).where(columns.job == job, place < oldest, place.not_in(verified))
            )


class Reader:
    """What operators ask of history. A connection of its own, so that a long read delays no decision."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def events(
        self, *, after: int, limit: int, trace: str = "", node: str = "", job: str = "", newest: bool = False
    ) -> list[AuditRow]:
        """Rows with an id over ``after``, oldest first: of all that match, the first (or ``newest``) ``limit``."""
        audit = tables.audit.c
        wanted = [audit.id > after]
        for column, value in ((audit.trace, trace), (audit.node, node), (audit.job, job)):
            if value:
                wanted.append(column == value)
        order = desc(audit.id) if newest else audit.id
        with self._engine.connect() as connection:
            rows = connection.execute(select(tables.audit).where(*wanted).order_by(order).limit(limit)).mappings()
            found = [AuditRow(**row) for row in rows]
        return found[::-1] if newest else found

    def generations(self, *, job: str = "", limit: int) -> list[GenerationRow]:
        """The newest rosters, oldest first."""
        statement = select(tables.generations).order_by(
            desc(tables.generations.c.issued_at), desc(tables.generations.c.number)
        )
        if job:
            statement = statement.where(tables.generations.c.job == job)
        with self._engine.connect() as connection:
            rows = connection.execute(statement.limit(limit)).mappings()
            return [GenerationRow(**row) for row in rows][::-1]

    def recoveries(self, job: str, *, limit: int) -> list[str]:
        """The job's newest recoveries (JSON), oldest first."""
        columns = tables.recoveries.c
        statement = select(columns.doc).where(columns.job == job).order_by(desc(columns.generation)).limit(limit)
        with self._engine.connect() as connection:
            return [row[0] for row in connection.execute(statement)][::-1]

    def verdicts(self, node: str, *, limit: int) -> list[str]:
        """The node's newest verdicts (JSON), newest first."""
        columns = tables.verdicts.c
        statement = select(columns.doc).where(columns.node == node).order_by(desc(columns.at)).limit(limit)
        with self._engine.connect() as connection:
            return [row[0] for row in connection.execute(statement)]

    def verdict(self, verdict: str) -> str | None:
        """The verdict of this id (JSON)."""
        with self._engine.connect() as connection:
            statement = select(tables.verdicts.c.doc).where(tables.verdicts.c.id == verdict)
            doc: str | None = connection.execute(statement).scalar()
            return doc

    def versions(self, job: str, *, limit: int) -> list[VersionRow]:
        """The job's newest committed versions, newest first."""
        with self._engine.connect() as connection:
            return _versions(connection, job, limit)
