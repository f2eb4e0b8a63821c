"""Optimizer state that a fresh process allocates lies where the optimizer would have allocated it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from everstep.layout.manifests import TensorInfo, TensorPlacement
from everstep_trainer.slots.shares import build_manifest, divide_state
from everstep_trainer.state.optimizer_state import allocate_moment, location_of
from everstep_trainer.state.python_state import MergedState, decode
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.sharing_optimizer import SharingOptimizer
from tests.unit.trainer_hooks.state.snapshots.test_snapshot_state import load

Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "AdamW": torch.optim.AdamW,
    "AdamW, amsgrad": lambda of: torch.optim.AdamW(of, amsgrad=True),
    "SGD": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "Adagrad": torch.optim.Adagrad,
}


class Scaled(nn.Module):
    """A model with a parameter that is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8))
        self.scale = nn.Parameter(torch.tensor(2.0))


@pytest.fixture(scope="module")
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def sharded_model() -> Scaled:
    mesh, model = init_device_mesh("cpu", (1,)), Scaled()
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    model.scale = nn.Parameter(distribute_tensor(model.scale.detach(), mesh, [Replicate()]))
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.promise("tracked-state-exact")
@pytest.mark.parametrize("tells", [True, False], ids=["of this release", "of one before"])
@pytest.mark.parametrize("build", [Scaled, sharded_model])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fresh_process_continues_with_a_scalar_parameter(
    process_group: None, name: str, build: Callable[[], Scaled], tells: bool
) -> None:
    model = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    step(model, optimizer)
    state = TrackedState({"model": model, "optimizer": optimizer})
    live = {tensor.name: tensor.local for tensor in state.tensors()}
    layouts = [state.layout(state.tensors(), 0, 1)]
    catalog = build_manifest(0, layouts, divide_state(layouts, ["n1"], 1)[0], 1000).catalog
    if not tells:
        catalog = tuple(msgspec.structs.replace(tensor, placement=TensorPlacement.UNKNOWN) for tensor in catalog)
    fresh = build()
    other = OPTIMIZERS[name](fresh.parameters())
    restored = TrackedState({"model": fresh, "optimizer": other})
    for index, target in restored.restore_targets(catalog):
        target.local.copy_(live[catalog[index].name])
    restored.load_python(MergedState([decode(state.capture().data())], restored.python_names()))
    for first, second in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert not tells or [(k, type(v)) for k, v in first.items()] == [(k, type(second[k])) for k in first]
    step(model, optimizer)
    step(fresh, other)
    for first, second in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(full(first), full(second))


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("lies", "key", "shape", "capturable", "device"),
    [
        (TensorPlacement.HOST, "step", (), False, "cpu"),
        (TensorPlacement.DEVICE, "step", (), True, "cuda"),
        (TensorPlacement.DEVICE, "exp_avg", (), False, "cuda"),
        (TensorPlacement.HOST, "mu_product", (), False, "cpu"),
        (TensorPlacement.DEVICE, "eta", (), False, "cuda"),
        (TensorPlacement.UNKNOWN, "step", (), False, "cpu"),
        (TensorPlacement.UNKNOWN, "step", (), True, "cuda"),
        (TensorPlacement.UNKNOWN, "exp_avg", (), False, "cuda"),
        (TensorPlacement.UNKNOWN, "row", (3,), False, "cuda"),
    ],
)
def test_state_of_a_scalar_returns_to_gpu_or_host(
    lies: TensorPlacement, key: str, shape: tuple[int, ...], capturable: bool, device: str
) -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.empty((), device="cuda"))
        stored = TensorInfo(f"o.p.{key}", "float32", 4, shape, False, placement=lies)
        made = allocate_moment(parameter, key, stored, capturable)
        assert (made.device.type, tuple(made.shape), made.dtype) == (device, shape, torch.float32)
        if lies is not TensorPlacement.UNKNOWN:
            assert location_of(parameter, made) is lies


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, fresh: nn.Module) -> torch.optim.Optimizer:
    """Return a new optimizer of ``fresh``, with the state of the optimizer that trained ``model``."""
    state = TrackedState({"model": model, "optimizer": optimizer})
    tensors = state.tensors()
    live = {tensor.name: tensor.local for tensor in tensors}
    layouts = [state.layout(tensors, 0, 1)]
    catalog = build_manifest(0, layouts, divide_state(layouts, ["n1"], 1)[0], 1000).catalog
    other = type(optimizer)(fresh.parameters())  # type: ignore[call-arg]
    restored = TrackedState({"model": fresh, "optimizer": other})
    with torch.no_grad():
        for index, target in restored.restore_targets(catalog):
            target.local.copy_(live[catalog[index].name])
    return other


