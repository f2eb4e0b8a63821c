"""Tracked state: names, boxes, ties, the blob, and refusals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from everstep.errors import MalformedMessage, NotRestorable
from everstep.layout.manifests import TensorInfo
from everstep_trainer.data.sampler import ElasticSampler
from everstep_trainer.state.layout import Sharing
from everstep_trainer.state.python_state import MergedState, decode
from everstep_trainer.state.python_value_codec import decode_blob, encode_blob
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.settable_state import SettableState


class Model(nn.Module):
    constant: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.tied = nn.Linear(3, 4, bias=False)
        self.tied.weight = self.inner.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("constant", torch.ones(5))
        self.register_buffer("scratch", torch.ones(5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized: torch.Tensor = self.norm(self.inner(x) + self.tied(x))
        return normalized


def trained() -> tuple[Model, torch.optim.Optimizer, TrackedState]:
    torch.manual_seed(1)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrackedState({"model": model, "optimizer": optimizer})
    model(torch.randn(6, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, state


def catalog_of(state: TrackedState) -> tuple[TensorInfo, ...]:
    parts = state.layout(state.tensors(), 0, 1).parts
    return tuple(TensorInfo(p.name, p.dtype, p.itemsize, p.shape, p.sharing is Sharing.PER_RANK) for p in parts)


def load(state: TrackedState, *blobs: bytes) -> None:
    """Load the Python state of one rank, or of several."""
    state.load_python(MergedState([decode(blob) for blob in blobs], state.python_names()))


def test_tensor_names_are_qualified_and_tied_ones_unique() -> None:
    _, _, state = trained()
    names = [t.name for t in state.tensors()]
    assert "model.inner.weight" in names
    assert "model.tied.weight" not in names
    assert "optimizer.model.inner.weight.exp_avg" in names
    assert "model.constant" in names
    assert "model.scratch" not in names
    assert len(names) == len(set(names))


def test_layout_lists_aliases_and_parameter_groups() -> None:
    model = Model()
    model.again = model.inner
    groups: list[dict[str, Any]] = [{"params": [model.inner.weight]}, {"params": [model.inner.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    state = TrackedState({"model": model, "optimizer": optimizer})
    parts = {p.name: p for p in state.layout(state.tensors(), 0, 1).parts}
    assert set(parts["model.inner.weight"].aliases) == {"model.tied.weight", "model.again.weight"}
    assert parts["model.inner.bias"].aliases == ("model.again.bias",)
    assert parts["model.constant"].aliases == ()
    assert parts["model.inner.weight"].groups == (("optimizer", 0),)
    assert parts["model.inner.bias"].groups == (("optimizer", 1),)
    assert parts["model.norm.weight"].groups == ()
    every_name = {f"model.{name}" for name in model.state_dict()}
    assert every_name == {name for part in parts.values() for name in (part.name, *part.aliases)}


def test_a_state_is_complete_once_the_optimizer_has_stepped() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    state = TrackedState({"model": model, "optimizer": optimizer})
    assert not state.is_complete()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert state.is_complete()


def test_fresh_process_allocates_the_stored_moments() -> None:
    _, _, state = trained()
    catalog = catalog_of(state)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    fresh = TrackedState({"model": model, "optimizer": optimizer})
    assert {catalog[i].name for i, _ in fresh.restore_targets(catalog)} == {t.name for t in catalog}
    moments = optimizer.state[model.inner.weight]
    assert moments["exp_avg"].shape == (4, 3)
    assert moments["step"].shape == ()
    assert moments["step"].device.type == "cpu"


def test_another_model_than_was_stored_is_refused_by_name() -> None:
    _, _, state = trained()
    catalog = catalog_of(state)
    other = nn.Sequential(nn.Linear(3, 4))
    with pytest.raises(NotRestorable, match=r"new \(model\.0\.weight, model\.0\.bias\)"):
        TrackedState({"model": other}).restore_targets(catalog)
    wider = [TensorInfo(t.name, t.dtype, t.itemsize, (9, 9), t.per_rank) for t in catalog]
    with pytest.raises(NotRestorable, match=r"float32 \[4, 3\] now, and was stored as float32 \[9, 9\]"):
        state.restore_targets(tuple(wider))


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("tracked", "mend"),
    [
        ([1], "hold its values in an object whose state_dict"),
        (object(), "give it both, or leave it out"),
        (ElasticSampler(10, global_batch=2), "samples are a function of the step: leave it out"),
        (DataLoader(Numbers()), r"take run\.loader or run\.sampler"),
        (DistributedSampler(Numbers(), num_replicas=2, rank=0), r"take run\.loader or run\.sampler"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_object_without_state_dict_is_refused_with_advice(tracked: object, mend: str) -> None:
    with pytest.raises(TypeError, match=f"odd is a {type(tracked).__name__}, .*{mend}"):
        TrackedState({"odd": tracked})


class Counting(torch.optim.SGD):
    """An optimizer with state that belongs to no parameter."""

    state: dict[Any, Any]  # type: ignore[assignment]  # with a string among its keys

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step(closure)
        seen = self.state["seen"].get("steps", torch.zeros(2))
        self.state["seen"] = {"steps": seen + 1, "last": 7}


def test_parameterless_optimizer_state_is_restored() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer, fresh = Counting(model.parameters(), lr=0.1), Counting(other.parameters(), lr=0.1)
    optimizer.step()
    state = TrackedState({"model": model, "optimizer": optimizer})
    state.tensors()
    optimizer.step()
    assert state.is_unchanged()
    blob = state.capture().data()
    optimizer.state[model.weight]["new"] = torch.ones(1)
    assert not state.is_unchanged()
    load(TrackedState({"model": other, "optimizer": fresh}), blob)
    assert fresh.state["seen"]["steps"].tolist() == [2.0, 2.0]
    assert fresh.state["seen"]["last"] == 7
    with pytest.raises(ValueError, match=r"one of several optimizers under optimizer .*'seen': track each"):
        TrackedState({"model": model, "optimizer": [optimizer, torch.optim.SGD(other.parameters())]}).capture().data()


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"hook": print}, r"state\['objects'\]\['odd'\]\['hook'\] is a builtins\."),
        ({"a": [1, {"b": object()}]}, r"\['a'\]\[1\]\['b'\] is a builtins\.object"),
        ({"a": np.array([object()])}, "numpy array of object"),
        ({frozenset(): 1}, "key of type frozenset.*take strings, numbers or tuples"),
        ({(1, print): 1}, "key of type builtin_function_or_method"),
    ],
)
def test_state_requiring_pickle_is_refused_with_its_path(value: Any, path: str) -> None:
    with pytest.raises(TypeError, match=path):
        TrackedState({"odd": SettableState(value)}).capture().data()


def test_self_containing_state_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        encode_blob(loop)


scalars = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats(allow_nan=False)
keys = st.recursive(
    st.text() | st.integers() | st.binary() | st.none() | st.floats(allow_nan=False),
    lambda inner: st.tuples(inner, inner),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(keys, inner) | st.sets(st.integers()),
    max_leaves=12,
)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0, 4),
        torch.randn(3, 2).bfloat16(),
        torch.arange(6).view(2, 3).t(),
        torch.ones(2) > 0,
    ],
)
def test_tensors_inside_python_state_come_back_to_the_bit(tensor: torch.Tensor) -> None:
    back = decode_blob(encode_blob({"t": tensor}))["t"]
    assert back.dtype == tensor.dtype
    assert torch.equal(back, tensor)


def test_numpy_and_odd_numbers_come_back() -> None:
    value = {
        "a": np.arange(6, dtype="<i2").reshape(2, 3),
        "s": np.float32(1.5),
        "n": math.nan,
        "c": 1 + 2j,
        "big": 1 << 200,
    }
    back = decode_blob(encode_blob(value))
    assert (back["a"] == value["a"]).all()
    assert back["a"].dtype == np.dtype("<i2")
    assert back["s"] == np.float32(1.5)
    assert math.isnan(back["n"])
    assert (back["c"], back["big"]) == (1 + 2j, 1 << 200)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xc7\x05\x63abcde", encode_blob({"t": torch.ones(4)})[:-3]])
def test_invalid_blob_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_blob(data)
