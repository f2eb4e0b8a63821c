"""Sequences of different lengths, several to a row: which ones go together is decided once, from the lengths alone."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any

import numpy as np

from trainer_hooks.data import Permutation

WINDOW = 4096


def pack(lengths: Sequence[int], budget: int, *, seed: int = 0, window: int = WINDOW) -> list[tuple[int, ...]]:
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


class Packed:
    """A map-style data set whose samples are rows of another's: ``packed[n]`` is the list of a row's samples."""

    def __init__(self, dataset: Any, rows: Sequence[Sequence[int]]) -> None:
        self._dataset = dataset
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> list[Any]:
        return [self._dataset[index] for index in self.rows[row]]
