"""Ranks of one replica have its samples and its random numbers, and its loss counts once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.parallel.replicas import RankContext, find_model_parallelism
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks import replicas
from tests.support.ranks.layouts import Net, fake_group, layouts_of
from tests.support.ranks.replicas import BATCH, LAYOUTS, SAMPLES, WORLD, on_four_ranks

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
    return on_four_ranks(session_forks, replicas.rank_results)


@pytest.mark.promise("replica-groups")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_one_replica_share_samples_and_random_numbers(ranks: list[dict[str, Any]], layout: str) -> None:
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
def test_mean_over_replicas_is_the_mean_over_samples(ranks: list[dict[str, Any]], layout: str) -> None:
    losses = replicas.loss_of(ElasticSampler(SAMPLES, global_batch=BATCH, seed=3).global_indices(1)).item()
    assert [rank[layout]["mean"] for rank in ranks] == pytest.approx([losses] * WORLD, rel=1e-6)


@pytest.mark.promise("replica-groups")
def test_invalid_replica_division_is_refused_on_all_ranks(forks: ForkPool) -> None:
    refusals = on_four_ranks(forks, replicas.refused_cases)
    assert [set(refused) for refused in refusals] == [set(refusals[0])] * WORLD
    errors = refusals[0]
    assert "nothing" not in errors
    assert "declare different numbers of replicas: [1, 2]" in errors["ranks differ"]
    assert "2 replicas of equally many ranks" in errors["unequal replicas"]
    assert "found 3 of number 0, 1 of number 1" in errors["unequal replicas"]
    assert "found 2 of number 1, 2 of number 2" in errors["no such replica"]
    assert "4 ranks cannot form 3 replicas" in errors["three of four"]
    assert "run.data_parallel" in errors["no loss"]
    assert "0 of number 0, 0 of number 1" in errors["no replica with a loss"]
    assert "new meshes in each generation" in errors["another rank's mesh"]
    assert "process_group" in errors["no group"]
    assert "go on without virtual_ranks" in errors["exact"]
    assert "2 of number 0, 0 of number 1" in errors["a replica without a loss"]


def alone(rank: int = 0, world: int = 1) -> Run:
    return Run(RankContext(rank=rank, world_size=world), TrainingSession())


def test_data_parallel_is_called_once_before_dependent_calls() -> None:
    run = alone()
    assert run.data_parallel((0, 1)).count == 1
    with pytest.raises(ValueError, match="called twice in this generation"):
        run.data_parallel((0, 1))
    uses: dict[str, Callable[[Run], object]] = {
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


SEEN = {"tp", "fsdp2xtp", "ppxfsdp2", "ppxtp", "dpxtp", "hsdpxtp"}


@pytest.mark.parametrize("name", layouts_of(4))
def test_model_split_over_replica_ranks_is_detected(name: str) -> None:
    layout = layouts_of(4)[name]
    with fake_group(0, (4,)):
        model = layout.lay_out(Net())
        sign = find_model_parallelism([torch.optim.SGD(model.parameters()), [model]], 4)
    assert bool(sign) == (name.removesuffix(" on 4") in SEEN), sign


def test_split_model_without_data_parallel_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    with fake_group(0, (4,)), caplog.at_level(logging.WARNING):
        model = layouts_of(4)["dpxtp on 4"].lay_out(Net())
        alone(0, 4).track(model=model)
        assert ["is split over 2 ranks, but run.data_parallel was not called" in r.message for r in caplog.records] == [
            True
        ]
        alone(1, 4).track(model=model)
        declared = alone(0, 4)
        declared._replicas.is_declared = True
        declared.track(model=model)
    assert len(caplog.records) == 1


def test_sparse_gradients_are_refused_in_exact_mode_only(alone: None) -> None:
    run = Run(RankContext(device=torch.device("cpu"), mesh=lambda: init_device_mesh("cpu", (1,))), TrainingSession())
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True))
    with pytest.raises(TypeError, match=r"0 has sparse gradients, .* exact=False"):
        run.replicate(model)
    replicas = run.replicate(model, exact=False)
    replicas(torch.tensor([1])).sum().backward()
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    assert gradient.is_sparse
