"""Layouts of a model over ranks, a trained model in a layout, and ranks without processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
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
from torch.distributed.tensor.placement_types import Placement
from torch.optim.adamw import adamw
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep_trainer.parallel.ordered_gradients import replicate


@contextmanager
def fake_group(rank: int, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Iterator[DeviceMesh]:
    """Make this process ``rank`` of a generation whose collectives do nothing."""
    world = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


WIDTH = 6
HIDDEN = (8, 7, 10, 5)
"""Hidden sizes of the layers: some divide evenly, some do not."""


class Block(nn.Module):
    def __init__(self, width: int, hidden: int, *, full: bool) -> None:
        """``full``: with a norm and a bias, each of which takes time to gather."""
        super().__init__()
        if full:
            self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=full)
        self.down = nn.Linear(hidden, width, bias=False)


class Net(nn.Module):
    """Layers under their names in the whole model. A pipeline stage has some of them."""

    def __init__(self, width: int = WIDTH, hidden: tuple[int, ...] = HIDDEN) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.ModuleDict({str(i): Block(width, size, full=i == 1) for i, size in enumerate(hidden)})
        self.register_buffer("constant", torch.arange(5.0))

    def keep(self, layers: range) -> None:
        """Keep only these layers, as in a pipeline stage."""
        for name in list(self.layers):
            if int(name) not in layers:
                del self.layers[name]


class Layout(msgspec.Struct, frozen=True):
    """The size of a layout in each dimension of a mesh, in the order of the mesh."""

    pp: int = 1
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    dims: tuple[str, ...] = ()
    """Dimensions of the mesh, including those of size 1."""
    lost: int = 0
    """Number of layers that are on no rank."""
    width: int = WIDTH
    hidden: tuple[int, ...] = HIDDEN

    def net(self) -> Net:
        """Return the model before it is laid out."""
        return Net(self.width, self.hidden)

    @property
    def world(self) -> int:
        return self.pp * self.replicate * self.shard * self.tp

    def lay_out(self, net: Net) -> nn.Module:
        """Return the model on the ranks of the default process group.

        ``replicate`` without ``shard`` is DDP if the layout has no other dimension. Tensor-parallel parts and pipeline
        stages are copied without DDP.
        """
        names = self.dims or tuple(d for d in ("pp", "replicate", "shard", "tp") if getattr(self, d) > 1) or ("pp",)
        mesh = init_device_mesh("cpu", tuple(getattr(self, d) for d in names), mesh_dim_names=names)
        net.keep(range(self.lost, len(self.hidden)))
        if "pp" in names:
            stage = mesh["pp"].get_local_rank()
            net.keep(range(len(self.hidden) * stage // self.pp, len(self.hidden) * (stage + 1) // self.pp))
        if "tp" in names:
            for block in net.layers.values():
                plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(block, mesh["tp"], plan, src_data_rank=None)
        if "shard" in names:
            over = mesh["replicate", "shard"] if "replicate" in names else mesh["shard"]
            for block in net.layers.values():
                fully_shard(block, mesh=over)
            fully_shard(net, mesh=over)
            return net
        return replicate(net, exact=True, equal_already=True) if names == ("replicate",) else net


def layouts_of(world: int) -> dict[str, Layout]:
    """Return all layouts for ``world`` ranks."""
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


class LocalAdamW(torch.optim.AdamW):
    """AdamW with an update of this rank's elements alone.

    DTensor plans each operation for each shape and mesh, so the first step of a layout would take longer than the rest
    of a generation.
    """

    @torch.no_grad()
    def step(self, closure: None = None, *, gradient: Any = torch.zeros_like) -> None:  # type: ignore[override]
        """Update all parameters. ``gradient``: a function from values of elements to their gradients.

        torch.distributed.checkpoint creates the optimizer's state by a step without arguments.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(group, parameter, gradient(local(parameter)))

    def _update(self, group: dict[str, Any], parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state |= {moment: torch.zeros_like(parameter) for moment in ("exp_avg", "exp_avg_sq")}
        adamw(
            [local(parameter)],
            [gradient],
            [local(state["exp_avg"])],
            [local(state["exp_avg_sq"])],
            [],
            [state["step"]],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class Trained:
    """A model in a layout, with a schedule and an optimizer whose groups have different weight decay."""

    def __init__(self, layout: Layout) -> None:
        net = layout.net()
        whole = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in whole.items()}
        number_elements(net)
        self.model = layout.lay_out(net)
        self.module = self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model
        self.places: dict[str, torch.Tensor] = {}
        """Flat positions in the whole parameter of the elements on this rank."""
        for name, parameter in self.module.named_parameters():
            mine = local(parameter)
            self.places[name] = mine.long()
            mine.copy_(whole[name].take(self.places[name]))
        matrices = [p for p in self.module.parameters() if p.ndim > 1]
        vectors = [p for p in self.module.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = LocalAdamW([group for group in groups if group["params"]], lr=0.01)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=10_000)
        self.tracked = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def step(self, step: int) -> None:
        """Step with gradients that are a function of each element, equal on all ranks in any layout."""
        self.optimizer.step(gradient=lambda values: torch.sin(values * 3 + step))
        self.schedule.step()

    def gathered(self) -> dict[str, np.ndarray]:
        """Gather all full arrays by name from all ranks in one collective. Raises AssertionError like ``merged``."""
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, [*self.pieces()])
        return merged(itertools.chain.from_iterable(gathered))

    def pieces(self) -> Iterator[Piece]:
        """Yield this rank's pieces."""
        yield equal_on_all("schedule", self.schedule.last_epoch)
        yield equal_on_all("lr", *self.learning_rates())
        decays = {id(p): group["weight_decay"] for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.module.named_parameters():
            yield equal_on_all(f"{name}.decay", decays[id(parameter)])
            for key, moment in {"": parameter, **self.optimizer.state[parameter]}.items():
                if moment.ndim == 0:
                    yield equal_on_all(f"{name}.{key}", moment.item())
                    continue
                assert placements(moment) == placements(parameter), f"{key} of {name} is laid out otherwise"
                values = local(moment).numpy()
                yield f"{name}.{key}", self.shapes[name], self.places[name].numpy().reshape(-1), values.reshape(-1)

    def learning_rates(self) -> list[float]:
        return sorted({float(group["lr"]) for group in self.optimizer.param_groups})


Piece = tuple[str, tuple[int, ...], np.ndarray, np.ndarray]
"""A part of an array: its name, its full shape, and the flat positions and values of some elements."""


def merged(pieces: Iterable[Piece]) -> dict[str, np.ndarray]:
    """Return all full arrays by name.

    Raises:
        AssertionError: Two ranks have different values of an element, or no rank has the element.
    """
    whole: dict[str, np.ndarray] = {}
    missing: dict[str, np.ndarray] = {}
    for name, shape, places, values in pieces:
        array = whole.setdefault(name, np.empty(shape, values.dtype)).reshape(-1)
        new = missing.setdefault(name, np.ones(array.size, bool))
        assert np.array_equal(array[places][~new[places]], values[~new[places]]), f"two ranks differ in {name}"
        array[places], new[places] = values, False
    assert not (gone := [name for name, new in missing.items() if new.any()]), f"no rank has all of {gone}"
    return whole


def equal_on_all(name: str, *values: float) -> Piece:
    """Return a piece that every rank has in full."""
    return name, (len(values),), np.arange(len(values)), np.array(values)


def number_elements(net: Net) -> None:
    """Set every element to its flat position.

    After the layout the elements show their positions on each rank. DTensor.full_tensor would need one collective for
    each tensor, which would take most of the time of a test.
    """
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.arange(float(parameter.numel())).view_as(parameter))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements, for reading and writing."""
    whole = tensor.detach()
    return whole.to_local() if isinstance(whole, DTensor) else whole


def placements(tensor: torch.Tensor) -> tuple[Placement, ...]:
    return tensor.placements if isinstance(tensor, DTensor) else ()
