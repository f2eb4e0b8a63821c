"""Generations with equally many ranks on each of the named nodes."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec, JobSpec, RestoreRule

JOB = "job"


def generation(
    number: int,
    *,
    ranks: Sequence[tuple[str, int]] = (("n1", 0),),
    store: str = "127.0.0.1:1",
    after_step: int | None = None,
    restore: RestoreRule | None = None,
    spec: JobSpec | None = None,
    reason: GenerationReason = GenerationReason.FORMED,
) -> GenerationSpec:
    """Return generation ``number`` of the ``(node, local rank)`` pairs in rank order, equally many on each node."""
    nodes = tuple(dict.fromkeys(node for node, _ in ranks))
    made = GenerationSpec(
        job=JOB,
        number=number,
        reason=reason,
        sentence="for a test",
        trace=f"t{number}",
        seats=nodes,
        store=store,
        store_node=nodes[0],
        restore=restore or RestoreRule(from_scratch=True),
        holders=(),
        replica_nodes=dict.fromkeys(nodes, ()),
        secret="00" * 32,
        spec=spec or JobSpec(job=JOB, max_nodes=len(nodes), nproc_per_node=len(ranks) // len(nodes)),
        issued_at=0.0,
        after_step=after_step,
    )
    assert [(m.node, m.local_rank) for m in made.roster] == list(ranks), "no generation can have these ranks"
    return made
