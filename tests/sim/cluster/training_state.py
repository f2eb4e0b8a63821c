"""A rank's training state as the history of its values, and the part of it that each rank stores."""

from __future__ import annotations

from functools import cache

import xxhash

from everstep.layout.manifests import LAYOUT_FORMAT, Manifest, StoredBox, TensorInfo, full_box
from everstep_trainer.data.sampler import ElasticSampler

SAMPLES = 1000
"""Samples of a job's data set."""
GLOBAL_BATCH = 48
"""Samples of a step, over all ranks."""
ROWS = 720
"""Rows of a job's only tensor."""


class TrainingState:
    """The parameters after a step.

    Attributes:
        parent: The state before the step; None for the initial values.
        step: The number of the step.
        samples: The samples of the step, over all ranks.
        wrong_nodes: The nodes whose wrong results are part of the parameters.
        digest: A digest of the whole history.
    """

    __slots__ = ("digest", "parent", "samples", "step", "wrong_nodes")

    def __init__(
        self, parent: TrainingState | None, step: int, samples: tuple[int, ...], wrong_nodes: frozenset[str]
    ) -> None:
        self.parent = parent
        self.step = step
        self.samples = samples
        self.wrong_nodes = wrong_nodes
        parent_digest = parent.digest if parent is not None else ""
        history = f"{parent_digest}/{step}/{hash(samples)}/{','.join(sorted(wrong_nodes))}"
        self.digest: str = xxhash.xxh3_64_hexdigest(history.encode())


def initial_state() -> TrainingState:
    """Return the initial values, which every rank computes alike."""
    return TrainingState(None, 0, (), frozenset())


@cache
def samples_of(step: int, rank: int, world: int) -> tuple[int, ...]:
    """Return the samples of a rank in a step."""
    sampler = ElasticSampler(SAMPLES, global_batch=GLOBAL_BATCH, seed=0, rank=rank, world_size=world)
    return tuple(sampler.indices(step).tolist())


@cache
def samples_of_all(step: int, world: int) -> tuple[int, ...]:
    """Return the samples of all ranks in a step."""
    return tuple(sample for rank in range(world) for sample in samples_of(step, rank, world))


@cache
def manifest_of(rank: int, world: int, per_node: int, replicas: int, replicated: bool) -> Manifest:
    """Return a rank's part of the rows. Replicated state adds the parts of ranks on ``replicas - 1`` nodes."""
    parts = [rank]
    if replicated:
        parts += sorted({(rank - per_node * i) % world for i in range(1, replicas)} - {rank})
    boxes = [box for part in parts if (box := full_box((ROWS,)).chunk(0, part, world)).volume]
    stored = tuple(StoredBox(0, box, 4 * ROWS * i) for i, box in enumerate(boxes))
    payload = 4 * ROWS * len(boxes)
    catalog = (TensorInfo("weight", "float32", 4, (ROWS,), per_rank=False),)
    return Manifest(LAYOUT_FORMAT, rank, world, catalog, stored, 0, 0, payload, 0 if replicated else payload)
