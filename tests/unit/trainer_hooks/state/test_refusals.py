"""Tensors and optimizers with memory that cannot be seen are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parameter import UninitializedBuffer
from torch.testing._internal.two_tensor import TwoTensor

from everstep.errors import ConfigurationError, NotRestorable
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.session.generation_session import TrainingSession
from everstep_trainer.slots.shares import build_manifest, divide_state
from everstep_trainer.state.python_value_codec import decode_blob, encode_blob
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.layouts import fake_group

MADE: dict[str, Callable[[], torch.Tensor]] = {
    "which wraps other tensors": lambda: TwoTensor(torch.ones(4, 2), torch.zeros(4, 2)),
    "has the layout torch.sparse_coo": lambda: torch.eye(4).to_sparse(),
    "has the layout torch.sparse_csr": lambda: torch.eye(4).to_sparse_csr(),
    "meta device": lambda: torch.ones(4, device="meta"),
    "torch does not copy": lambda: torch.empty(4, dtype=vars(torch)["uint4"]),
    "is not initialized": UninitializedBuffer,
}

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch tells that sparse tensors are in beta


@pytest.mark.promise("partial-state-refused")
@pytest.mark.parametrize("problem", MADE)
def test_unsupported_buffer_is_refused_unless_excluded(problem: str) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("odd", MADE[problem]())
    state = TrackedState({"model": model})
    with pytest.raises(TypeError, match=rf"model\.odd .*{problem}.*exclude="):
        state.tensors()
    left = TrackedState({"model": model}, exclude=["model.odd"])
    tensors = left.tensors()
    assert {tensor.name for tensor in tensors} == {"model.weight", "model.bias"}
    left.layout(tensors, 0, 1)
    assert left.is_unchanged()


@pytest.mark.promise("tracked-state-exact")
def test_expanded_buffer_is_refused_but_valid_python_state() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.arange(8.0).expand(4, 8))
    with pytest.raises(TypeError, match=r"model\.mask is expanded.*clone\(\).*exclude="):
        TrackedState({"model": model}).tensors()
    assert torch.equal(decode_blob(encode_blob(model.mask)), torch.arange(8.0).expand(4, 8))


def test_lazy_layer_is_refused_before_its_first_batch() -> None:
    model = nn.LazyLinear(3)
    with pytest.raises(TypeError, match=r"model\.weight is not initialized: give the model a first batch"):
        TrackedState({"model": model}).tensors()
    model(torch.ones(1, 2))
    assert len(TrackedState({"model": model}).tensors()) == 2


@pytest.mark.promise("partial-state-refused")
def test_wrapper_subclass_optimizer_state_is_refused() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
    with pytest.raises(TypeError, match=r"optimizer\.model\.weight\.momentum_buffer is a TwoTensor"):
        TrackedState({"model": model, "optimizer": optimizer}).tensors()


@pytest.mark.promise("partial-state-refused")
def test_wrapper_subclass_shard_is_refused() -> None:
    model = nn.Linear(4, 4, bias=False)
    with fake_group(0, (2,)) as mesh:
        local = TwoTensor(torch.ones(2, 4), torch.ones(2, 4))
        model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
        with pytest.raises(TypeError, match=r"model\.weight is a TwoTensor"):
            TrackedState({"model": model}).tensors()


@pytest.mark.promise("partial-state-refused")
def test_plain_optimizer_state_of_a_shard_is_refused_by_name() -> None:
    """One rank would have stored it, and all ranks would have restored it."""
    with fake_group(0, (2,)) as mesh:
        model = nn.Linear(4, 5, bias=False)
        local, shape = torch.ones(3, 4), torch.Size([5, 4])
        whole = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(4, 1))
        model.weight = nn.Parameter(whole)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.state[model.weight] = {"exp_avg": torch.zeros(3, 4), "step": torch.tensor(1.0)}
        tracked = {"model": model, "optimizer": optimizer}
        with pytest.raises(
            TypeError,
            match=r"weight\.exp_avg is a plain tensor with the shape \[3, 4\].*\[5, 4\].*zeros_like\(parameter\)",
        ):
            TrackedState(tracked).tensors()
        TrackedState(tracked, exclude=["optimizer.*"]).tensors()


@pytest.mark.promise("partial-state-refused")
@pytest.mark.parametrize("problem", MADE)
def test_unsupported_tensor_in_python_state_is_refused_by_path(problem: str) -> None:
    with pytest.raises(TypeError, match=rf"state\['ema'\] .*{problem}.*leave it out of state_dict"):
        encode_blob({"ema": MADE[problem]()})


def test_shard_in_python_state_is_refused_with_advice() -> None:
    with fake_group(0, (2,)) as mesh:
        shard = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
        with pytest.raises(TypeError, match=r"state\['ema'\] is a DTensor: track the module that holds it"):
            encode_blob({"ema": shard})


@pytest.mark.promise("partial-state-refused")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_zero_redundancy_optimizer_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = object.__new__(ZeroRedundancyOptimizer)  # to make one needs a process group, and is nothing to us
    with pytest.raises(TypeError, match=r"optimizer is a ZeroRedundancyOptimizer.*use fully_shard"):
        TrackedState({"optimizer": [optimizer]})


class Outer(torch.optim.SGD):
    """An optimizer that wraps another one and keeps its state there."""

    def state_dict(self) -> dict[str, Any]:
        return {"state": {0: {"momentum": 1.0}}, "param_groups": []}


@pytest.mark.parametrize(("kind", "warnings"), [(Outer, 1), (torch.optim.SGD, 0)])
def test_optimizer_without_visible_state_is_warned_once(
    kind: type[torch.optim.Optimizer], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    optimizer = kind(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    Run(RankContext(), TrainingSession()).track(model=model, optimizer=optimizer)
    for _ in range(6):
        optimizer.step()
    assert caplog.text.count("optimizer, a Outer, does not keep its state in optimizer.state") == warnings


def lbfgs(elements: int, history: int) -> dict[str, Any]:
    model = nn.Linear(elements, 1, bias=False)
    return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), history_size=history)}


def test_lbfgs_with_too_long_history_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"optimizer is an LBFGS with history_size=20.* 16000000 .*history_size=10 or"):
        TrackedState(lbfgs(100_000, 20))
    with pytest.raises(ValueError, match=r"8388608 bytes: leave its state out by .*exclude=\['optimizer\.\*'\]"):
        TrackedState(lbfgs(2_000_000, 1))
    TrackedState(lbfgs(100_000, 10))
    left_out = TrackedState(lbfgs(100_000, 20), exclude=["optimizer.*"])
    assert [tensor.name for tensor in left_out.tensors()] == ["model.weight"]


def test_oversized_python_state_is_refused_with_largest_path() -> None:
    large = [torch.ones(100_000) for _ in range(30)]
    value = {"objects": {"small": [1, 2], "cache": {"step": 3, "seen": large}}, "extra": {"x": torch.ones(9)}}
    with pytest.raises(ConfigurationError, match=r"largest part is state\['objects'\]\['cache'\]\['seen'\]: keep"):
        encode_blob(value)
    with pytest.raises(ConfigurationError, match=r"largest part is state\[1\]: keep"):
        encode_blob((0, torch.ones(3_000_000)))


@pytest.mark.promise("partial-state-refused")
def test_two_tensors_of_one_name_are_refused_unless_equal() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"model\.weight is the name of two tensors .*run\.track\(first="):
        TrackedState({"model": [first, second]}).tensors()
    TrackedState({"model": first, "other": second}).tensors()
    TrackedState({"model": [first, first]}).tensors()
    for stage in (stages := [nn.Module(), nn.Module()]):
        stage.register_buffer("constant", torch.arange(3.0))
    TrackedState({"model": stages}).tensors()
    optimizers = [torch.optim.SGD(first.parameters(), lr=0.1, momentum=momentum) for momentum in (0.5, 0.9)]
    for scale, optimizer in enumerate(optimizers, 1):
        first.weight.grad = torch.full((2, 2), float(scale))
        optimizer.step()
    with pytest.raises(ValueError, match=r"optimizer\.model\.weight\.momentum_buffer is the name of two tensors"):
        TrackedState({"model": first, "optimizer": optimizers}).tensors()


@pytest.mark.promise("partial-state-refused")
def test_missing_parameter_group_is_refused() -> None:
    def built() -> tuple[nn.Sequential, torch.optim.SGD]:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        return model, torch.optim.SGD(model[0].parameters(), lr=0.1)

    model, optimizer = built()
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})
    state = TrackedState({"model": model, "optimizer": optimizer})
    layouts = [state.layout(state.tensors(), 0, 1)]
    catalog = build_manifest(0, layouts, divide_state(layouts, ["n1"], 1)[0], 1000).catalog
    again, other = built()
    fresh = TrackedState({"model": again, "optimizer": other})
    with pytest.raises(
        NotRestorable, match=r"optimizer trained model\.1\.weight, in its parameter group 1, .*from the start"
    ):
        fresh.restore_targets(catalog)
    other.add_param_group({"params": list(again[1].parameters())})
    assert len(fresh.restore_targets(catalog)) == 4
