"""Deleting what is older than anybody wants to read.

What people wrote in the audit log goes by number alone, never by age, and has a number of its own.

What may go is looked for in the reading thread, however long that takes; the writing one deletes by primary keys, BITE
rows in a transaction, of one table and one job. The audit log alone, whose ids are in order, is pruned in one go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Table, delete, func, not_, or_, select, tuple_, update
from sqlalchemy.exc import SQLAlchemyError

from everstep.errors import Unavailable
from everstep_controller.store import table_access, tables
from everstep_controller.store.table_access import id_before_newest, upsert
from everstep_controller.store.threads import DatabaseStore

DELETE_BATCH_ROWS = 500
"""Rows at a time: a few milliseconds, in which no decision is written."""
ORDERS_PRUNED = "orders_pruned"
"""Key in ``meta``: the newest id of a line by people that retention may delete."""
VERSIONS_KEPT = 1000
"""Versions of each job: it commits about two a second."""


class RetentionLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What stays: everything younger than ``since`` (wall seconds), but at most the newest ``events`` of the audit log,
    ``rows`` of verdicts, of findings and of remedies each, ``generations`` of each job. Of what people wrote in the
    audit log the newest ``orders`` lines stay, whatever their age."""

    since: float
    events: int
    orders: int
    rows: int
    generations: int


class DeleteBatch(msgspec.Struct, frozen=True):
    """Rows to delete, by their primary keys; ``may_go`` is looked at once more."""

    table: Table
    keys: list[tuple[Any, ...]]
    condition: ColumnElement[bool] | None = None

    def execute(self, connection: Connection) -> None:
        """Deletes them."""
        columns = list(self.table.primary_key.columns)
        one = len(columns) == 1
        wanted = columns[0].in_([key[0] for key in self.keys]) if one else tuple_(*columns).in_(self.keys)
        connection.execute(delete(self.table).where(wanted, *_given(self.condition)))


class OrdersDeleteBatch(DeleteBatch, frozen=True):
    """Lines of the audit log that people wrote, oldest first. The mark up to which the triggers let them go moves with
    it."""

    def execute(self, connection: Connection) -> None:
        """Deletes them."""
        upsert(connection, tables.meta, [{"key": ORDERS_PRUNED, "value": self.keys[-1][0]}])
        super().execute(connection)


ChooseBatch = Callable[[Connection], DeleteBatch | None]
"""Looks for the next rows to delete, in the reading thread; None where there are no more."""


def prune_events(connection: Connection, keep: RetentionLimits) -> int:
    """Deletes the oldest lines of the audit log that no person wrote, never the newest of all, which says how far time
    has come. Returns how many ids it has gone through: BITE where there may be more."""
    audit, meta = tables.audit.c, tables.meta.c
    pruned = func.coalesce(select(meta.value).where(meta.key == "audit_pruned").scalar_subquery(), 0)
    beyond = select(func.min(audit.id), func.max(audit.id)).where(audit.id > pruned)
    oldest, newest = connection.execute(beyond).one()
    if oldest is None:
        return 0
    most = min(oldest + DELETE_BATCH_ROWS - 1, newest - 1)
    old = connection.execute(select(func.max(audit.id)).where(audit.id <= most, audit.at < keep.since)).scalar() or 0
    through = max(old, min(most, id_before_newest(connection, newest, keep.events)))
    if through < oldest:
        return 0
    connection.execute(update(tables.meta).where(meta.key == "audit_pruned").values(value=through))
    going = delete(tables.audit).where(audit.id.between(oldest, through), not_(table_access.is_written_by_person()))
    connection.execute(going)
    return int(through - oldest + 1)


def find_deletions(connection: Connection, keep: RetentionLimits) -> list[ChooseBatch]:
    """Where there may be rows to delete: for the reading thread, as is each of what it returns. Nothing that a
    controller starts from goes."""
    found: list[ChooseBatch] = [
        lambda connection: _orders(connection, keep),
        lambda connection: _verdicts(connection, keep),
        lambda connection: _ended(connection, tables.findings, "cleared_at", "id", keep),
        lambda connection: _ended(connection, tables.remediations, "ended_at", "requested_at", keep),
    ]
    for table, most in (
        (tables.generations, keep.generations),
        (tables.recoveries, keep.generations),
        (tables.versions, VERSIONS_KEPT),
    ):
        found += [_of_job(table, job, most) for job in _jobs_with_more(connection, table, most)]
    return found


def _orders(connection: Connection, keep: RetentionLimits) -> DeleteBatch | None:
    """The oldest lines that people wrote, beyond their own number."""
    audit = tables.audit.c
    theirs = audit.kind.in_(table_access.kinds_written_by_people(connection))
    surplus = (
        connection.execute(select(func.count()).select_from(tables.audit).where(theirs)).scalar_one() - keep.orders
    )
    if surplus <= 0:
        return None
    oldest = select(audit.id).where(theirs).order_by(audit.id).limit(min(surplus, DELETE_BATCH_ROWS))
    return OrdersDeleteBatch(tables.audit, [tuple(row) for row in connection.execute(oldest)])


