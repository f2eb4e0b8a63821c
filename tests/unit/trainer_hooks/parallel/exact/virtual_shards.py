"""Models that fully_shard splits in several ways, trained for a few steps in exact mode by any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from tests.support.ranks.exact_training import WIDTH, fingerprint

SAMPLES, BATCH, STEPS, VIRTUAL = 60, 11, 2, 5
HYBRID = {4: (2, 2), 3: (3, 1), 1: (1, 1)}
HIDDEN = 36
"""Divisible by two, three and four. The last layer's single row lies on one rank."""

Build = Callable[[DeviceMesh, DeviceMesh], nn.Module]


class Net(nn.Module):
    """A model that calls ``middle`` several ``times`` and never uses ``idle``."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.last = nn.Linear(HIDDEN, 1)
        self.idle = nn.Linear(7, 5)
        self.times = times

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.first(x)), 0.2, training=True)
        for _ in range(self.times):
            hidden = torch.tanh(self.norm(self.middle(hidden)))
        out: torch.Tensor = self.last(hidden)
        return out


def sharded(model: Net, mesh: DeviceMesh, **options: Any) -> Net:
    for layer in (model.first, model.middle, model.last):
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def one_layer(flat: DeviceMesh, hybrid: DeviceMesh) -> Net:
    model = Net()
    fully_shard(model.middle, mesh=flat)
    return model


def columns(parameter: nn.Parameter) -> Shard:
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] == HIDDEN else Shard(0)


HALF, FULL = torch.bfloat16, torch.float32
LAYOUTS: dict[str, Build] = {
    "shards": lambda flat, hybrid: sharded(Net(), flat),
    "replicas of shards": lambda flat, hybrid: sharded(Net(), hybrid),
    "one layer": one_layer,
    "columns of bfloat16, added in float32, called twice": lambda flat, hybrid: sharded(
        Net(times=2).bfloat16(), flat, shard_placement_fn=columns, mp_policy=MixedPrecisionPolicy(reduce_dtype=FULL)
    ),
    "computed and sent in bfloat16": lambda flat, hybrid: sharded(
        Net(), hybrid, mp_policy=MixedPrecisionPolicy(param_dtype=HALF)
    ),
}
WORLDS = {
    "replicas of shards": (4, 1),
    "one layer": (3, 1),
    "columns of bfloat16, added in float32, called twice": (3, 1),
    "computed and sent in bfloat16": (4, 1),
}
"""Numbers of ranks with which a layout is tested, if not with all."""


@contextmanager
def grouped(rank: int, world: int, port: int) -> Any:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=PrefixStore(f"{world}", store), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def new_run(rank: int, world: int) -> Run:
    mesh = lambda: init_device_mesh("cpu", (world,))  # noqa: E731 - as short as it gets
    return Run(RankContext(rank=rank, world_size=world, mesh=mesh), TrainingSession())


def trained_in_layouts(rank: int, world: int, port: int) -> dict[str, list[str]]:
    """Train each layout for this number of ranks, and return the results of each step. Runs in its own process."""
    with grouped(rank, world, port):
        flat = init_device_mesh("cpu", (world,))
        hybrid = init_device_mesh("cpu", HYBRID[world], mesh_dim_names=("replicate", "shard"))
        results = {}
        for name, build in LAYOUTS.items():
            if world not in WORLDS.get(name, HYBRID):
                continue
            torch.manual_seed(5)
            results[name] = trained(new_run(rank, world), build(flat, hybrid))
        return results


def trained_without_shards() -> list[str]:
    """Return the same results of a model without shards and without a process group, in this process."""
    torch.manual_seed(5)
    return trained(Run(RankContext(), TrainingSession()), Net())


def trained(run: Run, model: nn.Module) -> list[str]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    inputs = inputs.to(next(model.parameters()).dtype)
    run.replicate(model, virtual_ranks=VIRTUAL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sampler = run.sampler(SAMPLES, global_batch=BATCH, seed=2)
    results = []
    for step in run.steps(until=STEPS, seed=3):
        losses, seen = [], []
        for part in run.parts(sampler, step):
            loss = model(inputs[part.indices]).float().square().mean() * part.loss_weight
            loss.backward()
            losses.append(loss)
            seen += [] if part.is_repeat else [part.rank]
        assert seen == [*range(run.rank, VIRTUAL, run.world_size)]
        norm = run.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        state = [*model.parameters(), *(moment for state in optimizer.state.values() for moment in state.values())]
        results.append(f"{float(run.mean(losses)).hex()} {float(norm).hex()} {fingerprint(map(full_tensor, state))}")
    torch.set_num_threads(threads)
    return results


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().float() if full.dtype == torch.bfloat16 else full.detach()


def in_shards(model: nn.Module, **options: Any) -> nn.Module:
    fully_shard(model, **options)
    return model


def refused_cases(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the error message of each unsupported case. Runs in its own process."""
    with grouped(rank, world, port):
        flat = init_device_mesh("cpu", (world,))
        square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        cases: dict[str, Callable[[], object]] = {
            "tensor parallel": lambda: replicate(tensor_parallel(square["tp"])),
            "tensor parallel in shards": lambda: replicate(in_shards(tensor_parallel(square["tp"]), mesh=square["dp"])),
            "a part of the ranks": lambda: replicate(in_shards(nn.Linear(2, 2), mesh=square["dp"])),
            "a divide factor": lambda: replicate(divided(fully_shard(nn.Linear(2, 2), mesh=flat))),
            "a narrow parameter": lambda: replicate(
                in_shards(nn.Linear(2, 2).bfloat16(), mesh=flat, mp_policy=MixedPrecisionPolicy(param_dtype=FULL))
            ),
            "fused": lambda: track(flat, lambda p: torch.optim.AdamW(p, fused=True)),
            "Adafactor": lambda: track(flat, torch.optim.Adafactor),
        }
        errors = {}

        def replicate(model: nn.Module) -> nn.Module:
            return new_run(rank, world).replicate(model, virtual_ranks=8)

        def track(mesh: DeviceMesh, optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]) -> None:
            run, model = new_run(rank, world), in_shards(nn.Linear(2, 2), mesh=mesh)
            run.replicate(model, virtual_ranks=8)
            run.track(model=model, optimizers=[optimizer(model.parameters())])

        for case, call in cases.items():
            try:
                call()
            except (TypeError, ValueError) as error:
                errors[case] = str(error)
        return errors


def tensor_parallel(mesh: DeviceMesh) -> nn.Linear:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
    return layer


def divided(module: Any) -> nn.Module:
    module.set_gradient_divide_factor(2.0)
    model: nn.Module = module
    return model
