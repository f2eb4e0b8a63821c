"""Ways to lay a model out over ranks, and ranks that are played without processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer_hooks.replicate import replicate


@contextmanager
def playing(rank: int, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Iterator[DeviceMesh]:
    """This process as ``rank`` of a generation whose collectives do nothing."""
    world = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


WIDTH = 6
HIDDEN = (8, 7, 10, 5)
"""Of each layer: sizes that divide evenly and sizes that do not."""


class Block(nn.Module):
    def __init__(self, hidden: int, *, full: bool) -> None:
        """``full``: with a norm and a bias; to gather each of them takes time."""
        super().__init__()
        if full:
            self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden, bias=full)
        self.down = nn.Linear(hidden, WIDTH, bias=False)


class Net(nn.Module):
    """Layers under the names that they have in the whole model; a stage of a pipeline has some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleDict({str(i): Block(hidden, full=i == 1) for i, hidden in enumerate(HIDDEN)})
        self.register_buffer("constant", torch.arange(5.0))

    def keep(self, layers: range) -> None:
        """Leaves these, as a stage of a pipeline has them."""
        for i in range(len(HIDDEN)):
            if i not in layers and str(i) in self.layers:
                del self.layers[str(i)]


class Layout(msgspec.Struct, frozen=True):
    """How many ways a model is laid out in each dimension of a mesh, in the order in which a mesh has them."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    dims: tuple[str, ...] = ()
    """Dimensions that the mesh has, also where they are of size 1."""
    lost: int = 0
    """So many layers of the model are on no rank."""

    @property
    def world(self) -> int:
        return self.pp * self.replicate * self.shard * self.tp

    def build(self) -> nn.Module:
        """The model on the ranks of the default process group. ``replicate`` without ``shard`` is DDP where nothing
        else is done to the model, and plain copies where it is tensor parallel or in stages."""
        names = self.dims or tuple(d for d in ("pp", "replicate", "shard", "tp") if getattr(self, d) > 1) or ("pp",)
        mesh = init_device_mesh("cpu", tuple(getattr(self, d) for d in names), mesh_dim_names=names)
        net = Net()
        net.keep(range(self.lost, len(HIDDEN)))
        if "pp" in names:
            stage = mesh["pp"].get_local_rank()
            net.keep(range(len(HIDDEN) * stage // self.pp, len(HIDDEN) * (stage + 1) // self.pp))
        if "tp" in names:
            for block in net.layers.values():
                plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
        if "shard" in names:
            over = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
            for block in net.layers.values():
                fully_shard(block, mesh=over)
            return fully_shard(net, mesh=over)
        return replicate(net, exact=True, equal_already=True) if names == ("replicate",) else net


def layouts_of(world: int) -> dict[str, Layout]:
    """All that fit on so many ranks."""
    found = {
        "ddp": Layout(replicate=world),
        "fsdp2": Layout(shard=world),
        "tp": Layout(tp=world),
        "pp": Layout(pp=world),
    }
    if world == 4:
        found |= {
            "hsdp": Layout(replicate=2, shard=2),
            "fsdp2xtp": Layout(shard=2, tp=2),
            "ppxfsdp2": Layout(pp=2, shard=2),
            "ppxtp": Layout(pp=2, tp=2),
            "dpxtp": Layout(replicate=2, tp=2),
            "hsdpxtp": Layout(replicate=1, shard=2, tp=2, dims=("replicate", "shard", "tp")),
        }
    return {f"{name} on {world}": layout for name, layout in found.items()}


class Trained:
    """A model in a layout, with an optimizer whose groups decay differently, and a schedule."""

    def __init__(self, layout: Layout) -> None:
        self.model = layout.build()
        self.module = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        matrices = [p for p in self.module.parameters() if p.ndim > 1]
        vectors = [p for p in self.module.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10_000)
        self.tracked = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self, step: int) -> None:
        """Gradients that are a function of each element: equal on all ranks that hold it, whatever the layout."""
        for parameter in self.module.parameters():
            parameter.grad = torch.sin(parameter.detach() * 3 + step)
        self.optimizer.step()
        self.schedule.step()

    def gathered(self) -> dict[str, np.ndarray]:
        """Everything by name, in full, from all ranks; a collective. Raises AssertionError where two ranks that have
        the same tensor have it differently."""
        mine: dict[str, Any] = {"schedule": np.array(self.schedule.last_epoch), "lr": np.array(self.learning_rates())}
        for name, parameter in self.module.named_parameters():
            mine[name] = _full(parameter)
            for key, moment in self.optimizer.state[parameter].items():
                mine[f"{name}.{key}"] = _full(moment)
            (group,) = [g for g in self.optimizer.param_groups if any(parameter is p for p in g["params"])]
            mine[f"{name}.decay"] = np.array(group["weight_decay"])
        everyones: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        whole: dict[str, np.ndarray] = {}
        for theirs in everyones:
            for name, array in theirs.items():
                assert np.array_equal(whole.setdefault(name, array), array), f"two ranks differ in {name}"
        return whole

    def learning_rates(self) -> list[float]:
        return sorted({float(group["lr"]) for group in self.optimizer.param_groups})


def _full(tensor: torch.Tensor) -> np.ndarray:
    whole = tensor.detach()
    return (whole.full_tensor() if isinstance(whole, DTensor) else whole).clone().numpy()
