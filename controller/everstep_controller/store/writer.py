"""Write numbered batches over one connection, with a fence against superseded controllers in every transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import TypeVar

import msgspec
from sqlalchemy import Connection, Engine, Table, and_, bindparam, delete, insert, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.sql.dml import Insert

from everstep_controller.store import table_access, tables
from everstep_controller.store.database import for_writing
from everstep_controller.store.database_errors import (
    DatabaseUnavailable,
    LeadershipLost,
    abort_connection,
    diagnose,
    is_unavailable,
)
from everstep_controller.store.reader import NO_ROW_VERSIONS, RowVersions, load_state
from everstep_controller.store.rows import Batch, LoadedState
from everstep_controller.store.table_access import COPY_EPOCH_GAP, execute_many, skip_used_ids, upsert

T = TypeVar("T")

_FLEET_ROW = 1
EPOCH, BATCH, LAST_WRITING_EPOCH = "epoch", "batch", "last_writing_epoch"

Claim = Callable[[Connection, int], None]
"""Extra writes in a take-over's transaction, given its epoch."""


class DatabaseWriter:
    """The writing connection, reopened after it broke. For one thread, except ``abort``.

    Every writing method raises:
        LeadershipLost: another controller took over the database since ``take_over``.
        DatabaseUnavailable: the database cannot be used.
        SQLAlchemyError: a row is wrong.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._connection: Connection | None = None
        self._committing = False
        self._lives: dict[str, int] = {}
        self.epoch = 0

    @property
    def connected(self) -> bool:
        """Whether the connection is open."""
        return self._connection is not None

    def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Make a call that hangs in the other thread fail soon, unless a local disk hangs. For any thread."""
        if self._connection is not None:
            abort_connection(self._connection)

    def take_over(
        self, *, expected: int | None = None, claim: Claim | None = None, known: RowVersions = NO_ROW_VERSIONS
    ) -> LoadedState:
        """Fence off every earlier controller and load the state, in one transaction.

        Args:
            expected: epoch that must still be current; raises LeadershipLost if another controller was faster.
            claim: extra writes of the transaction.
            known: versions of records that need not be read again.
        """
        with self._transaction() as connection:
            found = _lock_meta(connection)
            if expected is not None and found[EPOCH] != expected:
                raise LeadershipLost(f"another controller was first: the epoch is {found[EPOCH]}, not {expected}")
            epoch = found[EPOCH] + 1
            _set_meta(connection, EPOCH, epoch)
            last = connection.execute(select(_META.value).where(_META.key == LAST_WRITING_EPOCH)).scalar()
            if last is not None and found[EPOCH] - last >= COPY_EPOCH_GAP:  # the database is a copy
                skip_used_ids(connection)
            upsert(connection, tables.meta, [{"key": LAST_WRITING_EPOCH, "value": epoch}])
            if claim is not None:
                claim(connection, epoch)
            loaded = load_state(connection, epoch, found[BATCH], known)
        self.epoch = epoch
        return loaded

    def commit(self, batches: Sequence[Batch]) -> None:
        """Write the batches that were not applied before, in one transaction."""
        with self._fenced() as (connection, newest):
            for batch in batches:
                if batch.number > newest:
                    _write(connection, batch, self._lives)
            if batches and batches[-1].number > newest:
                _set_meta(connection, BATCH, batches[-1].number)

    def run(self, change: Callable[[Connection], T]) -> T:
        """Run ``change`` in its own fenced transaction."""
        with self._fenced() as (connection, _):
            return change(connection)

    @contextlib.contextmanager
    def _fenced(self) -> Iterator[tuple[Connection, int]]:
        with self._transaction() as connection:
            found = _lock_meta(connection)
            if found[EPOCH] != self.epoch:
                raise LeadershipLost(
                    f"another controller took the database over (epoch {found[EPOCH]}, this one had {self.epoch})"
                )
            yield connection, found[BATCH]

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[Connection]:
        self._committing = False
        try:
            if self._connection is None:
                self._connection = for_writing(self._engine.connect())
            transaction = self._connection.begin()
            yield self._connection
            self._committing = True
            transaction.commit()
        except BaseException as error:
            self._drop()
            if isinstance(error, DBAPIError) and is_unavailable(error):
                raise DatabaseUnavailable(
                    diagnose(error, self._engine.url), is_batch_queued=self._committing
                ) from error
            raise

    def _drop(self) -> None:
        """Close a connection in an unknown state; the database rolls back what was not committed."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()


_META = tables.meta.c
# Statements of every transaction are built once, because building takes longer than running.
_LOCK_META = select(_META.key, _META.value).where(_META.key.in_((BATCH, EPOCH))).order_by(_META.key).with_for_update()
_SET_META = update(tables.meta).where(_META.key == bindparam("of")).values(value=bindparam("to"))


def _lock_meta(connection: Connection) -> dict[str, int]:
    """Return ``epoch`` and ``batch``, locked until the end of the transaction, which serializes writers."""
    return {row.key: row.value for row in connection.execute(_LOCK_META)}


def _set_meta(connection: Connection, key: str, value: int) -> None:
    connection.execute(_SET_META, {"of": key, "to": value})


def _write(connection: Connection, batch: Batch, lives: dict[str, int]) -> None:
    """Write the batch. ``lives`` holds the incarnation of each node's newest report mark."""
    _forget(connection, batch, lives)
    upsert(connection, tables.nodes, [{"node": node, "doc": doc} for node, doc in batch.nodes.items()])
    _write_active_findings(connection, batch.active_findings)
    upsert(connection, tables.jobs, [{"job": job, "doc": doc} for job, doc in batch.jobs.items()])
    if batch.fleet is not None:
        upsert(connection, tables.fleet, [{"id": _FLEET_ROW, "doc": batch.fleet}])
    for table, rows in (
        (tables.generations, batch.generations),
        (tables.recoveries, batch.recoveries),
        (tables.verdicts, batch.verdicts),
        (tables.audit, batch.audit),
        (tables.outbox, batch.outbox),
        (tables.poisoned_reports, batch.poisoned),
    ):
        _insert(connection, table, rows)
    upsert(connection, tables.versions, [msgspec.structs.asdict(row) for row in batch.versions.values()])
    table_access.write_credentials(connection, batch.credentials.values())
    table_access.write_remediations(connection, batch.remediations.values())
    table_access.write_findings(connection, batch.findings)
    _write_delivery(connection, batch, lives)


