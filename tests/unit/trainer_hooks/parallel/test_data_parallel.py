"""Ranks of one replica have its samples and its random numbers, and its loss counts once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from everstep_trainer.data.rng import stream_seed
from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.parallel.replicas import RankContext, ReplicaAssignment, find_model_parallelism
from everstep_trainer.run import Run
from everstep_trainer.runtime.generation_session import TrainingSession
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.support import replicas
from tests.support.layouts import Net, layouts_of, playing
from tests.support.replicas import BATCH, LAYOUTS, SAMPLES, WORLD, on_four_ranks

REPLICAS = {
    "dp x tp": [0, 0, 1, 1],
    "tp x dp": [0, 1, 0, 1],
    "pp x dp": [0, 1, 0, 1],
    "hsdp": [0, 1, 2, 3],
    "hsdp x tp": [0, 0, 1, 1],
    "tp": [0, 0, 0, 0],
    "dp": [0, 1, 2, 3],
}


@pytest.fixture(scope="module")
def ranks(session_forks: Any) -> list[dict[str, Any]]:
    return on_four_ranks(session_forks, replicas.what_a_rank_has)


@pytest.mark.promise("replica-groups")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_one_replica_share_samples_and_random_numbers(ranks, layout):
    of_layout = [rank[layout] for rank in ranks]
    assert [rank["replica"] for rank in of_layout] == REPLICAS[layout]
    count = len(set(REPLICAS[layout]))
    sampler = ElasticSampler(SAMPLES, global_batch=BATCH, seed=3)
    for rank in of_layout:
        assert rank["samples"] == rank["loaded"] == sampler.for_rank(rank["replica"], count).indices(1).tolist()
        start, end = sampler.for_rank(rank["replica"], count).batch_range()
        assert rank["streamed"] == [*range(start, end)]
    seen = {rank["replica"]: rank["samples"] for rank in of_layout}
    assert [i for replica in range(count) for i in seen[replica]] == sampler.global_indices(1).tolist()
    stages = [rank // 2 if "pp" in layout else 0 for rank in range(WORLD)]
    streams = {(rank["replica"], stage): rank["drawn"] for rank, stage in zip(of_layout, stages, strict=True)}
    assert all(rank["drawn"] == streams[rank["replica"], s] for rank, s in zip(of_layout, stages, strict=True))
    values = [value for drawn in streams.values() for value in drawn]
    assert len(set(values)) == len(values), "replicas, stages and steps have streams of their own"


@pytest.mark.promise("replica-groups")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_mean_over_replicas_is_the_mean_over_samples(ranks, layout):
    losses = replicas.loss_of(ElasticSampler(SAMPLES, global_batch=BATCH, seed=3).global_indices(1)).item()
    assert [rank[layout]["mean"] for rank in ranks] == pytest.approx([losses] * WORLD, rel=1e-6)


@pytest.mark.promise("replica-groups")
def test_invalid_replica_division_is_refused_on_all_ranks(forks):
    refusals = on_four_ranks(forks, replicas.what_is_refused)
    assert [set(refused) for refused in refusals] == [set(refusals[0])] * WORLD
    said = refusals[0]
    assert "nothing" not in said
    assert "declare different numbers of replicas: [1, 2]" in said["ranks differ"]
    assert "2 replicas of equally many ranks" in said["unequal replicas"]
    assert "found 3 of number 0, 1 of number 1" in said["unequal replicas"]
    assert "found 2 of number 1, 2 of number 2" in said["no such replica"]
    assert "4 ranks cannot form 3 replicas" in said["three of four"]
    assert "run.data_parallel" in said["no loss"]
    assert "0 of number 0, 0 of number 1" in said["no replica with a loss"]
    assert "new meshes in each generation" in said["another rank's mesh"]
    assert "process_group" in said["no group"]
    assert "go on without virtual_ranks" in said["exact"]
    assert "2 of number 0, 0 of number 1" in said["a replica without a loss"]


def test_gradients_add_over_replicas_and_not_over_stages(forks):
    said = [rank["gradient"] for rank in on_four_ranks(forks, replicas.gradients_of_stages)]
    assert said == [1.5, 1.5, 3.5, 3.5]


def alone(rank: int = 0, world: int = 1) -> Run:
    return Run(RankContext(rank=rank, world_size=world), TrainingSession())


def test_data_parallel_is_called_once_before_dependent_calls():
    run = alone()
    assert run.data_parallel((0, 1)).count == 1
    with pytest.raises(ValueError, match="called twice in this generation"):
        run.data_parallel((0, 1))
    uses = {
        "run.sampler": lambda run: run.sampler(10, global_batch=2),
        "run.loader": lambda run: run.loader(iter([1, 2]), global_batch=2),
        "run.steps": lambda run: next(run.steps(until=1)),
        "run.track": lambda run: run.track(model=torch.nn.Linear(1, 1)),
        "run.mean": lambda run: run.mean(torch.ones(())),
        "run.replicate": lambda run: run.replicate(torch.nn.Linear(1, 1), virtual_ranks=2),
    }
    for name, use in uses.items():
        run = alone()
        use(run)
        with pytest.raises(ValueError, match=f"{name} was already called assuming one replica per rank"):
            run.data_parallel((0, 1))


@given(st.integers(0, 2**40), st.integers(1, 10**6))
def test_stages_and_replicas_draw_from_separate_streams(seed, step):
    streams = {stream_seed(seed, step, replica, stage) for replica in range(12) for stage in range(12)}
    assert len(streams) == 144
    assert stream_seed(seed, step, 3) == stream_seed(seed, step, 3, 0)


SEEN = {"tp", "fsdp2xtp", "ppxfsdp2", "ppxtp", "dpxtp", "hsdpxtp"}


@pytest.mark.parametrize("name", layouts_of(4))
def test_model_split_over_replica_ranks_is_detected(name):
    layout = layouts_of(4)[name]
    with playing(0, (4,)):
        model = layout.lay_out(Net())
        sign = find_model_parallelism([torch.optim.SGD(model.parameters()), [model]], 4)
    assert bool(sign) == (name.removesuffix(" on 4") in SEEN), sign


def test_split_model_without_data_parallel_warns_once(caplog):
    with playing(0, (4,)), caplog.at_level(logging.WARNING):
        model = layouts_of(4)["dpxtp on 4"].lay_out(Net())
        alone(0, 4).track(model=model)
        assert ["is split over 2 ranks, but run.data_parallel was not called" in r.message for r in caplog.records] == [
            True
        ]
        alone(1, 4).track(model=model)
        said = alone(0, 4)
        said._replicas.is_declared = True
        said.track(model=model)
    assert len(caplog.records) == 1


def test_a_mean_of_one_replica_keeps_the_dtype_and_the_shape():
    parallel = ReplicaAssignment(0, 1, None)
    value = torch.tensor([[1.5, 2.0]], dtype=torch.bfloat16)
    assert torch.equal(parallel.mean(value, 2.0), value * 2)


def test_single_rank_group_still_uses_a_replica(alone: None):
    device = torch.device("cpu")
    place = RankContext(device=device, mesh=lambda: init_device_mesh("cpu", (1,)))
    model = Run(place, TrainingSession()).replicate(nn.Linear(2, 1))
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    model(torch.ones(3, 2)).sum().backward()
    assert model.module.weight.grad.tolist() == [[4.0, 4.0]]


def test_sparse_gradients_are_refused_in_exact_mode_only(alone: None):
    run = Run(RankContext(device=torch.device("cpu"), mesh=lambda: init_device_mesh("cpu", (1,))), TrainingSession())
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(TypeError, match=r"0 has sparse gradients, .* exact=False"):
        run.replicate(model)
    replicas = run.replicate(model, exact=False)
    replicas(torch.tensor([1])).sum().backward()
    assert model[0].weight.grad.is_sparse
