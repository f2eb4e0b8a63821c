"""No sample is skipped or seen twice, whatever the world size and however often it changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from everstep_trainer.data.sampler import ElasticSampler, PackedDataset, pack

seeds = st.integers(0, 2**40)


@pytest.mark.promise("loader-deterministic", "no-sample-lost")
@given(
    st.integers(1, 200), st.integers(1, 16), seeds, st.lists(st.integers(1, 16), min_size=1, max_size=12), st.booleans()
)
def test_sample_sequence_does_not_depend_on_world_size(
    size: int, batch: int, seed: int, worlds: list[int], drop_last: bool
) -> None:
    if drop_last and size < batch:
        return
    alone = ElasticSampler(size, global_batch=batch, seed=seed, drop_last=drop_last)
    for step, world in enumerate(worlds, start=1):
        world = min(world, batch)
        parts = [
            ElasticSampler(size, global_batch=batch, seed=seed, rank=r, world_size=world, drop_last=drop_last).indices(
                step
            )
            for r in range(world)
        ]
        assert torch.cat(parts).tolist() == alone.indices(step).tolist() == alone.global_indices(step).tolist()


@pytest.mark.promise("no-sample-lost")
@given(st.integers(1, 100), st.integers(1, 16), seeds)
def test_each_epoch_sees_every_sample_exactly_once(size: int, batch: int, seed: int) -> None:
    sampler = ElasticSampler(size, global_batch=batch, seed=seed)
    steps = -(-3 * size // batch)
    seen = torch.cat([sampler.indices(step) for step in range(1, steps + 1)]).tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_with_drop_last_an_epoch_ends_at_its_last_whole_batch() -> None:
    sampler = ElasticSampler(10, global_batch=4, seed=5, drop_last=True)
    first = torch.cat([sampler.indices(1), sampler.indices(2)]).tolist()
    assert len(set(first)) == 8
    assert [sampler.epoch(step) for step in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]


@given(st.integers(1, 64), st.integers(1, 16))
def test_shares_are_balanced_and_weights_average_to_one(batch: int, world: int) -> None:
    world = min(world, batch)
    samplers = [ElasticSampler(1000, global_batch=batch, rank=r, world_size=world) for r in range(world)]
    shares = [len(s.indices(1)) for s in samplers]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == batch
    assert sum(s.loss_weight(1) for s in samplers) / world == pytest.approx(1.0, rel=1e-12)
    if batch % world == 0:
        assert [s.loss_weight(1) for s in samplers] == [1.0] * world


@pytest.mark.promise("same-state-other-world-size")
def test_weighted_mean_of_shares_equals_the_sample_mean() -> None:
    losses = torch.rand(1000, dtype=torch.float64)
    samplers = [ElasticSampler(1000, global_batch=32, seed=2, rank=r, world_size=3) for r in range(3)]
    over_ranks = sum(losses[s.indices(4)].mean() * s.loss_weight(4) for s in samplers) / 3
    torch.testing.assert_close(over_ranks, losses[samplers[0].global_indices(4)].mean())


def test_batch_too_small_for_the_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 4, or fewer ranks"):
        ElasticSampler(100, global_batch=3, world_size=4)


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        ElasticSampler(10, global_batch=2).indices(0)


BUDGET = 100
lengths_of_any_kind = st.lists(st.integers(1, BUDGET), max_size=300)


def pack_by_search(lengths: list[int]) -> list[int]:
    """Return how full best fit decreasing makes its rows, by a search of every row for every sequence."""
    rows: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [n for n, filled in enumerate(rows) if filled + length <= BUDGET]
        if fitting:
            rows[max(fitting, key=lambda n: rows[n])] += length
        else:
            rows.append(length)
    return sorted(rows)


@given(lengths_of_any_kind, st.integers(0, 1000), st.integers(1, 400))
def test_every_sequence_is_in_one_row_and_no_row_is_too_long(lengths: list[int], seed: int, window: int) -> None:
    rows = pack(lengths, BUDGET, seed=seed, window=window)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[index] for index in row) <= BUDGET for row in rows)
    assert rows == pack(lengths, BUDGET, seed=seed, window=window)


@given(lengths_of_any_kind, st.integers(0, 1000))
def test_rows_are_as_full_as_with_exhaustive_search(lengths: list[int], seed: int) -> None:
    rows = pack(lengths, BUDGET, seed=seed)
    assert sorted(sum(lengths[index] for index in row) for row in rows) == pack_by_search(lengths)


def test_oversized_or_empty_sequence_is_named() -> None:
    with pytest.raises(ValueError, match="sequence 1 has length 101, but a row takes 1 to 100"):
        pack([5, 101], BUDGET)
    with pytest.raises(ValueError, match="sequence 0 has length 0"):
        pack([0], BUDGET)


def test_rows_are_samples_like_any_others() -> None:
    words = ["a" * (1 + n % 9) for n in range(50)]
    packed = PackedDataset(words, pack([len(word) for word in words], 20))
    sampler = ElasticSampler(len(packed), global_batch=4, seed=3)
    steps = -(-len(packed) // 4)
    seen = [row for step in range(1, steps + 1) for row in sampler.indices(step).tolist()][: len(packed)]
    assert sorted(word for row in seen for word in packed[row]) == sorted(words)
