"""Sequences packed into rows: none lost, none twice, no row too long, and as close as promised."""

from __future__ import annotations

import numpy as np
import pytest
from everstep_trainer.data.sampler import ElasticSampler, PackedDataset, pack
from hypothesis import given
from hypothesis import strategies as st

BUDGET = 100
lengths_of_any_kind = st.lists(st.integers(1, BUDGET), max_size=300)


def dumb(lengths: list[int]) -> list[int]:
    """How full best fit decreasing makes its rows, looking at every row for every sequence."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [n for n, filled in enumerate(rows) if filled + length <= BUDGET]
        if fitting:
            rows[max(fitting, key=lambda n: rows[n])] += length
        else:
            rows.append(length)
    return sorted(rows)


@given(lengths_of_any_kind, st.integers(0, 1000), st.integers(1, 400))
def test_every_sequence_is_in_one_row_and_no_row_is_too_long(lengths, seed, window):
    rows = pack(lengths, BUDGET, seed=seed, window=window)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= BUDGET for row in rows)
    assert rows == pack(lengths, BUDGET, seed=seed, window=window)


@given(lengths_of_any_kind, st.integers(0, 1000))
def test_rows_are_as_full_as_with_exhaustive_search(lengths, seed):
    rows = pack(lengths, BUDGET, seed=seed)
    assert sorted(sum(lengths[index] for index in row) for row in rows) == dumb(lengths)


def test_seeds_pack_differently():
    lengths = [10 + n % 23 for n in range(500)]
    assert pack(lengths, BUDGET, seed=1, window=50) != pack(lengths, BUDGET, seed=2, window=50)


def test_oversized_or_empty_sequence_is_named():
    with pytest.raises(ValueError, match="sequence 1 has length 101, but a row takes 1 to 100"):
        pack([5, 101], BUDGET)
    with pytest.raises(ValueError, match="sequence 0 has length 0"):
        pack([0], BUDGET)


def test_lengths_may_be_an_array():
    lengths = np.array([60, 30, 50])
    assert pack(lengths, BUDGET) == pack(lengths.tolist(), BUDGET)
    assert pack(lengths[:0], BUDGET) == []


def test_rows_are_samples_like_any_others():
    words = ["a" * (1 + n % 9) for n in range(50)]
    packed = PackedDataset(words, pack([len(word) for word in words], 20))
    sampler = ElasticSampler(len(packed), global_batch=4, seed=3)
    steps = -(-len(packed) // 4)
    seen = [row for step in range(1, steps + 1) for row in sampler.indices(step).tolist()][: len(packed)]
    assert sorted(word for row in seen for word in packed[row]) == sorted(words)
