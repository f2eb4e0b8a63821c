"""Deleting what is older than anybody wants to read. Each function takes a small bite in its caller's transaction, and
tells how many rows it took: as many as ``BITE`` when there may be more."""

from __future__ import annotations

from typing import Any

import msgspec
from sqlalchemy import ColumnElement, Connection, Table, and_, delete, func, select, tuple_, update

from controller.store import tables
from controller.store.audit_ids import followed_by
from controller.store.reader import newest_verified

BITE = 500
"""Rows at a time: a few milliseconds, in which no decision is written."""
VERSIONS_KEPT = 1000
"""Versions of each job: it commits about two a second."""


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """What stays: everything younger than ``since`` (wall seconds), but at most the newest ``events`` of the audit log,
    ``rows`` of verdicts, of findings and of remedies each, ``generations`` of each job."""

    since: float
    events: int
    rows: int
    generations: int


def prune(connection: Connection, keep: Keep) -> int:
    """The largest number of rows that one kind has lost. Nothing that a controller starts from is deleted."""
    _versions(connection)
    return max(
        _events(connection, keep),
        _verdicts(connection, keep),
        _ended(connection, tables.findings, "cleared_at", "id", keep),
        _ended(connection, tables.remedies, "ended_at", "requested_at", keep),
        _generations(connection, keep),
    )


def _events(connection: Connection, keep: Keep) -> int:
    """The oldest ones; never the newest of all, which says how far time has come."""
    audit, meta = tables.audit.c, tables.meta.c
    oldest, newest = connection.execute(select(func.min(audit.id), func.max(audit.id))).one()
    if oldest is None:
        return 0
    most = min(oldest + BITE - 1, newest - 1)
    old = connection.execute(select(func.max(audit.id)).where(audit.id <= most, audit.at < keep.since)).scalar() or 0
    through = max(old, min(most, followed_by(connection, newest, keep.events)))
    if through < oldest:
        return 0
    connection.execute(update(tables.meta).where(meta.key == "audit_pruned").values(value=through))
    return connection.execute(delete(tables.audit).where(audit.id <= through)).rowcount


def _verdicts(connection: Connection, keep: Keep) -> int:
    """All but the newest of each node, which may be why it stands where it stands."""
    verdicts, later = tables.verdicts, tables.verdicts.alias()
    superseded = select(later.c.id).where(later.c.node == verdicts.c.node, later.c.at > verdicts.c.at).exists()
    return _old(connection, verdicts, superseded, verdicts.c.at < keep.since, verdicts.c.at, keep)


def _ended(connection: Connection, table: Table, ended: str, order: str, keep: Keep) -> int:
    """What is over; what stands stays, however much it is."""
    return _old(connection, table, table.c[ended].is_not(None), table.c[ended] < keep.since, table.c[order], keep)


def _old(
    connection: Connection,
    table: Table,
    may_go: ColumnElement[bool],
    too_old: ColumnElement[bool],
    order: ColumnElement[Any],
    keep: Keep,
) -> int:
    """Of what ``may_go``: a bite of what is ``too_old``, and where that was not a whole one, the first in ``order`` of
    what is too much."""
    old = select(table.c.id).where(may_go, too_old).limit(BITE)
    taken = connection.execute(delete(table).where(table.c.id.in_(old.scalar_subquery()))).rowcount
    if taken >= BITE:
        return taken
    surplus = connection.execute(select(func.count()).select_from(table)).scalar_one() - keep.rows
    if surplus <= 0:
        return taken
    first = select(table.c.id).where(may_go).order_by(order).limit(min(surplus, BITE))
    return max(taken, connection.execute(delete(table).where(table.c.id.in_(first.scalar_subquery()))).rowcount)


def _generations(connection: Connection, keep: Keep) -> int:
    """Rosters, and how they came to step."""
    taken = 0
    for job in connection.execute(select(tables.jobs.c.job)).scalars().all():
        for table, number in ((tables.generations, "number"), (tables.recoveries, "generation")):
            newest = select(table.c[number]).where(table.c.job == job).order_by(table.c[number].desc())
            last = connection.execute(newest.offset(keep.generations).limit(1)).scalar()
            if last is None:
                continue
            old = select(table.c[number]).where(table.c.job == job, table.c[number] <= last)
            old = old.order_by(table.c[number]).limit(BITE)
            gone = delete(table).where(table.c.job == job, table.c[number].in_(old.scalar_subquery()))
            taken = max(taken, connection.execute(gone).rowcount)
    return taken


def _versions(connection: Connection) -> None:
    """All but the newest of each job, and its newest verified one: at once, for they are small."""
    versions = tables.versions
    place = tuple_(versions.c.generation, versions.c.step)
    for job in connection.execute(select(tables.jobs.c.job)).scalars().all():
        newest = select(versions.c.generation, versions.c.step).where(versions.c.job == job)
        newest = newest.order_by(versions.c.generation.desc(), versions.c.step.desc())
        last = connection.execute(newest.offset(VERSIONS_KEPT).limit(1)).first()
        if last is None:
            continue
        verified = [(row.generation, row.step) for row in newest_verified(connection, job)]
        old = and_(versions.c.job == job, place <= tuple(last), place.not_in(verified))
        connection.execute(delete(versions).where(old))
