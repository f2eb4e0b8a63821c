"""Choose the samples of a step as a function of the step alone.

The order of samples depends on (seed, epoch), and a sample's position on the step; neither depends on the world size
or on earlier failures. Ranks can come and go, and finished steps still see every sample once per epoch.

The permutation is a keyed Feistel network over the smallest even number of bits that can count the samples. Values
outside the range are encrypted again until they fall inside. It needs constant memory and no state.
``torch.randperm`` would hold 8 bytes per sample on every rank, and promises its order for one torch version only.
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
        """Return the samples at ``positions`` (uint64, each below the size)."""
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
        """Apply the finalizer of splitmix64; arithmetic wraps."""
        values = (values ^ (values >> np.uint64(30))) * _MIX[0]
        values = (values ^ (values >> np.uint64(27))) * _MIX[1]
        return values ^ (values >> np.uint64(31))


class Sampler(Protocol):
    """The interface of samplers and loaders that a training loop uses in each step."""

    def indices(self, step: int) -> torch.Tensor: ...

    def loss_weight(self, step: int) -> float: ...

    def for_rank(self, rank: int, world_size: int) -> Sampler:
        """Return the sampler of ``rank`` among ``world_size`` ranks, over the same samples."""


class StepPart(msgspec.Struct, frozen=True):
    """The work of one physical or virtual rank in a step.

    Attributes:
        rank: Index of the replica, which numbers its random stream.
        indices: Its samples, int64.
        loss_weight: Factor for its mean loss that makes the mean over replicas the mean over samples.
        batch: The loaded batch if a ``run.loader`` was given, else None.
        is_repeat: The part only keeps ranks with fewer parts in step (exact mode under ``fully_shard``). Compute it
            like any other; its gradients and loss are ignored.
    """

    rank: int
    indices: torch.Tensor
    loss_weight: float
    batch: Any = None
    is_repeat: bool = False


class ElasticSampler:
    """Splits a constant global batch over any number of ranks.

    Step ``s`` (from 1) takes positions ``(s - 1) * global_batch`` up to ``s * global_batch`` of an endless sequence of
    shuffled epochs. A batch may straddle two epochs, so that no sample is dropped. With ``drop_last`` an epoch ends at
    its last whole batch, and the samples left over, which differ from epoch to epoch, are not seen.

    Example::

        sampler = ElasticSampler(len(dataset), global_batch=32, rank=rank, world_size=world_size)
        batch = [dataset[index] for index in sampler.indices(step).tolist()]
        loss = loss_of(model, batch) * sampler.loss_weight(step)

    Args:
        size: Number of samples in the data set.
        global_batch: Samples per optimizer step over all ranks; at least one per rank.
        seed: Seed of the shuffle.
        rank: Index of this rank's data-parallel replica in the current generation.
        world_size: Number of data-parallel replicas in the current generation.
        drop_last: End each epoch at its last whole batch.

    Raises:
        ValueError: A batch cannot be taken from the data or split over the ranks.
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
        self._size, self._global_batch = size, global_batch
        self._seed, self._rank = seed, rank
        self._world = world_size
        self._epoch_length = size - size % global_batch if drop_last else size
        self.batch_range()

    def for_rank(self, rank: int, world_size: int) -> ElasticSampler:
        """Return the sampler of ``rank`` among ``world_size`` ranks, over the same samples.

        Raises:
            ValueError: Some rank would have no sample.
        """
        other = copy(self)
        other._rank, other._world = rank, world_size
        other.batch_range()
        return other

    def epoch(self, step: int) -> int:
        """Return the epoch (from 0) of the step's first sample."""
        return self._first(step) // self._epoch_length

    def indices(self, step: int) -> torch.Tensor:
        """Return this rank's samples of the step as an int64 tensor of shape [samples of this rank]."""
        start, end = self.batch_range()
        return self._samples(step, start, end)

    def global_indices(self, step: int) -> torch.Tensor:
        """Return all samples of the step in order, as an int64 tensor of shape [global_batch], at any world size."""
        return self._samples(step, 0, self._global_batch)

    def loss_weight(self, step: int) -> float:
        """Return the factor for this rank's mean loss that makes the mean over ranks the mean over samples."""
        start, end = self.batch_range()
        return (end - start) * self._world / self._global_batch

    def batch_range(self, step: int = 1) -> tuple[int, int]:
        """Return where this rank's samples begin and end in the global batch of the step; here, of any step."""
        batch, world = self._global_batch, self._world
        if batch < world:
            raise ValueError(
                f"a global batch of {batch} leaves some of {world} ranks without a sample: "
                f"take a batch of at least {world}, or fewer ranks"
            )
        return self._rank * batch // world, (self._rank + 1) * batch // world

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


# ---- packing: several sequences of different lengths in one row, decided from the lengths alone

PACK_WINDOW = 4096


def pack(lengths: Sequence[int], budget: int, *, seed: int = 0, window: int = PACK_WINDOW) -> list[tuple[int, ...]]:
    """Group sequences into rows whose total length is at most ``budget``; each sequence is in exactly one row.

    The result depends on the arguments alone, so all ranks agree on it at every world size and after every failure.
    Rows are then ordinary samples: ``run.sampler(len(rows), ...)`` shuffles them anew in each epoch.

    Sequences are shuffled by ``seed`` and taken ``window`` at a time, the longest first, each into the fullest row with
    room. This is best fit decreasing: in each window at most 11/9 of the optimal number of rows, plus one (Johnson
    1973).

    Example::

        rows = pack([len(tokens) for tokens in dataset], budget=4096)
        packed = PackedDataset(dataset, rows)

    Args:
        lengths: Length of each sequence.
        budget: Largest total length of a row.
        seed: Seed of the shuffle.
        window: Sequences packed at a time. A larger window packs closer, a smaller one mixes lengths more at random.

    Returns:
        The indices of the sequences in each row.

    Raises:
        ValueError: A sequence is longer than a row or has no length.
    """
    rows: list[tuple[int, ...]] = []
    if not len(lengths):
        return rows
    order = Permutation(len(lengths), seed, 0)(np.arange(len(lengths), dtype=np.uint64)).tolist()
    for start in range(0, len(order), window):
        rows += _pack_window(order[start : start + window], lengths, budget)
    return rows


def _pack_window(indices: list[int], lengths: Sequence[int], budget: int) -> list[tuple[int, ...]]:
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free length, row), sorted
    for index in sorted(indices, key=lambda i: -lengths[i]):
        length = lengths[index]
        if not 0 < length <= budget:
            raise ValueError(
                f"sequence {index} has length {length}, but a row takes 1 to {budget}: cut it, or raise the budget"
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
    """A map-style data set of packed rows: ``packed[n]`` is the list of the samples in row ``n``."""

    def __init__(self, dataset: Any, rows: Sequence[Sequence[int]]) -> None:
        self._dataset, self.rows = dataset, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> list[Any]:
        return [self._dataset[index] for index in self.rows[row]]
