"""Write the ``.metadata`` of a torch.distributed.checkpoint directory without torch.

The file says where each tensor is. It is a pickle of torch's own dataclasses (torch/distributed/checkpoint/metadata.py
and filesystem.py, as of 2.13; releases from 2.3 on have the same fields). The same entries give the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from everstep.errors import DECODE_ERRORS, MalformedMessage
from everstep.layout.manifests import Box, Extent
from everstep_agent.spill.torch_format import DictItems, Global, Instance, PickledCall, RawTensor, dumps

METADATA_VERSION = "1.0.0"  # CURRENT_DCP_VERSION of torch 2.13

KeyPath = tuple[str | int, ...]  # the path of a value in the nested state dict: keys of dicts, indices of lists
_MODULE = "torch.distributed.checkpoint.metadata"
_SIZE = Global("torch", "Size")


class ArchiveLocation(msgspec.Struct, frozen=True, array_like=True):
    """A torch archive inside a file of the directory; offset and length in bytes."""

    file: str
    offset: int
    length: int


class TensorChunk(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor, and the archive that holds it."""

    box: Box
    location: ArchiveLocation


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the checkpoint, made up of disjoint ``chunks``. ``dtype`` is torch's name without ``torch.``."""

    path: KeyPath
    dtype: str
    shape: Extent
    chunks: tuple[TensorChunk, ...]


class ObjectEntry(msgspec.Struct, frozen=True, array_like=True):
    """A value that is no tensor."""

    path: KeyPath
    location: ArchiveLocation


def flat_key(path: KeyPath) -> str:
    """Return the flattened key, as torch's flatten_state_dict makes it."""
    return ".".join(map(str, path))


def encode_metadata(tensors: Sequence[TensorEntry], objects: Sequence[ObjectEntry]) -> bytes:
    """Return the bytes of ``.metadata``. Raises ValueError if two entries have one key."""
    entries: list[TensorEntry | ObjectEntry] = [*tensors, *objects]
    nothing = Instance(Global(_MODULE, "BytesStorageMetadata"), {})
    described = {flat_key(t.path): _tensor(t) for t in tensors} | {flat_key(o.path): nothing for o in objects}
    if len(described) != len(entries):
        keys = Counter(flat_key(entry.path) for entry in entries)
        raise ValueError(f"several entries have the key {keys.most_common(1)[0][0]!r}")
    stored = [(_index(flat_key(t.path), c.box.offset), _stored(c.location)) for t in tensors for c in t.chunks]
    stored += [(_index(flat_key(o.path), None), _stored(o.location)) for o in objects]
    metadata = {
        "state_dict_metadata": described,
        "planner_data": {flat_key(entry.path): tuple(entry.path) for entry in entries},
        "storage_data": DictItems(tuple(stored)),
        "storage_meta": None,
        "version": METADATA_VERSION,
    }
    return dumps(Instance(Global(_MODULE, "Metadata"), metadata))


def _tensor(entry: TensorEntry) -> Instance:
    kind = Global(_MODULE, "ChunkStorageMetadata")
    chunks = [Instance(kind, {"offsets": _size(c.box.offset), "sizes": _size(c.box.size)}) for c in entry.chunks]
    # arguments of TensorProperties.__setstate__: dtype, layout, requires_grad, memory format, pinned
    layout = PickledCall(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = PickledCall(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    arguments = (Global("torch", entry.dtype), layout, False, contiguous, False)
    properties = Instance(Global(_MODULE, "TensorProperties"), arguments)
    state = {"properties": properties, "size": _size(entry.shape), "chunks": chunks}
    return Instance(Global(_MODULE, "TensorStorageMetadata"), state)


def _size(extent: Extent) -> PickledCall:
    return PickledCall(_SIZE, (tuple(extent),))


def _index(key: str, offset: Extent | None) -> Instance:
    state = {"fqn": key, "offset": None if offset is None else _size(offset), "index": None}
    return Instance(Global(_MODULE, "MetadataIndex"), state)


def _stored(location: ArchiveLocation) -> Instance:
    state = {"relative_path": location.file, "offset": location.offset, "length": location.length}
    return Instance(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)


# Convert a rank's small Python state in a slot to values that can be pickled without torch and numpy.
#
# The trainer writes it as MessagePack with extensions (trainer_hooks/everstep_trainer/state/python_value_codec.py). A
# value without a counterpart here becomes a call for a reader with torch and numpy.

STATE_FORMAT = 2  # the format written by trainer_hooks/everstep_trainer/state/python_state.py


def decode_state(data: bytes | memoryview) -> dict[str, Any]:
    """Return the state's top level, by key. Raises MalformedMessage."""
    try:
        state = msgspec.msgpack.decode(data, ext_hook=_unpack)
    except (*DECODE_ERRORS, ValueError, TypeError) as error:
        raise MalformedMessage(f"a slot's Python state cannot be read: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise MalformedMessage("a slot's Python state is not a dictionary")
    return state


def _unpack(code: int, data: memoryview) -> Any:
    value = msgspec.msgpack.decode(data, ext_hook=_unpack)
    if code not in _KINDS:
        raise ValueError(f"extension {code} is unknown to this release")
    return _KINDS[code](value)


def _array(value: list[Any]) -> PickledCall:
    """Copy the array in the reader, because numpy.ndarray over bytes cannot be written to."""
    dtype, shape, data = value
    view = PickledCall(Global("numpy", "ndarray"), (tuple(shape), dtype, data))
    return PickledCall(Global("numpy", "array"), (view,))


_KINDS: dict[int, Any] = {
    1: tuple,
    2: set,
    3: lambda items: PickledCall(Global("builtins", "frozenset"), (items,)),
    4: lambda digits: int(digits, 16),
    5: lambda value: RawTensor(value[0], tuple(value[1]), value[2]),
    6: _array,
    7: lambda value: PickledCall(Global("operator", "getitem"), (_array(value), ())),
    8: lambda name: Global("torch", name),
    9: lambda name: PickledCall(Global("torch", "device"), (name,)),
    10: lambda parts: complex(*parts),
    11: dict,
    12: dict,  # collections.Counter, and below OrderedDict: torch.distributed.checkpoint opens all of these
    13: dict,
    14: lambda sizes: PickledCall(Global("torch", "Size"), (sizes,)),
}


def flatten(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the leaves of nested state with their paths, split as in torch/distributed/checkpoint/_traverse.py."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flatten((*path, str(key)), item)
    elif _is_leaf(value):
        yield path, value
    else:
        for index, item in enumerate(value):
            yield from flatten((*path, index), item)


def _is_leaf(value: Any) -> bool:
    if not isinstance(value, list):
        return not isinstance(value, dict)
    return all(not isinstance(item, RawTensor) and _is_leaf(item) for item in value)
