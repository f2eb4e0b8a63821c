"""Slots of one checkpoint as DCP's metadata, and where each of its chunks lies. Nothing in it is pickled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from everstep.boxes import Box
from everstep.errors import UNREADABLE, MalformedMessage
from everstep.manifests import Manifest, Stored
from trainer_hooks.snapshot.blob import dtype_of


class Aside(msgspec.Struct, frozen=True):
    """What a slot holds besides tensors: values that are none, by name, and the paths of names in nested state."""

    values: dict[str, bytes] = {}
    paths: dict[str, tuple[str | int, ...]] = {}


_aside = msgspec.msgpack.Decoder(Aside)


def encode_aside(aside: Aside) -> bytes:
    return msgspec.msgpack.encode(aside)


def decode_aside(data: bytes) -> Aside:
    """Raises MalformedMessage."""
    try:
        return _aside.decode(data)
    except UNREADABLE as error:
        raise MalformedMessage(f"what a checkpoint's slot holds besides tensors cannot be read: {error}") from error


class Place(msgspec.Struct, frozen=True):
    """Where an item lies: in the slot of supply ``supply``; ``stored`` None: in what the slot holds besides tensors."""

    supply: int
    stored: Stored | None = None


def metadata_of(manifests: Sequence[Manifest], asides: Sequence[Aside]) -> Metadata:
    """DCP's metadata of a checkpoint from all its ranks' slots, the places of items as its ``storage_data``."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, Place] = {}
    paths: dict[str, Any] = {}
    for supply, (manifest, aside) in enumerate(zip(manifests, asides, strict=True)):
        for tensor in manifest.catalog:
            properties = TensorProperties(dtype=dtype_of(tensor.dtype))
            entries.setdefault(tensor.name, TensorStorageMetadata(properties, torch.Size(tensor.shape), []))
        for stored in manifest.stored:
            name = manifest.catalog[stored.tensor].name
            entry = entries[name]
            if not isinstance(entry, TensorStorageMetadata):
                raise MalformedMessage(f"{name} is a tensor in one slot of a checkpoint, and none in another")
            index = MetadataIndex(name, torch.Size(stored.box.offset))
            if index not in places:
                places[index] = Place(supply, stored)
                entry.chunks.append(chunk_of(stored.box))
        for name in aside.values:
            entries.setdefault(name, BytesStorageMetadata())
            places.setdefault(MetadataIndex(name), Place(supply))
        paths.update(aside.paths)
    return Metadata(state_dict_metadata=entries, planner_data=paths or None, storage_data=places)


def chunk_of(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))
