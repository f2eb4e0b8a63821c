"""A rank's small Python state, as it lies in a slot, in values that can be pickled without torch and numpy.

The trainer writes it as MessagePack with extensions (trainer_hooks/snapshot/blob.py); what has no counterpart here
becomes a call that a reader with torch and numpy makes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from agent.spill.dcp_metadata import Path
from agent.spill.pickles import Call, Global
from agent.spill.torch_zip import RawTensor
from everstep.errors import UNREADABLE, MalformedMessage

STATE_FORMAT = 2
"""As trainer_hooks/python_state.py writes it."""


def decode_state(data: bytes | memoryview) -> dict[str, Any]:
    """The state's top level, by key. Raises MalformedMessage."""
    try:
        state = msgspec.msgpack.decode(data, ext_hook=_unpack)
    except (*UNREADABLE, ValueError, TypeError) as error:
        raise MalformedMessage(f"a slot's Python state cannot be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise MalformedMessage("a slot's Python state is no dictionary")
    return state


def require_format(state: dict[str, Any]) -> None:
    """Raises MalformedMessage for a rank's Python state of another release's form."""
    if state.get("format") != STATE_FORMAT:
        raise MalformedMessage(
            f"a slot's Python state has format {state.get('format')!r}, this release reads {STATE_FORMAT}"
        )


def _unpack(code: int, data: memoryview) -> Any:
    value = msgspec.msgpack.decode(data, ext_hook=_unpack)
    if code not in _KINDS:
        raise ValueError(f"extension {code} is unknown to this release")
    return _KINDS[code](value)


def _array(value: list[Any]) -> Call:
    """numpy.ndarray over bytes cannot be written to, hence the copy."""
    dtype, shape, data = value
    view = Call(Global("numpy", "ndarray"), (tuple(shape), dtype, data))
    return Call(Global("numpy", "array"), (view,))


_KINDS: dict[int, Any] = {
    1: tuple,
    2: set,
    3: lambda items: Call(Global("builtins", "frozenset"), (items,)),
    4: lambda digits: int(digits, 16),
    5: lambda value: RawTensor(value[0], tuple(value[1]), value[2]),
    6: _array,
    7: lambda value: Call(Global("operator", "getitem"), (_array(value), ())),
    8: lambda name: Global("torch", name),
    9: lambda name: Call(Global("torch", "device"), (name,)),
    10: lambda parts: complex(*parts),
    11: dict,
    12: dict,  # collections.Counter, and below OrderedDict: torch.distributed.checkpoint opens all alike
    13: dict,
    14: lambda sizes: Call(Global("torch", "Size"), (sizes,)),
}


def flatten(path: Path, value: Any) -> Iterator[tuple[Path, Any]]:
    """The leaves of nested state with their paths, as torch.distributed.checkpoint cuts it.

    Dictionaries are opened always; lists where a tensor or a dictionary is in them; nothing else
    (torch/distributed/checkpoint/_traverse.py).
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten((*path, str(key)), item)
    elif _is_leaf(value):
        yield path, value
    else:
        for index, item in enumerate(value):
            yield from flatten((*path, index), item)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, dict):
        return False
    if not isinstance(value, list):
        return True
    return not any(isinstance(item, RawTensor) or not _is_leaf(item) for item in value)