def _verdicts(connection: Connection, keep: RetentionLimits) -> DeleteBatch | None:
    """All but the newest of each node, which may be why it stands where it stands."""
    verdicts, later = tables.verdicts, tables.verdicts.alias()
    superseded = select(later.c.id).where(later.c.node == verdicts.c.node, later.c.at > verdicts.c.at).exists()
    return _old(connection, verdicts, superseded, verdicts.c.at < keep.since, verdicts.c.at, keep)


def _ended(connection: Connection, table: Table, ended: str, order: str, keep: RetentionLimits) -> DeleteBatch | None:
    """What is over; what stands stays, however much it is."""
    return _old(connection, table, table.c[ended].is_not(None), table.c[ended] < keep.since, table.c[order], keep)


def _old(
    connection: Connection,
    table: Table,
    may_go: ColumnElement[bool],
    too_old: ColumnElement[bool],
    order: ColumnElement[Any],
    keep: RetentionLimits,
) -> DeleteBatch | None:
    """Of what ``may_go``: a bite of what is ``too_old``, or else the first in ``order`` of what is too much."""
    old = connection.execute(select(table.c.id).where(may_go, too_old).limit(DELETE_BATCH_ROWS)).all()
    if not old:
        surplus = connection.execute(select(func.count()).select_from(table)).scalar_one() - keep.rows
        first = select(table.c.id).where(may_go).order_by(order).limit(min(surplus, DELETE_BATCH_ROWS))
        old = connection.execute(first).all() if surplus > 0 else old
    return _bite(table, old, may_go)


def _jobs_with_more(connection: Connection, table: Table, most: int) -> list[str]:
    counted = select(table.c.job).group_by(table.c.job).having(func.count() > most).order_by(table.c.job)
    return list(connection.execute(counted).scalars())


def _of_job(table: Table, job: str, most: int) -> ChooseBatch:
    """The oldest rows of a job beyond its newest ``most``; but a job's newest verified version stays."""
    _, *places = table.primary_key.columns

    def choose(connection: Connection) -> DeleteBatch | None:
        mine = select(*table.primary_key.columns).where(table.c.job == job)
        last = connection.execute(mine.order_by(*(one.desc() for one in places)).offset(most).limit(1)).first()
        if last is None:
            return None
        may_go = _not_newest_verified() if table is tables.versions else None
        beyond = (
            mine.where(tuple_(*places) <= tuple(last)[1:], *_given(may_go)).order_by(*places).limit(DELETE_BATCH_ROWS)
        )
        return _bite(table, connection.execute(beyond).all(), may_go)

    return choose


def _not_newest_verified() -> ColumnElement[bool]:
    versions, later = tables.versions.c, tables.versions.alias().c
    newer = tuple_(later.generation, later.step) > tuple_(versions.generation, versions.step)
    verified = select(later.step).where(later.job == versions.job, later.verified_at.is_not(None), newer)
    return or_(versions.verified_at.is_(None), verified.exists())


def _bite(table: Table, rows: Sequence[Any], may_go: ColumnElement[bool] | None = None) -> DeleteBatch | None:
    keys = [tuple(row) for row in rows]
    return DeleteBatch(table, keys, may_go) if keys else None


def _given(condition: ColumnElement[bool] | None) -> tuple[ColumnElement[bool], ...]:
    return () if condition is None else (condition,)


# ---- retention
# Deleting old history in the background, a bite at a time between the loop's own transactions.

log = logging.getLogger(__name__)

ROUND_S = 60.0
BATCH_PAUSE_S = 0.05
"""So that deleting a long history takes a tenth of the database's time at most."""


async def run_retention(
    store: DatabaseStore, limits: Callable[[], RetentionLimits], *, first_s: float = ROUND_S
) -> None:
    """Runs until cancelled.

    Args:
        keep: what stays, as of now.
        first_s: when to begin: a controller that has just taken over has other things to do.
    """
    wait_s = first_s
    while True:
        await asyncio.sleep(wait_s)
        wait_s = ROUND_S
        try:
            await _round(store, limits())
        except (Unavailable, SQLAlchemyError) as error:
            log.warning("old history was not deleted, to be tried again in %.0f s: %s", ROUND_S, error)


async def _round(store: DatabaseStore, keep: RetentionLimits) -> None:
    while await store.write(lambda connection: prune_events(connection, keep)) >= DELETE_BATCH_ROWS:
        await asyncio.sleep(BATCH_PAUSE_S)
    for chore in await store.query(lambda connection: find_deletions(connection, keep)):
        await _done(store, chore)


async def _done(store: DatabaseStore, chore: ChooseBatch) -> None:
    while (bite := await store.query(chore)) is not None:
        await store.write(bite.execute)
        await asyncio.sleep(BATCH_PAUSE_S)
