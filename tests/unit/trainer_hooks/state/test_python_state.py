"""Python state between layouts: what a stage of a pipeline stored, and what a rank with other stages needs of it."""

from __future__ import annotations

import zlib
from collections import OrderedDict
from typing import Any

import pytest
import torch
from everstep_trainer.state.python_state import MAX_NAMES_BYTES, MergedState, decode, pack_names, unpack_names
from everstep_trainer.state.python_value_codec import encode_blob
from everstep_trainer.state.tracked_state import TrackedState
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from everstep.errors import MalformedMessage, NotRestorable
from tests.support.given_state import GivenState
from tests.unit.trainer_hooks.state.test_snapshot_state import load

LAYERS = range(4)


class Extra(nn.Linear):
    """A layer with state of its own that is no tensor."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


class Stage:
    """Some layers of a model, an optimizer whose biases do not decay, and a schedule."""

    def __init__(self, layers: range, *, lr: float = 0.1, biases_apart: bool = True) -> None:
        self.model = nn.Sequential(OrderedDict((str(i), Extra()) for i in layers))
        weights, biases = ([layer.weight for layer in self.model], [layer.bias for layer in self.model])
        groups = [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]
        if not biases_apart:
            groups = [{"params": weights + biases, "weight_decay": 0.5}]
        self.optimizer = torch.optim.SGD(groups, lr=lr)
        self.schedule = torch.optim.lr_scheduler.ConstantLR(self.optimizer, factor=1.0)
        tracked = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}
        self.state = TrackedState(tracked)

    def run(self, mark: int) -> bytes:
        """As if it had trained: everything says ``mark``."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(mark)
        for name, layer in self.model.named_children():
            layer.seen = 100 * mark + int(name)  # type: ignore[assignment]
            self.optimizer.state[layer.weight] = {"count": 10 * mark + int(name)}
        self.schedule.last_epoch = mark
        return self.state.capture().data()

    def said(self) -> dict[str, Any]:
        return {
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "decay": [group["weight_decay"] for group in self.optimizer.param_groups],
            "seen": {name: layer.seen for name, layer in self.model.named_children()},
            "count": {n: self.optimizer.state[m.weight]["count"] for n, m in self.model.named_children()},
            "epoch": self.schedule.last_epoch,
        }


def test_rank_with_all_layers_takes_each_from_its_stage() -> None:
    blobs = [Stage(range(2)).run(7), Stage(range(2, 4)).run(7)]
    whole = Stage(LAYERS)
    load(whole.state, *blobs)
    assert whole.said() == {
        "lr": [7.0, 7.0],
        "decay": [0.5, 0.0],
        "seen": {str(i): 700 + i for i in LAYERS},
        "count": {str(i): 70 + i for i in LAYERS},
        "epoch": 7,
    }


def test_stage_takes_its_layers_from_a_rank_with_all() -> None:
    blob = Stage(LAYERS).run(3)
    last = Stage(range(3, 4))
    load(last.state, blob)
    assert last.said()["count"] == {"3": 33}
    assert last.said()["lr"] == [3.0, 3.0]


def test_parameterless_state_comes_from_the_same_stage() -> None:
    first, second = Stage(range(2)).run(1), Stage(range(2, 4)).run(2)
    again = Stage(range(2, 4))
    load(again.state, first, second)
    assert again.said()["epoch"] == 2
    assert again.said()["lr"] == [2.0, 2.0]


def test_optimizers_of_several_stages_merge_under_one_key() -> None:
    blob = Stage(LAYERS).run(5)
    parts = [Stage(range(2)), Stage(range(2, 4))]
    state = TrackedState(
        {
            "model": [part.model for part in parts],
            "optimizer": [part.optimizer for part in parts],
            "schedule": parts[0].schedule,
        }
    )
    load(state, blob)
    assert [part.said()["count"] for part in parts] == [{"0": 50, "1": 51}, {"2": 52, "3": 53}]
    state.tensors()  # as a snapshotter does
    other = Stage(LAYERS)
    load(other.state, state.capture().data())
    assert other.said()["count"] == {str(i): 50 + i for i in LAYERS}


def test_differently_treated_parameters_cannot_share_a_group() -> None:
    merged = MergedState([decode(Stage(LAYERS).run(5))], frozenset())
    with pytest.raises(
        NotRestorable, match=r"model\.0\.weight and model\.0\.bias are in one.*weight_decay 0\.5 and 0\.0"
    ):
        Stage(LAYERS, biases_apart=False).state.require_python(merged)


def test_newly_trained_parameter_is_named() -> None:
    merged = MergedState([decode(Stage(range(3)).run(5))], frozenset())
    with pytest.raises(NotRestorable, match=r"1 parameters \(model\.3\.weight\) that it did not train"):
        Stage(LAYERS).state.require_python(merged)


def test_newly_tracked_object_is_named() -> None:
    blob = TrackedState({"a": GivenState(1)}).capture().data()
    state = TrackedState({"a": GivenState(1), "b": GivenState(2)})
    with pytest.raises(NotRestorable, match="b is tracked now, but was not"):
        state.require_python(MergedState([decode(blob)], state.python_names()))


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)))
def test_packed_names_come_back(names: list[str]) -> None:
    assert unpack_names(pack_names(names)) == tuple(names)


@pytest.mark.parametrize(
    "data", [b"", b"x", zlib.compress(b"abc")[:-5], zlib.compress(b"\xff"), zlib.compress(bytes(MAX_NAMES_BYTES + 1))]
)
def test_invalid_or_too_many_names_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_names(data)


@pytest.mark.parametrize(
    "value",
    [
        {"groups": {}},
        {"format": 1},
        [],
        {"format": 2, "groups": {"o": [[1]]}, "scalars": {}, "extra": {}, "objects": {}},
        {"format": 2, "groups": {"o": [[b"?", {}]]}, "scalars": {}, "extra": {}, "objects": {}},
        {"format": 2, "groups": 3, "scalars": {}, "extra": {}, "objects": {}},
        {"format": 2, "groups": {}},
    ],
)
def test_python_state_of_another_form_is_refused(value: Any) -> None:
    with pytest.raises(MalformedMessage):
        decode(encode_blob(value))
