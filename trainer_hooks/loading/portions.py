"""What a loader fetches, in which order, and with which random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import Any, Protocol

import msgspec
import torch

from trainer_hooks.rng import host_streams, seed_batch, seed_sample, set_host_streams


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
    """The portions of the parts that this rank computes, from a step's part ``first_part`` (from 0) on, without end."""

    def __init__(self, shares: Sequence[Shares], first_step: int, first_part: int = 0) -> None:
        self._shares = shares
        self._first_step = first_step
        self._first_part = first_part

    def __iter__(self) -> Iterator[Portion]:
        return islice(self._all(), self._first_part, None)

    def _all(self) -> Iterator[Portion]:
        for step in count(self._first_step):
            for share in self._shares:
                yield Portion(step, share.share()[0], tuple(share.indices(step).tolist()))


Collate = Callable[[list[Any]], Any]


def batch_of(portion: Portion, seed: int, fetch: Callable[[int], Any], collate: Collate) -> Any:
    """What ``collate`` makes of ``fetch(index)`` of each sample, with streams seeded from (seed, step, place in the
    global batch) for each, and from (seed, step, place of the first) for ``collate``.

    So what is drawn for a sample depends neither on the worker that fetches it nor on the number of ranks, and what is
    drawn for a batch on that number only. In a main process that fetches itself, the streams afterwards are what they
    were before.
    """
    with _streams_kept():
        fetched = []
        for place, index in enumerate(portion.indices, portion.first):
            seed_sample(seed, portion.step, place)
            fetched.append(fetch(index))
        seed_batch(seed, portion.step, portion.first)
        return collate(fetched)


def batch_together(portion: Portion, seed: int, fetch: Callable[[list[int]], list[Any]], collate: Collate) -> Any:
    """The same where all samples are fetched in one call, with streams seeded from the place of the first."""
    first = msgspec.structs.replace(portion, indices=portion.indices[:1])
    return batch_of(first, seed, lambda _: fetch(list(portion.indices)), lambda fetched: collate(fetched[0]))


@contextmanager
def _streams_kept() -> Iterator[None]:
    before = host_streams()
    try:
        yield
    finally:
        set_host_streams(before)


class Mapped:
    """A map-style data set that is asked for portions: what torch's fetcher hands over is the whole portion.

    together: asks for all samples of a portion at once. What the data set draws is then seeded from the place of the
    first.
    """

    def __init__(self, dataset: Any, seed: int, collate: Collate, *, together: bool = False) -> None:
        self._dataset = dataset
        self._seed = seed
        self._collate = collate
        self._together = together

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, portion: Portion) -> Any:
        if not self._together:
            return batch_of(portion, self._seed, self._one, self._collate)
        return batch_together(portion, self._seed, self._dataset.__getitems__, self._collate)

    def _one(self, index: int) -> Any:
        """As torch asks, which prefers ``__getitems__``: a data set may have that one only."""
        several = getattr(self._dataset, "__getitems__", None)
        return self._dataset[index] if several is None else several([index])[0]


def the_same(value: Any) -> Any:
    """In the place of a collate function: a portion is collated already."""
    return value
