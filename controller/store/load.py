"""Reading what a controller starts from."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from sqlalchemy import Column, Connection, desc, select

from controller.store import ahead, alerts, clock_mark, credentials, remedies, tables
from controller.store.reader import newest_verified, newest_versions
from controller.store.records import Loaded, OutboxRow, VersionRow

VERSIONS_LOADED = 64
"""Versions of each job that a controller starts with."""


def load(connection: Connection, epoch: int, batch: int, known: ahead.Marks = ahead.NONE) -> Loaded:
    """Everything that the next life starts from, as ``epoch`` finds it, but records of nodes that are ``known``."""
    same, nodes = _nodes(connection, known)
    marks, audit = tables.report_marks.c, tables.audit.c
    newest = connection.execute(select(audit.id).order_by(desc(audit.id)).limit(1)).scalar()
    pruned = select(tables.meta.c.value).where(tables.meta.c.key == "audit_pruned")
    jobs = _pairs(connection, tables.jobs.c.job, tables.jobs.c.doc)
    return Loaded(
        epoch=epoch,
        batch=batch,
        fleet=connection.execute(select(tables.fleet.c.doc)).scalar(),
        same=same,
        nodes=nodes,
        standing=_standing(connection),
        jobs=jobs,
        versions=_versions(connection, jobs),
        credentials=credentials.load(connection),
        remedies=remedies.load(connection),
        alerts=alerts.load(connection),
        outbox=_outbox(connection),
        marks={
            (node, incarnation): through
            for node, incarnation, through in connection.execute(select(marks.node, marks.incarnation, marks.through))
        },
        poisoned=frozenset(
            (row.node, row.incarnation, row.number) for row in connection.execute(select(tables.poisoned_reports))
        ),
        newest_audit=newest if newest is not None else connection.execute(pruned).scalar() or 0,
        newest_at=clock_mark.newest_at(connection),
    )


def _nodes(connection: Connection, known: ahead.Marks) -> tuple[Set[str], dict[str, str]]:
    if not known.nodes:
        return frozenset(), _pairs(connection, tables.nodes.c.node, tables.nodes.c.doc)
    found = ahead.changes(connection, known)
    return found.same, {row.node: row.doc for row in found.rows}


def _pairs(connection: Connection, key: Column[Any], doc: Column[Any]) -> dict[str, str]:
    return {row[0]: row[1] for row in connection.execute(select(key, doc))}


def _standing(connection: Connection) -> dict[tuple[str, str], str]:
    standing = tables.standing_findings.c
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
