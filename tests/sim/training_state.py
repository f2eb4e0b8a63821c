"""What a rank holds after a step: not numbers, but where they came from. And which part of it each rank stores."""

from __future__ import annotations

from functools import cache

import xxhash
from everstep_trainer.data.sampler import ElasticSampler

from everstep.layout.manifests import LAYOUT_FORMAT, Manifest, StoredBox, TensorInfo, full_box

SAMPLES = 1000
GLOBAL_BATCH = 48
ROWS = 720
"""Of the one tensor that a job has."""


class TrainingState:
    """The parameters after ``step``: made from ``parent`` by the samples ``seen``, wrong where ``liars`` took part."""

    __slots__ = ("digest", "liars", "parent", "seen", "step")

    def __init__(self, parent: TrainingState | None, step: int, seen: tuple[int, ...], liars: frozenset[str]) -> None:
        self.parent = parent
        self.step = step
        self.seen = seen
        self.liars = liars
        origin = parent.digest if parent is not None else ""
        words = f"{origin}/{step}/{hash(seen)}/{','.join(sorted(liars))}"
        self.digest = xxhash.xxh3_64_hexdigest(words.encode())


def scratch() -> TrainingState:
    """The initial values, which every rank computes alike."""
    return TrainingState(None, 0, (), frozenset())


@cache
def share_of(step: int, rank: int, world: int) -> tuple[int, ...]:
    """The samples that a rank takes in a step."""
    sampler = ElasticSampler(SAMPLES, global_batch=GLOBAL_BATCH, seed=0, rank=rank, world_size=world)
    return tuple(sampler.indices(step).tolist())


@cache
def seen_by_all(step: int, world: int) -> tuple[int, ...]:
    """What all ranks together take in a step."""
    return tuple(sample for rank in range(world) for sample in share_of(step, rank, world))


@cache
def manifest_of(rank: int, world: int, per_node: int, replicas: int, replicated: bool) -> Manifest:
    """What a rank stores: its part of the rows; of replicated state also that of ranks on ``replicas - 1`` nodes."""
    parts = [rank]
    if replicated:
        parts += sorted({(rank - per_node * i) % world for i in range(1, replicas)} - {rank})
    boxes = [box for part in parts if (box := full_box((ROWS,)).chunk(0, part, world)).volume]
    stored = tuple(StoredBox(0, box, 4 * ROWS * i) for i, box in enumerate(boxes))
    payload = 4 * ROWS * len(boxes)
    catalog = (TensorInfo("weight", "float32", 4, (ROWS,), per_rank=False),)
    return Manifest(LAYOUT_FORMAT, rank, world, catalog, stored, 0, 0, payload, 0 if replicated else payload)
