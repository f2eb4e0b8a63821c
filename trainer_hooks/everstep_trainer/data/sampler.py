"""Which samples a step sees, as a function of the step alone.

The order of samples depends on (seed, epoch), a sample's place on the step: never on the world size, nor on what
failed before. So ranks can come and go, and the sequence of finished steps still sees every sample once an epoch.

The permutation is a keyed Feistel network over the smallest even number of bits that can count the samples, walked
until it lands among them: constant memory and no state, where ``torch.randperm`` would hold 8 bytes a sample on
every rank and promises its order for one version of torch only.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from copy import copy
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

_ROUNDS = 6
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))

Positions = npt.NDArray[np.uint64]


class Permutation:
    """A shuffle of ``range(size)`` for one (seed, epoch)."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        self._size = np.uint64(size)
        bits = max(1, (size - 1).bit_length())
        half = (bits + 1) // 2
        self._shift = np.uint64(half)
        self._mask = np.uint64((1 << half) - 1)
        digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: Positions) -> Positions:
        """Samples at ``positions`` (uint64, each below the size)."""
        values = self._encrypt(positions)
        while (outside := values >= self._size).any():
            values[outside] = self._encrypt(values[outside])
        return values

    def _encrypt(self, values: Positions) -> Positions:
        left, right = values >> self._shift, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (self._mix(right ^ key) & self._mask)
        return (left << self._shift) | right

    @staticmethod
    def _mix(values: Positions) -> Positions:
        """The finalizer of splitmix64; arithmetic wraps."""
        values = (values ^ (values >> np.uint64(30))) * _MIX[0]
        values = (values ^ (values >> np.uint64(27))) * _MIX[1]
        return values ^ (values >> np.uint64(31))


def rank_batch_range(rank: int, world_size: int, global_batch: int) -> tuple[int, int]:
    """Where a rank's samples begin and end in a global batch. Raises ValueError where some rank would have none."""
    if global_batch < world_size:
        raise ValueError(
            f"a global batch of {global_batch} leaves some of {world_size} ranks without a sample: "
            f"take a batch of at least {world_size}, or fewer ranks"
        )
    return rank * global_batch // world_size, (rank + 1) * global_batch // world_size


class Sampler(Protocol):
    """What a training loop asks for each step."""

    def indices(self, step: int) -> torch.Tensor: ...

    def loss_weight(self, step: int) -> float: ...

    def for_rank(self, rank: int, world_size: int) -> Sampler:
        """The same samples, as another rank of another number of ranks has them."""


class StepPart(msgspec.Struct, frozen=True):
    """What one rank, physical or virtual, computes of a step.

    rank: the number of the stream of random numbers that it has, which is a replica's. indices: its samples, int64.
    loss_weight: what to multiply its mean loss by, so that the mean over replicas is the mean over samples. batch: of
    ``run.loader``, what it loaded. is_repeat: compute it like any other, so that ranks that have more parts do not wait
    for ever; its gradients and its loss count for nothing (exact mode under fully_shard).
    """

    rank: int
    indices: torch.Tensor
    loss_weight: float
    batch: Any = None
    is_repeat: bool = False