@pytest.mark.promise("tracked-state-exact")
def test_shared_optimizer_state_stays_shared() -> None:
    model, fresh = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = SharingOptimizer(model.parameters())
    optimizer.step()
    other = restore_optimizer(model, optimizer, fresh)
    first, second = (other.state[parameter] for parameter in fresh.parameters())
    assert first["step"] is second["step"]
    assert first["anchor"].data_ptr() == fresh.weight.data_ptr()
    assert first["average"] is not second["average"]
    for _ in range(3):
        optimizer.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("layout", [sharded_model, Scaled])
def test_plain_state_of_a_sharded_parameter_stays_plain(process_group: None, layout: Callable[[], nn.Module]) -> None:
    model, fresh = sharded_model(), layout()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"anchor": torch.arange(64.0).reshape(8, 8), "row": torch.ones(8)}
    (state,) = restore_optimizer(model, optimizer, fresh).state.values()
    assert [type(value) for value in state.values()] == [torch.Tensor, torch.Tensor]
    assert torch.equal(state["anchor"], torch.arange(64.0).reshape(8, 8))


class Late(nn.Module):
    """A stage that has only the second of two parameters."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias


def test_stage_without_the_first_parameter_gets_shared_state() -> None:
    model = nn.Linear(3, 3)
    optimizer = SharingOptimizer(model.parameters())
    optimizer.step()
    other = restore_optimizer(model, optimizer, Late(nn.Parameter(torch.zeros(3))))
    (state,) = other.state.values()
    assert (state["step"].item(), set(state)) == (1.0, {"step", "average"})


def test_non_string_optimizer_state_key_is_refused_by_name() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight][7] = torch.zeros(2)
    with pytest.raises(TypeError, match=r"optimizer has a tensor of model\.weight under 7, which is a int"):
        TrackedState({"model": model, "optimizer": optimizer}).tensors()
    TrackedState({"model": model, "optimizer": optimizer}, exclude=["optimizer.model.weight.7"]).tensors()
    optimizer.state[model.weight] = {7: 3}
    TrackedState({"model": model, "optimizer": optimizer}).tensors()


RATES = {"weight": 0.1, "bias": 0.2}
SCHEDULES: dict[str, Callable[[SGD], Any]] = {
    "lambda": lambda of: LambdaLR(of, lambda epoch: 0.9**epoch),
    "in sequence": lambda of: SequentialLR(of, [LambdaLR(of, lambda e: 0.9**e), ExponentialLR(of, 0.5)], [6]),
    "chained": lambda of: ChainedScheduler([LambdaLR(of, lambda e: 0.9**e), ExponentialLR(of, 1.0)]),
    "cyclic": lambda of: CyclicLR(of, [0.1 * g["lr"] for g in of.param_groups], [g["lr"] for g in of.param_groups], 5),
    "plateau": lambda of: ReduceLROnPlateau(of, patience=0, min_lr=[g["lr"] / 8 for g in of.param_groups]),
}


class Layers:
    """Some of two layers, the first without a bias, in groups by kind with rates of their own, in this order."""

    def __init__(self, names: str, schedule: str, *kinds: str) -> None:
        self.model = nn.ModuleDict({name: nn.Linear(2, 2, bias=name == "b") for name in names})
        self.kinds = kinds
        named = [(kind, [p for n, p in self.model.named_parameters() if n.endswith(kind)]) for kind in kinds]
        self.optimizer = SGD([{"params": of, "lr": RATES[kind], "momentum": 0.5} for kind, of in named])
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.state = TrackedState({"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule})

    def steps(self, count: int) -> dict[str, list[float]]:
        """Return the rates of each kind after each of so many steps."""
        found: dict[str, list[float]] = {kind: [] for kind in self.kinds}
        for _ in range(count):
            self.optimizer.step()
            self.schedule.step(*([1.0] if isinstance(self.schedule, ReduceLROnPlateau) else []))
            for kind, group in zip(self.kinds, self.optimizer.param_groups, strict=True):
                found[kind].append(group["lr"])
        return found


@pytest.mark.promise("layout-change")
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_rates_follow_parameters_and_not_positions(schedule: str, first: int) -> None:
    stages = [Layers("a", schedule, "weight"), Layers("b", schedule, "weight", "bias")]
    for stage in stages:
        stage.steps(3)
    blobs = [stage.state.capture().data() for stage in stages]
    expected = stages[1].steps(5)
    after = [
        Layers("ab", schedule, "weight", "bias"),
        Layers("ab", schedule, "bias", "weight"),
        Layers("b", schedule, "bias"),
    ]
    for layers in after:
        load(layers.state, blobs[first], blobs[1 - first])
        assert layers.steps(5) == {kind: expected[kind] for kind in layers.kinds}
