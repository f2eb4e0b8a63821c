"""Write numbered batches over one connection, with a fence against superseded controllers in every transaction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
from sqlalchemy import ColumnElement, Connection, Delete, Engine, Table, bindparam, delete, insert, select, update
from sqlalchemy.exc import DBAPIError

from everstep_controller.store import database_errors, table_access, tables
from everstep_controller.store.database import FOR_WRITING
from everstep_controller.store.database_errors import DatabaseUnavailable, LeadershipLost
from everstep_controller.store.reader import NO_ROW_VERSIONS, RowVersions, load_state
from everstep_controller.store.rows import Batch, LoadedState
from everstep_controller.store.table_access import execute_many, skip_used_ids, upsert

T = TypeVar("T")

_FLEET_ROW = 1
EPOCH, BATCH, LAST_WRITING_EPOCH = "epoch", "batch", "last_writing_epoch"

Claim = Callable[[Connection, int], None]
"""Extra writes in a take-over's transaction, given its epoch."""


class DatabaseWriter:
    """The writing connection, reopened after it broke. For one thread, except ``abort``.

    Every writing method raises LeadershipLost if another controller took over the database since ``take_over``,
    DatabaseUnavailable if the database cannot be used, and SQLAlchemyError if a row is wrong.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.connection: Connection | None = None
        self._committing = False
        self._lives: dict[str, int] = {}
        self.epoch = 0

    def close(self) -> None:
        """Close the connection."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """Make a call that hangs in the other thread fail soon, unless a local disk hangs. For any thread."""
        if self.connection is not None:
            database_errors.abort_connection(self.connection)

    def take_over(
        self, *, expected: int | None = None, claim: Claim | None = None, known: RowVersions = NO_ROW_VERSIONS
    ) -> LoadedState:
        """Fence off every earlier controller and load the state, except ``known`` records, in one transaction."""
        with self._transaction() as connection:
            found = _lock_meta(connection)
            if expected is not None and found[EPOCH] != expected:
                raise LeadershipLost(f"another controller was first: the epoch is {found[EPOCH]}, not {expected}")
            epoch = found[EPOCH] + 1
            if table_access.is_copy(connection):
                skip_used_ids(connection)
            _set_meta(connection, EPOCH, epoch)
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
            if self.connection is None:
                self.connection = self._engine.connect().execution_options(**FOR_WRITING)
            transaction = self.connection.begin()
            yield self.connection
            self._committing = True
            transaction.commit()
        except BaseException as error:
            connection, self.connection = self.connection, None
            if connection is not None:  # its state is unknown; the database rolls back what was not committed
                connection.invalidate()
                connection.close()
            if isinstance(error, DBAPIError) and database_errors.is_unavailable(error):
                message = database_errors.diagnose(error, self._engine.url)
                raise DatabaseUnavailable(message, is_batch_queued=self._committing) from error
            raise


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
    cleared = [{"of": node, "is": key} for (node, key), doc in batch.active_findings.items() if not doc]
    execute_many(connection, _DELETE_ACTIVE_FINDING, cleared)
    active = [{"node": node, "key": key, "doc": doc} for (node, key), doc in batch.active_findings.items() if doc]
    upsert(connection, tables.active_findings, active)
    upsert(connection, tables.jobs, [{"job": job, "doc": doc} for job, doc in batch.jobs.items()])
    if batch.fleet is not None:
        upsert(connection, tables.fleet, [{"id": _FLEET_ROW, "doc": batch.fleet}])
    for name, statement in _INSERTS.items():
        execute_many(connection, statement, [msgspec.structs.asdict(row) for row in getattr(batch, name)])
    upsert(connection, tables.versions, [msgspec.structs.asdict(row) for row in batch.versions.values()])
    table_access.write_credentials(connection, batch.credentials.values())
    table_access.write_remediations(connection, batch.remediations.values())
    table_access.write_findings(connection, batch.findings)
    _write_delivery(connection, batch, lives)


_INSERTS = {
    "generations": insert(tables.generations),
    "recoveries": insert(tables.recoveries),
    "verdicts": insert(tables.verdicts),
    "event_log": insert(tables.event_log),
    "outbox": insert(tables.outbox),
    "poisoned": insert(tables.poisoned_reports),
}
"""Statements that insert a batch's rows, by its fields."""


def _delete_of_node(table: Table, condition: ColumnElement[bool]) -> Delete:
    return delete(table).where(table.c.node == bindparam("of"), condition)


_OUTBOX = tables.outbox.c
_DELETE_ACTIVE_FINDING = _delete_of_node(tables.active_findings, tables.active_findings.c.key == bindparam("is"))
_PRUNE_OUTBOX = _delete_of_node(tables.outbox, _OUTBOX.seq <= bindparam("last"))
_DROP_OUTBOX = _delete_of_node(tables.outbox, _OUTBOX.seq == bindparam("is"))
_PRUNE_ACKNOWLEDGED_REPORTS = _delete_of_node(
    tables.acknowledged_reports, tables.acknowledged_reports.c.incarnation < bindparam("last")
)


def _forget(connection: Connection, batch: Batch, lives: dict[str, int]) -> None:
    """Delete forgotten nodes and jobs. History (event log, findings, remediations) is deleted by age instead."""
    nodes, jobs = list(batch.forgotten_nodes), list(batch.forgotten_jobs)
    of_nodes = (tables.nodes, tables.active_findings, tables.verdicts, tables.outbox, tables.acknowledged_reports)
    for table in of_nodes if nodes else ():
        connection.execute(delete(table).where(table.c.node.in_(nodes)))
    for table in (tables.jobs, tables.generations, tables.recoveries, tables.versions) if jobs else ():
        connection.execute(delete(table).where(table.c.job.in_(jobs)))
    for node in nodes:
        lives.pop(node, None)


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
