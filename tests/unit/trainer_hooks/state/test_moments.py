"""Optimizer state that a fresh process makes room for lies where the optimizer would have made it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import pytest
import torch
import torch.distributed as dist
from everstep_trainer.snapshot.shares import build_manifest, divide_state
from everstep_trainer.state.optimizer_state import allocate_moment, has_full_state, location_of
from everstep_trainer.state.python_state import MergedState, decode
from everstep_trainer.state.tracked_state import TrackedState
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from everstep.layout.manifests import Manifest, TensorInfo, TensorPlacement, decode_manifest, encode_manifest
from tests.support.sharing_optimizer import SharingOptimizer

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
    """With a parameter that is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(64.0).reshape(8, 8))
        self.scale = nn.Parameter(torch.tensor(2.0))


@pytest.fixture(scope="module")
def grouped() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def spread() -> Scaled:
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
@pytest.mark.parametrize("build", [Scaled, spread])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fresh_process_continues_with_a_scalar_parameter(
    grouped: None, name: str, build: Callable[[], Scaled], tells: bool
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
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert not tells or [(k, type(v)) for k, v in one.items()] == [(k, type(two[k])) for k in one]
    step(model, optimizer)
    step(fresh, other)
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(whole(one), whole(two))


@pytest.mark.parametrize("fields", [-1, 1], ids=["one before", "a later one"])
def test_a_manifest_of_another_release_is_read(fields: int) -> None:
    tensor = TensorInfo("o.p.step", "float32", 4, (), False)
    written = msgspec.msgpack.decode(encode_manifest(Manifest(1, 0, 1, (tensor,), (), 0, 0, 8, 8)))
    written[3][0] = written[3][0][:-1] if fields < 0 else [*written[3][0], "more"]
    assert decode_manifest(msgspec.msgpack.encode(written)).catalog == (tensor,)


def whole(tensor: torch.Tensor) -> torch.Tensor:
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


def test_scalar_state_of_a_larger_parameter_keeps_its_device() -> None:
    with FakeTensorMode():
        parameter = nn.Parameter(torch.empty(3, device="cuda"))
        for lies, device in (
            (TensorPlacement.HOST, "cpu"),
            (TensorPlacement.DEVICE, "cuda"),
            (TensorPlacement.UNKNOWN, "cpu"),
        ):
            stored = TensorInfo("o.p.eta", "float32", 4, (), False, placement=lies)
            assert allocate_moment(parameter, "eta", stored, capturable=False).device.type == device


def restored_into(model: nn.Module, optimizer: torch.optim.Optimizer, fresh: nn.Module) -> torch.optim.Optimizer:
    """A new optimizer of ``fresh``, with the state of the one that trained ``model``."""
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
    other = restored_into(model, optimizer, fresh)
    one, two = (other.state[parameter] for parameter in fresh.parameters())
    assert one["step"] is two["step"]
    assert one["anchor"].data_ptr() == fresh.weight.data_ptr()
    assert one["average"] is not two["average"]
    for _ in range(3):
        optimizer.step()
        other.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


@pytest.mark.parametrize("layout", [spread, Scaled])
def test_plain_state_of_a_sharded_parameter_stays_plain(grouped: None, layout: Callable[[], nn.Module]) -> None:
    model, fresh = spread(), layout()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.state[model.weight] = {"anchor": torch.arange(64.0).reshape(8, 8), "row": torch.ones(8)}
    (state,) = restored_into(model, optimizer, fresh).state.values()
    assert [type(value) for value in state.values()] == [torch.Tensor, torch.Tensor]
    assert torch.equal(state["anchor"], torch.arange(64.0).reshape(8, 8))


class Late(nn.Module):
    """A stage that has the second of two parameters."""

    def __init__(self, bias: nn.Parameter) -> None:
        super().__init__()
        self.bias = bias


def test_stage_without_the_first_parameter_gets_shared_state() -> None:
    model = nn.Linear(3, 3)
    optimizer = SharingOptimizer(model.parameters())
    optimizer.step()
    other = restored_into(model, optimizer, Late(nn.Parameter(torch.zeros(3))))
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


def test_empty_state_entry_does_not_count_as_state():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    assert optimizer.state[parameter] == {}
    assert not has_full_state(optimizer)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert has_full_state(optimizer)
