"""Delete old history in the background.

Entries of the event log by people are limited by number alone, never by age, and have their own limit.

The reading thread finds rows to delete, however long that takes. The writing thread deletes by primary keys,
DELETE_BATCH_ROWS per transaction, of one table and one job. Only the event log, whose ids are in order, is pruned by
range.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Table, delete, func, not_, or_, select, true, tuple_, update
from sqlalchemy.exc import SQLAlchemyError

from everstep.errors import Unavailable
from everstep_controller.store import table_access, tables
from everstep_controller.store.table_access import id_before_newest, upsert
from everstep_controller.store.threads import DatabaseStore

DELETE_BATCH_ROWS = 500
"""Rows per transaction: a few milliseconds, during which no decision is written."""
ORDERS_PRUNED = "orders_pruned"
"""Key in ``meta``: newest id of an entry by people that retention may delete."""
MAX_VERSIONS_PER_JOB = 1000
"""Versions kept per job, which commits about two per second."""


class RetentionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The history to keep."""

    since: float  # wall seconds; everything younger is kept within the limits below
    events: int  # maximum entries of the event log by nodes
    orders: int  # maximum entries of the event log by people, kept at any age
    rows: int  # maximum verdicts, findings and remediations each
    generations: int  # maximum generations per job


class DeleteBatch(msgspec.Struct, frozen=True):
    """Rows to delete by primary key; ``condition`` is checked again at the deletion."""

    table: Table
    keys: list[tuple[Any, ...]]
    condition: ColumnElement[bool] = true()

    def execute(self, connection: Connection) -> None:
        """Delete the rows."""
        columns = list(self.table.primary_key.columns)
        one = len(columns) == 1
        wanted = columns[0].in_([key[0] for key in self.keys]) if one else tuple_(*columns).in_(self.keys)
        connection.execute(delete(self.table).where(wanted, self.condition))


class OrdersDeleteBatch(DeleteBatch, frozen=True):
    """Entries by people, oldest first. The mark up to which triggers allow deletion moves with them."""

    def execute(self, connection: Connection) -> None:
        """Move the mark, and delete the rows."""
        upsert(connection, tables.meta, [{"key": ORDERS_PRUNED, "value": self.keys[-1][0]}])
        super().execute(connection)


ChooseBatch = Callable[[Connection], DeleteBatch | None]
"""Finds the next rows to delete, in the reading thread; None if there are no more."""


def prune_events(connection: Connection, keep: RetentionLimits) -> int:
    """Delete old entries that no person wrote, except the newest, and return the number of ids passed."""
    event_log, meta = tables.event_log.c, tables.meta.c
    pruned = func.coalesce(select(meta.value).where(meta.key == "audit_pruned").scalar_subquery(), 0)
    beyond = select(func.min(event_log.id), func.max(event_log.id)).where(event_log.id > pruned)
    oldest, newest = connection.execute(beyond).one()
    if oldest is None:
        return 0
    most = min(oldest + DELETE_BATCH_ROWS - 1, newest - 1)
    old = (
        connection.execute(
            select(func.max(event_log.id)).where(event_log.id <= most, event_log.at < keep.since)
        ).scalar()
        or 0
    )
    through = max(old, min(most, id_before_newest(connection, newest, keep.events)))
    if through < oldest:
        return 0
    connection.execute(update(tables.meta).where(meta.key == "audit_pruned").values(value=through))
    by_nodes = not_(table_access.is_written_by_person())
    connection.execute(delete(tables.event_log).where(event_log.id.between(oldest, through), by_nodes))
    return int(through - oldest + 1)


def find_deletions(connection: Connection, keep: RetentionLimits) -> list[ChooseBatch]:
    """Return functions that find rows to delete, for the reading thread. Data needed at a start is never deleted."""
    found: list[ChooseBatch] = [
        lambda connection: _orders(connection, keep),
        lambda connection: _verdicts(connection, keep),
        lambda connection: _ended(connection, tables.findings, "cleared_at", "id", keep),
        lambda connection: _ended(connection, tables.remediations, "ended_at", "requested_at", keep),
    ]
    for table, most in (
        (tables.generations, keep.generations),
        (tables.recoveries, keep.generations),
        (tables.versions, MAX_VERSIONS_PER_JOB),
    ):
        jobs = select(table.c.job).group_by(table.c.job).having(func.count() > most).order_by(table.c.job)
        found += [_of_job(table, job, most) for job in connection.execute(jobs).scalars()]
    return found


