"""The ``.metadata`` of a torch.distributed.checkpoint directory, without torch: which tensor is where.

It is a pickle of torch's own dataclasses (torch/distributed/checkpoint/metadata.py and filesystem.py, as of 2.13; the
older releases from 2.3 on have the same fields). The same entries give the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from agent.spill.pickles import Call, Global, Instance, Pairs, dumps
from everstep.boxes import Box, Extent

VERSION = "1.0.0"
"""CURRENT_DCP_VERSION of torch 2.13."""

Path = tuple[str | int, ...]
"""Where a value was in the nested state dict: keys of dicts, indices of lists."""

_MODULE = "torch.distributed.checkpoint.metadata"
_SIZE = Global("torch", "Size")


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A torch archive inside a file of the directory; bytes."""

    file: str
    offset: int
    length: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A box of a tensor, and the archive that holds it."""

    box: Box
    place: Place


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of the checkpoint; ``chunks`` are disjoint and make it up. ``dtype`` as torch names it, without
    ``torch.``."""

    path: Path
    dtype: str
    shape: Extent
    chunks: tuple[Chunk, ...]


class ObjectEntry(msgspec.Struct, frozen=True, array_like=True):
    """A value that is no tensor."""

    path: Path
    place: Place


def key_of(path: Path) -> str:
    """The flattened key, as torch's flatten_state_dict makes it."""
    return ".".join(map(str, path))


def encode_metadata(tensors: Sequence[TensorEntry], objects: Sequence[ObjectEntry]) -> bytes:
    """The bytes of ``.metadata``. Raises ValueError where two entries have one key."""
    entries: list[TensorEntry | ObjectEntry] = [*tensors, *objects]
    described = {key_of(t.path): _tensor(t) for t in tensors} | {key_of(o.path): _nothing() for o in objects}
    if len(described) != len(entries):
        keys = Counter(key_of(entry.path) for entry in entries)
        raise ValueError(f"several entries have the key {keys.most_common(1)[0][0]!r}")
    stored = [(_index(key_of(t.path), c.box.offset), _stored(c.place)) for t in tensors for c in t.chunks]
    stored += [(_index(key_of(o.path), None), _stored(o.place)) for o in objects]
    metadata = {
        "state_dict_metadata": described,
        "planner_data": {key_of(entry.path): tuple(entry.path) for entry in entries},
        "storage_data": Pairs(tuple(stored)),
        "storage_meta": None,
        "version": VERSION,
    }
    return dumps(Instance(Global(_MODULE, "Metadata"), metadata))


def _tensor(entry: TensorEntry) -> Instance:
    chunks = [
        Instance(
            Global(_MODULE, "ChunkStorageMetadata"),
            {"offsets": _size(chunk.box.offset), "sizes": _size(chunk.box.size)},
        )
        for chunk in entry.chunks
    ]
    # dtype, layout, requires_grad, memory format, pinned: what TensorProperties.__setstate__ takes
    contiguous = Call(Global(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    properties = Instance(
        Global(_MODULE, "TensorProperties"),
        (Global("torch", entry.dtype), Call(Global("torch.serialization", "_get_layout"), ("torch.strided",)), False)
        + (contiguous, False),
    )
    state = {"properties": properties, "size": _size(entry.shape), "chunks": chunks}
    return Instance(Global(_MODULE, "TensorStorageMetadata"), state)


def _nothing() -> Instance:
    return Instance(Global(_MODULE, "BytesStorageMetadata"), {})


def _size(extent: Extent) -> Call:
    return Call(_SIZE, (tuple(extent),))


def _index(key: str, offset: Extent | None) -> Instance:
    state = {"fqn": key, "offset": None if offset is None else _size(offset), "index": None}
    return Instance(Global(_MODULE, "MetadataIndex"), state)


def _stored(place: Place) -> Instance:
    state = {"relative_path": place.file, "offset": place.offset, "length": place.length}
    return Instance(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)
