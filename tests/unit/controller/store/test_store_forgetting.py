"""Nodes and jobs that are forgotten: what is left of them in the tables, and in decisions that wait for a database."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everstep_controller.store import tables
from everstep_controller.store.database import open_database
from everstep_controller.store.rows import Batch, GenerationRow, OutboxRow, RecoveryRow, VerdictRow, VersionRow
from everstep_controller.store.writer import DatabaseWriter
from sqlalchemy import select

TABLES = {
    "nodes": tables.nodes.c.node,
    "standing": tables.active_findings.c.node,
    "verdicts": tables.verdicts.c.id,
    "outbox": tables.outbox.c.seq,
    "marks": tables.acknowledged_reports.c.through,
    "jobs": tables.jobs.c.job,
    "generations": tables.generations.c.number,
    "recoveries": tables.recoveries.c.generation,
    "versions": tables.versions.c.step,
}


def of_node(node: str, number: int) -> Batch:
    """Something of it for every table, told apart by ``number``."""
    return Batch(
        nodes={node: "{}"},
        active_findings={(node, "key"): "{}"},
        verdicts=[VerdictRow(id=f"{node}-{number}", node=node, decision="evict", at=1.0, trace="t", doc="{}")],
        outbox=[OutboxRow(node=node, seq=number, body="{}")],
        acknowledged_reports={(node, number): number},
    )


def of_job(job: str, number: int) -> Batch:
    return Batch(
        jobs={job: "{}"},
        generations=[GenerationRow(job=job, number=number, reason="", trace="t", issued_at=1.0, doc="{}")],
        recoveries=[RecoveryRow(job=job, generation=number, doc="{}")],
        versions={(job, 1, number): VersionRow(job=job, generation=1, step=number, committed_at=1.0)},
    )


BOTH = [of_node("n1", 1), of_node("n2", 2), of_job("j1", 1), of_job("j2", 2)]
GONE = [Batch(forgotten_nodes={"n1": None}), Batch(forgotten_jobs={"j1": None})]
LEFT: dict[str, list[Any]] = {
    "nodes": ["n2"],
    "standing": ["n2"],
    "verdicts": ["n2-2"],
    "outbox": [2],
    "marks": [2],
    "jobs": ["j2"],
    "generations": [2],
    "recoveries": [2],
    "versions": [2],
}
BACK = {
    "nodes": ["n1", "n2"],
    "standing": ["n1", "n2"],
    "verdicts": ["n1-3", "n2-2"],
    "outbox": [2, 3],
    "marks": [2, 3],
    "jobs": ["j1", "j2"],
    "generations": [2, 3],
    "recoveries": [2, 3],
    "versions": [2, 3],
}


def written(database: str, batches: list[Batch]) -> dict[str, list[Any]]:
    """What stands in the tables of a new database after these batches, each in a transaction of its own."""
    engine = open_database(database)
    writer = DatabaseWriter(engine)
    writer.take_over()
    for number, batch in enumerate(batches, start=1):
        batch.number = number
        writer.commit([batch])
    writer.close()
    with engine.connect() as connection:
        found = {name: list(connection.execute(select(of).order_by(of)).scalars()) for name, of in TABLES.items()}
    engine.dispose()
    return found


def merged(batches: list[Batch]) -> Batch:
    whole = Batch()
    for batch in batches:
        whole.merge(batch)
    return whole


def test_forgetting_deletes_only_rows_of_the_named_node_or_job(
    database: str,
) -> None:
    assert written(database, [*BOTH, *GONE]) == LEFT


def test_cleared_finding_leaves_other_standing_findings(database: str) -> None:
    standing = Batch(active_findings={("n1", "key"): "{}", ("n1", "other"): "{}", ("n2", "key"): "{}"})
    assert written(database, [standing, Batch(active_findings={("n1", "key"): ""})])["standing"] == ["n1", "n2"]


def test_forgotten_name_starts_anew(database: str) -> None:
    assert written(database, [*BOTH, *GONE, of_node("n1", 3), of_job("j1", 3)]) == BACK


def test_forgetting_applies_to_merged_pending_batches(database: str, tmp_path: Path) -> None:
    waited = merged([*BOTH, *GONE])
    assert not waited.acknowledged_reports.keys() & {("n1", 1)}
    assert written(database, [waited]) == LEFT
    back = merged([*BOTH, *GONE, of_node("n1", 3), of_job("j1", 3)])
    assert written(f"sqlite:///{tmp_path / 'back.db'}", [back]) == BACK
    late = merged([*GONE, of_node("n1", 3), of_job("j1", 3)])
    assert written(f"sqlite:///{tmp_path / 'late.db'}", [*BOTH, late]) == BACK
