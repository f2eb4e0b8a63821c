"""No sample is skipped or seen twice, whatever the world size and however often it changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from everstep_trainer.data.sampler import ElasticSampler, Permutation
from hypothesis import given
from hypothesis import strategies as st

sizes = st.integers(1, 3000)
seeds = st.integers(0, 2**40)


@given(sizes, seeds, st.integers(0, 50))
def test_a_permutation_visits_every_sample_once(size, seed, epoch):
    order = Permutation(size, seed, epoch)(np.arange(size, dtype=np.uint64))
    assert sorted(order.tolist()) == list(range(size))


@given(st.integers(16, 3000), seeds)
def test_epochs_and_seeds_have_distinct_orders(size, seed):
    positions = np.arange(size, dtype=np.uint64)
    orders = {tuple(Permutation(size, s, e)(positions)) for s in (seed, seed + 1) for e in (0, 1)}
    assert len(orders) == 4


def test_a_sample_follows_any_other_about_equally_often():
    followers = np.zeros((8, 8))
    for epoch in range(4000):
        order = Permutation(8, 1, epoch)(np.arange(8, dtype=np.uint64)).astype(int)
        followers[order[:-1], order[1:]] += 1
    expected = 4000 * 7 / 56
    off_diagonal = followers[~np.eye(8, dtype=bool)]
    assert np.abs(off_diagonal - expected).max() < 6 * np.sqrt(expected)


def test_a_data_set_of_a_billion_samples_needs_no_memory():
    sampler = ElasticSampler(10**9, global_batch=64, seed=3)
    assert len(set(sampler.indices(12_345_678).tolist())) == 64


@pytest.mark.promise("loader-deterministic", "no-sample-lost")
@given(
    st.integers(1, 200), st.integers(1, 16), seeds, st.lists(st.integers(1, 16), min_size=1, max_size=12), st.booleans()
)
def test_sample_sequence_does_not_depend_on_world_size(size, batch, seed, worlds, drop_last):
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
def test_each_epoch_sees_every_sample_exactly_once(size, batch, seed):
    sampler = ElasticSampler(size, global_batch=batch, seed=seed)
    steps = -(-3 * size // batch)
    seen = torch.cat([sampler.indices(step) for step in range(1, steps + 1)]).tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_with_drop_last_an_epoch_ends_at_its_last_whole_batch():
    sampler = ElasticSampler(10, global_batch=4, seed=5, drop_last=True)
    first = torch.cat([sampler.indices(1), sampler.indices(2)]).tolist()
    assert len(set(first)) == 8
    assert [sampler.epoch(step) for step in (1, 2, 3, 4, 5)] == [0, 0, 1, 1, 2]


@given(st.integers(1, 64), st.integers(1, 16))
def test_shares_are_balanced_and_weights_average_to_one(batch, world):
    world = min(world, batch)
    samplers = [ElasticSampler(1000, global_batch=batch, rank=r, world_size=world) for r in range(world)]
    shares = [len(s.indices(1)) for s in samplers]
    assert max(shares) - min(shares) <= 1
    assert sum(shares) == batch
    assert sum(s.loss_weight(1) for s in samplers) / world == pytest.approx(1.0, rel=1e-12)
    if batch % world == 0:
        assert [s.loss_weight(1) for s in samplers] == [1.0] * world


@pytest.mark.promise("same-state-other-world-size")
def test_weighted_mean_of_shares_equals_the_sample_mean():
    losses = torch.rand(1000, dtype=torch.float64)
    samplers = [ElasticSampler(1000, global_batch=32, seed=2, rank=r, world_size=3) for r in range(3)]
    over_ranks = sum(losses[s.indices(4)].mean() * s.loss_weight(4) for s in samplers) / 3
    torch.testing.assert_close(over_ranks, losses[samplers[0].global_indices(4)].mean())


def test_batch_too_small_for_the_ranks_is_refused():
    with pytest.raises(ValueError, match="at least 4, or fewer ranks"):
        ElasticSampler(100, global_batch=3, world_size=4)


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="count from 1"):
        ElasticSampler(10, global_batch=2).indices(0)
