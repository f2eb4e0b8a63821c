"""Python state between layouts: the state that a pipeline stage stored, and the part that a rank with other stages
needs."""

from __future__ import annotations

import zlib
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from everstep.errors import MalformedMessage, NotRestorable
from everstep_trainer.state.python_state import MAX_NAMES_BYTES, MergedState, decode, unpack_names
from everstep_trainer.state.python_value_codec import decode_blob, encode_blob
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.settable_state import SettableState
from tests.unit.trainer_hooks.state.snapshots.test_snapshot_state import load

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
        """Set every value from ``mark``, as if training had changed it, and return the Python state."""
        for group in self.optimizer.param_groups:
            group["lr"] = float(mark)
        for name, layer in self.model.named_children():
            layer.seen = 100 * mark + int(name)  # type: ignore[assignment]
            self._entry(layer)["count"] = 10 * mark + int(name)
        self.schedule.last_epoch = mark
        return self.state.capture().data()

    def _entry(self, layer: nn.Module) -> dict[str, Any]:
        """Return the optimizer's state of a layer's weight."""
        entry: dict[str, Any] = self.optimizer.state[layer.get_parameter("weight")]
        return entry

    def values(self) -> dict[str, Any]:
        return {
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "decay": [group["weight_decay"] for group in self.optimizer.param_groups],
            "seen": {name: layer.seen for name, layer in self.model.named_children()},
            "count": {
                n: self.optimizer.state[m.get_parameter("weight")]["count"] for n, m in self.model.named_children()
            },
            "epoch": self.schedule.last_epoch,
        }


def test_rank_with_all_layers_takes_each_from_its_stage() -> None:
    blobs = [Stage(range(2)).run(7), Stage(range(2, 4)).run(7)]
    whole = Stage(LAYERS)
    load(whole.state, *blobs)
    assert whole.values() == {
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
    assert last.values()["count"] == {"3": 33}
    assert last.values()["lr"] == [3.0, 3.0]


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
    assert [part.values()["count"] for part in parts] == [{"0": 50, "1": 51}, {"2": 52, "3": 53}]
    state.tensors()  # as a snapshotter does
    other = Stage(LAYERS)
    load(other.state, state.capture().data())
    assert other.values()["count"] == {str(i): 50 + i for i in LAYERS}


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
    blob = TrackedState({"a": SettableState(1)}).capture().data()
    state = TrackedState({"a": SettableState(1), "b": SettableState(2)})
    with pytest.raises(NotRestorable, match="b is tracked now, but was not"):
        state.require_python(MergedState([decode(blob)], state.python_names()))


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


Pair = namedtuple("Pair", "one two")

KEPT: list[Any] = [
    Counter({2: 1, 4: 2}),
    Counter({(1, "a"): 3}),
    OrderedDict(b=1, a=[Counter("aab")]),
    OrderedDict([((1, 2), 3)]),
    torch.Size([2, 3]),
    {"n": (torch.Size([]), OrderedDict(), Counter())},
    {1: {(): 2}},
]
REFUSED: list[Any] = [defaultdict(list, a=[1]), Pair(1, 2), UserDict(a=1), MappingProxyType({"a": 1})]


def shape_of(value: Any) -> Any:
    """Return the types of a value and of everything in it."""
    if isinstance(value, dict):
        return type(value), [(key, shape_of(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(item) for item in value]
    return type(value)


@pytest.mark.promise("tracked-state-exact")
@pytest.mark.parametrize("value", KEPT, ids=repr)
def test_value_round_trips_with_its_type(value: Any) -> None:
    back = decode_blob(encode_blob(value))
    assert back == value
    assert shape_of(back) == shape_of(value)


@pytest.mark.promise("tracked-state-exact")
@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
def test_unsupported_type_is_refused_with_path_and_advice(value: Any) -> None:
    mend = r"tuple\(\.\.\.\)" if isinstance(value, tuple) else r"dict\(\.\.\.\)"
    with pytest.raises(TypeError, match=rf"state\['held'\] is a .*{type(value).__name__}.*give a {mend}"):
        encode_blob({"held": value})


def test_numpy_subclass_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"state\['held'\] is a numpy.*would come back as another type: give a numpy array"
    ):
        encode_blob({"held": np.ma.masked_array([1, 2], [True, False])})


@pytest.mark.parametrize("value", [["caf\udce9.txt"], {"caf\udce9.txt": 1}, {("caf\udce9.txt",): 1}])
def test_non_text_string_is_refused_with_its_path(value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['files'\].* has the string 'caf\\udce9\.txt'.*os\.fsencode"):
        encode_blob({"files": value})
    assert decode_blob(encode_blob({"files": ["café", "😀\0"]})) == {"files": ["café", "😀\0"]}
