"""Reading what a controller starts from."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Connection, desc, select

from controller.store import credentials, tables
from controller.store.reader import newest_verified, newest_versions
from controller.store.records import Loaded, OutboxRow, VersionRow

VERSIONS_LOADED = 64
"""Versions of each job that a controller starts with."""


def load(connection: Connection, epoch: int, batch: int) -> Loaded:
    """Everything that the next life starts from, as ``epoch`` finds it."""
    outbox, marks = tables.outbox.c, tables.report_marks.c
    audit = tables.audit.c
    newest = connection.execute(select(audit.id, audit.at).order_by(desc(audit.id)).limit(1)).first()
    pruned = select(tables.meta.c.value).where(tables.meta.c.key == "audit_pruned")
    jobs = _pairs(connection, tables.jobs.c.job, tables.jobs.c.doc)
    return Loaded(
        epoch=epoch,
        batch=batch,
        fleet=connection.execute(select(tables.fleet.c.doc)).scalar(),
        nodes=_pairs(connection, tables.nodes.c.node, tables.nodes.c.doc),
        jobs=jobs,
        versions=_versions(connection, jobs),
        credentials=credentials.load(connection),
        outbox=[
            OutboxRow(node=node, seq=seq, body=body)
            for node, seq, body in connection.execute(
                select(outbox.node, outbox.seq, outbox.body).order_by(outbox.node, outbox.seq)
            )
        ],
        marks={
            (node, incarnation): through
            for node, incarnation, through in connection.execute(select(marks.node, marks.incarnation, marks.through))
        },
        poisoned=frozenset(
            (row.node, row.incarnation, row.number) for row in connection.execute(select(tables.poisoned_reports))
        ),
        newest_audit=newest.id if newest is not None else connection.execute(pruned).scalar() or 0,
        newest_at=newest.at if newest is not None else 0.0,
    )


def _pairs(connection: Connection, key: Column[Any], doc: Column[Any]) -> dict[str, str]:
    return {row[0]: row[1] for row in connection.execute(select(key, doc))}


def _versions(connection: Connection, jobs: dict[str, str]) -> list[VersionRow]:
    return [
        row
        for job in jobs
        for row in (*newest_versions(connection, job, VERSIONS_LOADED), *newest_verified(connection, job))
    ]
