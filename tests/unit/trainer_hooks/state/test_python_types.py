"""Python state comes back as what it was, and what would not is refused by name."""

from __future__ import annotations

from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from everstep_agent.spill.dcp_metadata import decode_state
from everstep_agent.spill.torch_format import Call, Global
from everstep_trainer.state import python_value_codec
from everstep_trainer.state.python_value_codec import decode_blob, encode_blob

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
    """Types, all the way down."""
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


def test_values_of_earlier_releases_are_read_as_plain_types() -> None:
    def ext(code: int, value: Any) -> msgspec.msgpack.Ext:
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))

    counted, size = ext(11, [[ext(1, [1, "a"]), 3]]), ext(1, [2, 3])
    back = decode_blob(msgspec.msgpack.encode({"counted": counted, "ordered": {"b": 1}, "size": size}))
    assert back == {"counted": {(1, "a"): 3}, "ordered": {"b": 1}, "size": (2, 3)}


def test_vault_decodes_counters_and_ordered_dicts() -> None:
    stored = decode_state(encode_blob({"c": Counter({2: 1}), "o": OrderedDict(a=1), "s": torch.Size([2, 3])}))
    assert (stored["c"], stored["o"], stored["s"]) == (
        {2: 1},
        {"a": 1},
        Call(Global("torch", "Size"), ([2, 3],)),
    )


def schedule() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.SequentialLR]:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
    falling = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    return optimizer, torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, falling], milestones=[3])


def rates(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        found.append(optimizer.param_groups[0]["lr"])
    return found


@pytest.mark.filterwarnings("ignore:.*epoch parameter:UserWarning")
def test_a_schedule_of_milestones_goes_on_after_a_restore() -> None:
    optimizer, scheduler = schedule()
    rates(optimizer, scheduler, 2)
    fresh, restored = schedule()
    fresh.load_state_dict(optimizer.state_dict())
    restored.load_state_dict(decode_blob(encode_blob(scheduler.state_dict())))
    assert rates(fresh, restored, 8) == rates(optimizer, scheduler, 8)


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


def test_paths_are_formatted_only_for_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[object] = []
    say = python_value_codec._describe_path
    monkeypatch.setattr(python_value_codec, "_describe_path", lambda path: said.append(path) or say(path))
    encode_blob({"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]})
    assert said == []
    with pytest.raises(TypeError, match=r"^state\['groups'\]\[0\]\['lr'\] is a builtins.object"):
        encode_blob({"groups": [{"lr": object()}]})
