"""Python state that is read without torch and numpy, and its names in an ordinary checkpoint."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from everstep.errors import MalformedMessage
from everstep.layout.manifests import TensorInfo
from everstep_agent.spill.dcp_metadata import decode_state, flatten
from everstep_agent.spill.layout import CheckpointPaths
from everstep_agent.spill.torch_format import object_archive
from everstep_trainer.state.python_value_codec import encode_blob

EVERY_KIND: dict[str, Any] = {
    "none": None,
    "numbers": [True, 1, -(1 << 80), 0.5, 2 - 1j, float("inf")],
    "text": ("a", b"\x00\xff"),
    "sets": [{1, 2}, frozenset({"a"})],
    "nested": OrderedDict(a={"b": (1, (2, 3))}),
    "keys": {1: 2, "a": 3},
    "tuples for keys": {(1, ("a", None)): 2, 1 << 70: {(): 3}, "a": 4},
    "dtype": torch.bfloat16,
    "device": torch.device("cuda", 1),
}


def read_back(value: dict[str, Any], *, weights_only: bool = False) -> Any:
    return torch.load(io.BytesIO(object_archive(decode_state(encode_blob(value)))), weights_only=weights_only)


def test_python_state_of_every_kind_round_trips() -> None:
    assert read_back(EVERY_KIND) == EVERY_KIND


def test_tensors_and_arrays_round_trip() -> None:
    tensor, array = torch.arange(6).reshape(2, 3).half(), np.arange(6, dtype=np.int16).reshape(3, 2)
    back = read_back({"t": [tensor], "a": array, "s": np.float32(0.5)})
    assert torch.equal(back["t"][0], tensor)
    assert (back["a"].dtype, back["a"].tolist()) == (array.dtype, array.tolist())
    assert back["a"].flags.writeable
    assert (type(back["s"]), back["s"]) == (np.float32, np.float32(0.5))


values = st.recursive(
    st.integers(0, 3) | st.just(torch.ones(2)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=3)
        | st.tuples(inner)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.text("xy", min_size=1, max_size=2), values, max_size=3))
def test_nested_state_is_flattened_like_torch(state: dict[str, Any]) -> None:
    theirs, paths = flatten_state_dict(state)
    leaves = {".".join(map(str, path)): path for path, _ in flatten((), decode_state(encode_blob(state)))}
    assert leaves == paths
    assert leaves.keys() == theirs.keys()


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x01", b"\x81\x01\x02", b"\xd4\x63\x00"], ids=repr)
def test_invalid_state_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        decode_state(data)


def tensor(name: str, *groups: tuple[str, int]) -> TensorInfo:
    return TensorInfo(name, "float32", 4, (2,), False, (), groups)


def test_parameter_names_are_relative_only_for_a_single_module() -> None:
    state = {"groups": {"opt": [[b"", {"lr": 1}]], "both": [[b"", {"lr": 2}]]}}
    catalog = [
        tensor("gen.a.w", ("opt", 0), ("both", 0)),
        tensor("disc.w", ("both", 0)),
        tensor("opt.gen.a.w.exp_avg"),
        tensor("both.disc.w.momentum_buffer"),
    ]
    names = CheckpointPaths(catalog, state)
    paths = [names.tensor_paths(t) for t in catalog]
    assert paths[0] == (("gen", "a.w"),)
    assert paths[2] == (("opt", "state", "a.w", "exp_avg"),)
    assert paths[3] == (("both", "state", "disc.w", "momentum_buffer"),)
    shared = dict(names.shared_values(state))
    assert shared["opt", "param_groups", 0, "params"] == ["a.w"]
    assert shared["both", "param_groups", 0, "params"] == ["gen.a.w", "disc.w"]


def test_shared_optimizer_state_is_listed_under_each_parameter() -> None:
    state = {"groups": {"opt": [[b"", {}]]}}
    aliases = ("opt.net.b.step",)
    catalog = [
        tensor("net.a", ("opt", 0)),
        tensor("net.b", ("opt", 0)),
        TensorInfo("opt.net.a.step", "float32", 4, (), False, aliases),
    ]
    assert CheckpointPaths(catalog, state).tensor_paths(catalog[2]) == (
        ("opt", "state", "a", "step"),
        ("opt", "state", "b", "step"),
    )