_DELETE_ACTIVE_FINDING = delete(tables.active_findings).where(
    and_(tables.active_findings.c.node == bindparam("of"), tables.active_findings.c.key == bindparam("is"))
)
_PRUNE_OUTBOX = delete(tables.outbox).where(
    and_(tables.outbox.c.node == bindparam("of"), tables.outbox.c.seq <= bindparam("last"))
)
_DROP_OUTBOX = delete(tables.outbox).where(
    and_(tables.outbox.c.node == bindparam("of"), tables.outbox.c.seq == bindparam("is"))
)
_PRUNE_ACKNOWLEDGED_REPORTS = delete(tables.acknowledged_reports).where(
    and_(
        tables.acknowledged_reports.c.node == bindparam("of"),
        tables.acknowledged_reports.c.incarnation < bindparam("last"),
    )
)


def _forget(connection: Connection, batch: Batch, lives: dict[str, int]) -> None:
    """Delete forgotten nodes and jobs. History (audit log, findings, remediations) is deleted by age instead."""
    nodes, jobs = list(batch.forgotten_nodes), list(batch.forgotten_jobs)
    of_nodes = (tables.nodes, tables.active_findings, tables.verdicts, tables.outbox, tables.acknowledged_reports)
    for table in of_nodes if nodes else ():
        connection.execute(delete(table).where(table.c.node.in_(nodes)))
    for table in (tables.jobs, tables.generations, tables.recoveries, tables.versions) if jobs else ():
        connection.execute(delete(table).where(table.c.job.in_(jobs)))
    for node in nodes:
        lives.pop(node, None)


def _write_active_findings(connection: Connection, active_findings: dict[tuple[str, str], str]) -> None:
    cleared = [{"of": node, "is": key} for (node, key), doc in active_findings.items() if not doc]
    execute_many(connection, _DELETE_ACTIVE_FINDING, cleared)
    rows = [{"node": node, "key": key, "doc": doc} for (node, key), doc in active_findings.items() if doc]
    upsert(connection, tables.active_findings, rows)


def _write_delivery(connection: Connection, batch: Batch, lives: dict[str, int]) -> None:
    marks = [
        {"node": node, "incarnation": incarnation, "through": through}
        for (node, incarnation), through in batch.acknowledged_reports.items()
    ]
    pruned = [{"of": node, "last": through} for node, through in batch.acknowledged.items()]
    execute_many(connection, _PRUNE_OUTBOX, pruned)
    execute_many(connection, _DROP_OUTBOX, [{"of": node, "is": seq} for node, seq in batch.superseded])
    upsert(connection, tables.acknowledged_reports, marks)
    begun = {node: life for node, life in batch.acknowledged_reports if lives.get(node) != life}
    execute_many(connection, _PRUNE_ACKNOWLEDGED_REPORTS, [{"of": node, "last": life} for node, life in begun.items()])
    lives |= begun


def _insert(connection: Connection, table: Table, rows: Iterable[msgspec.Struct]) -> None:
    execute_many(connection, _insert_statement(table), [msgspec.structs.asdict(row) for row in rows])


@cache
def _insert_statement(table: Table) -> Insert:
    return insert(table)
