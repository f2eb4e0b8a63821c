"""Ranks that declare their replica of a model, and their results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from everstep_trainer.parallel.replicas import RankContext, ReplicaAssignment
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession

WORLD, SAMPLES, BATCH = 4, 50, 5

LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[str, ...], tuple[str, ...]]] = {
    "dp x tp": ((2, 2), ("dp", "tp"), ("dp",)),
    "tp x dp": ((2, 2), ("tp", "dp"), ("dp",)),
    "pp x dp": ((2, 2), ("pp", "dp"), ("dp",)),
    "hsdp": ((2, 2), ("replicate", "shard"), ("replicate", "shard")),
    "hsdp x tp": ((2, 1, 2), ("replicate", "shard", "tp"), ("replicate", "shard")),
    "tp": ((4,), ("tp",), ()),
    "dp": ((4,), ("dp",), ("dp",)),
}
"""Shape and names of each mesh, and its data-parallel dimensions."""


def on_four_ranks(forks: Any, function: Any) -> list[dict[str, Any]]:
    """Call ``function(rank, port)`` in a process for each of four ranks, and return the results."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forks.start(function, rank, store.port) for rank in range(WORLD)]
    return [rank.result() for rank in ranks]


@contextmanager
def grouped(rank: int, port: int) -> Iterator[None]:
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    try:
        yield
    finally:
        dist.destroy_process_group()


def new_run(rank: int) -> Run:
    mesh = lambda: init_device_mesh("cpu", (WORLD,))  # noqa: E731 - as short as it gets
    return Run(RankContext(rank=rank, world_size=WORLD, mesh=mesh), TrainingSession())


def declare_layout(run: Run, layout: str) -> DeviceMesh:
    shape, names, of_data = LAYOUTS[layout]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    run.data_parallel(mesh[of_data] if of_data else (0, 1), stage=mesh["pp"] if "pp" in names else 0)
    return mesh


def rank_results(rank: int, port: int) -> dict[str, Any]:
    """Return one rank's samples, random numbers and mean loss in each layout. Runs in its own process."""
    results = {}
    with grouped(rank, port):
        for layout in LAYOUTS:
            run = new_run(rank)
            mesh = declare_layout(run, layout)
            sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=3)
            (part,) = run.parts(sampler, 1)
            mapped = run.loader([*range(SAMPLES)], global_batch=BATCH, seed=3, collate_fn=list)
            streamed = run.loader(iter(range(SAMPLES)), global_batch=BATCH)
            loss = loss_of(sampler.indices(1))
            last = "pp" not in LAYOUTS[layout][1] or mesh["pp"].get_local_rank() == 1
            results[layout] = {
                "replica": part.rank,
                "samples": sampler.indices(1).tolist(),
                "loaded": mapped.batch(1),
                "streamed": streamed.indices(1).tolist(),
                "drawn": [torch.rand(1).item() for _ in run.steps(until=3, seed=3)],
                "mean": run.mean(loss if last else None, sampler.loss_weight(1)).item(),
            }
    return results


def loss_of(samples: torch.Tensor) -> torch.Tensor:
    return (samples.float() / 7).square().mean()


def refused_cases(rank: int, port: int) -> dict[str, str]:
    """Return the error message of each unsupported case, which all ranks raise. Runs in its own process."""
    errors = {}
    with grouped(rank, port):
        one_dimension = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
        cases: dict[str, Callable[[], object]] = {
            "ranks differ": lambda: new_run(rank).data_parallel((0, 1 if rank else 2)),
            "unequal replicas": lambda: new_run(rank).data_parallel((int(rank == 3), 2)),
            "no such replica": lambda: new_run(rank).data_parallel((rank // 2 + 1, 2)),
            "three of four": lambda: new_run(rank).data_parallel((rank % 3, 3)),
            "no loss": lambda: new_run(rank).mean(None),
            "a replica without a loss": lambda: mean_over_two(rank, torch.ones(()) if rank < 2 else None),
            "no replica with a loss": lambda: mean_over_two(rank, None),
            "another rank's mesh": lambda: new_run(rank).data_parallel(mesh_of_next_rank(rank)),
            "no group": lambda: pairs(rank).replicate(torch.nn.Linear(1, 1)),
            "exact": lambda: pairs(rank).replicate(torch.nn.Linear(1, 1), virtual_ranks=8),
            "nothing": lambda: new_run(rank).data_parallel(one_dimension),
        }
        for case, call in cases.items():
            try:
                call()
            except ValueError as error:
                errors[case] = str(error)
    return errors


def pairs(rank: int) -> Run:
    """Return a run with two replicas of two neighbouring ranks each."""
    run = new_run(rank)
    run.data_parallel((rank // 2, 2))
    return run


def mean_over_two(rank: int, value: torch.Tensor | None) -> torch.Tensor:
    parallel = ReplicaAssignment(rank, WORLD, torch.device("cpu"))
    parallel.declare((rank // 2, 2), 0)
    return parallel.mean(value, 1.0)


def mesh_of_next_rank(rank: int) -> DeviceMesh:
    """Return a stale mesh from a generation in which this process was another rank."""
    mesh = init_device_mesh("cpu", (WORLD,))
    mesh._coordinate_on_dim = ((rank + 1) % WORLD,)
    return mesh
