"""What a loader fetches, in which order, and with which random numbers."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol

import msgspec
import torch
from torch.utils.data import get_worker_info

from trainer_hooks.rng import seed_sample


class Portion(msgspec.Struct, frozen=True):
    """The samples of one part (``run.parts``) of one step.

    first: the place of the first one in the step's global batch. indices: into the data set; of a stream, positions
    from its beginning.
    """

    step: int
    first: int
    indices: tuple[int, ...]


class Shares(Protocol):
    """A sampler that says where in the global batch this rank's samples are."""

    def indices(self, step: int) -> torch.Tensor: ...

    def share(self) -> tuple[int, int]: ...


class Portions:
    """The portions of the parts that this rank computes, from a step on and without end."""

    def __init__(self, shares: Sequence[Shares], first_step: int) -> None:
        self._shares = shares
        self._first_step = first_step

    def __iter__(self) -> Iterator[Portion]:
        for step in count(self._first_step):
            for share in self._shares:
                yield Portion(step, share.share()[0], tuple(share.indices(step).tolist()))


def seeded(
    portion: Portion, seed: int, fetch: Callable[[int], Any], approach: Callable[[int], None] | None = None
) -> list[Any]:
    """``fetch(index)`` of each sample, with streams seeded from (seed, step, place in the global batch).

    ``approach(index)`` comes before the seeding: what it draws counts for nothing.

    So what is drawn for a sample depends neither on the worker that fetches it nor on the number of ranks. In a main
    process that fetches itself, the streams afterwards are what they were before.
    """
    with _streams_kept():
        fetched = []
        for place, index in enumerate(portion.indices, portion.first):
            if approach is not None:
                approach(index)
            seed_sample(seed, portion.step, place)
            fetched.append(fetch(index))
        return fetched


@contextmanager
def _streams_kept() -> Iterator[None]:
    if get_worker_info() is not None:
        yield
        return
    numpy = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])


class Mapped:
    """A map-style data set that is asked for portions: what torch's fetcher hands over is the whole portion."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, portion: Portion) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)
        if together is None:
            return seeded(portion, self._seed, self._dataset.__getitem__)
        fetched: list[list[Any]] = []
        whole = msgspec.structs.replace(portion, indices=portion.indices[:1])
        seeded(whole, self._seed, lambda _: fetched.append(together(list(portion.indices))))
        return fetched[0]


def the_same(value: Any) -> Any:
    """In the place of a collate function: a portion has its own already."""
    return value