def _orders(connection: Connection, keep: RetentionLimits) -> DeleteBatch | None:
    """Find the oldest entries by people beyond their limit."""
    event_log = tables.event_log.c
    theirs = event_log.kind.in_(table_access.kinds_written_by_people(connection))
    count = select(func.count()).select_from(tables.event_log).where(theirs)
    surplus = connection.execute(count).scalar_one() - keep.orders
    if surplus <= 0:
        return None
    oldest = select(event_log.id).where(theirs).order_by(event_log.id).limit(min(surplus, DELETE_BATCH_ROWS))
    return OrdersDeleteBatch(tables.event_log, [tuple(row) for row in connection.execute(oldest)])


def _verdicts(connection: Connection, keep: RetentionLimits) -> DeleteBatch | None:
    """Find old verdicts, except each node's newest, which may explain the node's state."""
    verdicts, later = tables.verdicts, tables.verdicts.alias()
    superseded = select(later.c.id).where(later.c.node == verdicts.c.node, later.c.at > verdicts.c.at).exists()
    return _old(connection, verdicts, superseded, verdicts.c.at < keep.since, verdicts.c.at, keep)


def _ended(connection: Connection, table: Table, ended: str, order: str, keep: RetentionLimits) -> DeleteBatch | None:
    """Find old ended rows; rows that have not ended stay, whatever their number."""
    return _old(connection, table, table.c[ended].is_not(None), table.c[ended] < keep.since, table.c[order], keep)


def _old(
    connection: Connection,
    table: Table,
    may_go: ColumnElement[bool],
    too_old: ColumnElement[bool],
    order: ColumnElement[Any],
    keep: RetentionLimits,
) -> DeleteBatch | None:
    """Find a batch of deletable rows that are too old, or else the first surplus ones in ``order``."""
    old = connection.execute(select(table.c.id).where(may_go, too_old).limit(DELETE_BATCH_ROWS)).all()
    if not old:
        surplus = connection.execute(select(func.count()).select_from(table)).scalar_one() - keep.rows
        first = select(table.c.id).where(may_go).order_by(order).limit(min(surplus, DELETE_BATCH_ROWS))
        old = connection.execute(first).all() if surplus > 0 else old
    return _delete_batch(table, old, may_go)


def _of_job(table: Table, job: str, most: int) -> ChooseBatch:
    """Return a function that finds a job's surplus rows beyond ``most``, except its newest verified version."""
    _, *places = table.primary_key.columns

    def choose(connection: Connection) -> DeleteBatch | None:
        mine = select(*table.primary_key.columns).where(table.c.job == job)
        last = connection.execute(mine.order_by(*(place.desc() for place in places)).offset(most).limit(1)).first()
        if last is None:
            return None
        may_go = _not_newest_verified() if table is tables.versions else true()
        beyond = mine.where(tuple_(*places) <= tuple(last)[1:], may_go).order_by(*places).limit(DELETE_BATCH_ROWS)
        return _delete_batch(table, connection.execute(beyond).all(), may_go)

    return choose


def _not_newest_verified() -> ColumnElement[bool]:
    versions, later = tables.versions.c, tables.versions.alias().c
    newer = tuple_(later.generation, later.step) > tuple_(versions.generation, versions.step)
    verified = select(later.step).where(later.job == versions.job, later.verified_at.is_not(None), newer)
    return or_(versions.verified_at.is_(None), verified.exists())


def _delete_batch(table: Table, rows: Sequence[Any], may_go: ColumnElement[bool]) -> DeleteBatch | None:
    keys = [tuple(row) for row in rows]
    return DeleteBatch(table, keys, may_go) if keys else None


log = logging.getLogger(__name__)

ROUND_S = 60.0
BATCH_PAUSE_S = 0.05
"""Pause between batches: deletion takes at most a tenth of the database's time."""


async def run_retention(
    store: DatabaseStore, limits: Callable[[], RetentionLimits], *, first_s: float = ROUND_S
) -> None:
    """Delete old history until cancelled; the first round is after ``first_s``, when a new leader is less busy."""
    wait_s = first_s
    while True:
        await asyncio.sleep(wait_s)
        wait_s = ROUND_S
        try:
            await _round(store, limits())
        except (Unavailable, SQLAlchemyError) as error:
            log.warning("old history could not be deleted, retrying in %.0f s: %s", ROUND_S, error)


async def _round(store: DatabaseStore, keep: RetentionLimits) -> None:
    while await store.write(lambda connection: prune_events(connection, keep)) >= DELETE_BATCH_ROWS:
        await asyncio.sleep(BATCH_PAUSE_S)
    for choose_batch in await store.query(lambda connection: find_deletions(connection, keep)):
        while (batch := await store.query(choose_batch)) is not None:
            await store.write(batch.execute)
            await asyncio.sleep(BATCH_PAUSE_S)