class ElasticSampler:
    """Splits a constant global batch over however many ranks there are.

    Step ``s`` (from 1) takes positions ``(s - 1) * global_batch`` up to ``s * global_batch`` of an endless sequence of
    shuffled epochs. A batch may straddle two epochs, so that none of an epoch's samples is dropped; with
    ``drop_last`` an epoch ends at its last whole batch instead, and what is left over (other samples each time) is
    not seen in that epoch.

    Args:
        size: samples in the data set.
        global_batch: samples of one optimizer step over all ranks. At least one a rank.
        seed: of the shuffle.
        rank, world_size: of the present generation's data-parallel replicas.

    Raises ValueError where a batch cannot be taken from the data or split over the ranks.
    """

    def __init__(
        self,
        size: int,
        *,
        global_batch: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
    ) -> None:
        if size < 1 or (drop_last and size < global_batch):
            raise ValueError(f"{size} samples do not make a batch of {global_batch}")
        self._size = size
        self._global_batch = global_batch
        self._seed = seed
        self._rank = rank
        self._world = world_size
        self._epoch_length = size - size % global_batch if drop_last else size
        self.batch_range()

    def for_rank(self, rank: int, world_size: int) -> ElasticSampler:
        """The same samples, as ``rank`` of another number of ranks has them. Raises ValueError as the constructor."""
        other = copy(self)
        other._rank, other._world = rank, world_size
        other.batch_range()
        return other

    def epoch(self, step: int) -> int:
        """The epoch (from 0) that the step's first sample belongs to."""
        return self._first(step) // self._epoch_length

    def indices(self, step: int) -> torch.Tensor:
        """This rank's samples of the step: int64, one after another in the global batch."""
        start, end = self.batch_range()
        return self._samples(step, start, end)

    def global_indices(self, step: int) -> torch.Tensor:
        """All samples of the step, over all ranks and in order; the same at every world size."""
        return self._samples(step, 0, self._global_batch)

    def loss_weight(self, step: int) -> float:
        """What to multiply this rank's mean loss by, so that the mean over ranks is the mean over samples.

        Exactly 1.0 where the batch divides evenly.
        """
        start, end = self.batch_range()
        return (end - start) * self._world / self._global_batch

    def batch_range(self) -> tuple[int, int]:
        """Where this rank's samples begin and end in the global batch."""
        return rank_batch_range(self._rank, self._world, self._global_batch)

    def _first(self, step: int) -> int:
        if step < 1:
            raise ValueError(f"steps count from 1, not {step}")
        return (step - 1) * self._global_batch

    def _samples(self, step: int, start: int, end: int) -> torch.Tensor:
        first = self._first(step)
        positions = np.arange(first + start, first + end, dtype=np.uint64)
        epochs = positions // np.uint64(self._epoch_length)
        places = positions % np.uint64(self._epoch_length)
        samples = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            samples[chosen] = Permutation(self._size, self._seed, int(epoch))(places[chosen])
        return torch.from_numpy(samples)


# ---- packing
# Sequences of different lengths, several to a row: which ones go together is decided once, from the lengths alone.

PACK_WINDOW = 4096


def pack(lengths: Sequence[int], budget: int, *, seed: int = 0, window: int = PACK_WINDOW) -> list[tuple[int, ...]]:
    """Rows of sequences, each of at most ``budget`` in length; every sequence is in one row.

    A pure function: every rank, at every world size and after every failure, has the same rows. They then are samples
    like any others: ``run.sampler(len(rows), ...)`` shuffles them anew in each epoch.

    Sequences are shuffled by ``seed`` and taken ``window`` at a time, the longest first, each into the fullest row that
    has room (best fit decreasing: at most 11/9 of the fewest rows there could be, and one more, in each window;
    Johnson 1973). A larger window packs closer, a smaller one leaves more to chance.

    Raises ValueError for a sequence that is longer than a row, or has no length.
    """
    order = (
        Permutation(len(lengths), seed, 0)(np.arange(len(lengths), dtype=np.uint64)).tolist() if len(lengths) else []
    )
    rows: list[tuple[int, ...]] = []
    for start in range(0, len(order), window):
        rows += _pack_window(order[start : start + window], lengths, budget)
    return rows


def _pack_window(indices: list[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (left, row), sorted
    for index in sorted(indices, key=lambda i: -lengths[i]):
        length = lengths[index]
        if not 0 < length <= budget:
            raise ValueError(
                f"sequence {index} has length {length}, and a row takes 1 to {budget}: cut it, or raise the budget"
            )
        place = bisect_left(room, (length, -1))
        if place == len(room):
            rows.append([])
            left, row = budget, len(rows) - 1
        else:
            left, row = room.pop(place)
        rows[row].append(index)
        insort(room, (left - length, row))
    return [tuple(row) for row in rows]


class PackedDataset:
    """A map-style data set whose samples are rows of another's: ``packed[n]`` is the list of a row's samples."""

    def __init__(self, dataset: Any, rows: Sequence[Sequence[int]]) -> None:
        self._dataset = dataset
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> list[Any]:
        return [self._dataset[index] for index in self.rows[row]]
