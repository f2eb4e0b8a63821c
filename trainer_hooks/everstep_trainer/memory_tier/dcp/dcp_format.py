"""Describe the slots of a checkpoint as DCP metadata with the location of each chunk, without pickle."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from everstep.errors import DECODE_ERRORS, MalformedMessage
from everstep.layout.manifests import Manifest, StoredBox
from everstep_trainer.state.python_value_codec import decode_blob, dtype_of, encode_blob


def parse_step(checkpoint_id: str | os.PathLike[str] | None) -> int:
    """Return the number at the end of the name. Raises ValueError if there is none."""
    found = re.search(r"(\d+)\D*$", os.fspath(checkpoint_id or ""))
    if found is None:
        raise ValueError(f"{checkpoint_id!r} does not end with a step number: give VaultWriter or VaultReader the step")
    return int(found[1])


class NonTensorData(msgspec.Struct, frozen=True):
    """The content of a slot besides tensors: other values by name, and the paths of names in nested state."""

    values: dict[str, bytes] = {}
    paths: dict[str, tuple[str | int, ...]] = {}


def decode_non_tensor(data: bytes) -> NonTensorData:
    """Decode the content. Raises MalformedMessage."""
    try:
        return msgspec.msgpack.decode(data, type=NonTensorData)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"the non-tensor content of a checkpoint's slot cannot be read: {error}") from error


class ItemLocation(msgspec.Struct, frozen=True):
    """Location of an item in the slot of source ``source_index``; ``stored`` None: in its content besides tensors."""

    source_index: int
    stored: StoredBox | None = None


def build_metadata(manifests: Sequence[Manifest], non_tensor: Sequence[NonTensorData]) -> metadata.Metadata:
    """Return DCP's metadata of a checkpoint from all its ranks' slots, with locations as its ``storage_data``."""
    entries: dict[str, metadata.TensorStorageMetadata | metadata.BytesStorageMetadata] = {}
    places: dict[metadata.MetadataIndex, ItemLocation] = {}
    paths: dict[str, Any] = {}
    for supply, (manifest, aside) in enumerate(zip(manifests, non_tensor, strict=True)):
        for tensor in manifest.catalog:
            properties = metadata.TensorProperties(dtype=dtype_of(tensor.dtype))
            entries.setdefault(tensor.name, metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), []))
        for stored in manifest.stored:
            name = manifest.catalog[stored.tensor].name
            entry = entries[name]
            if not isinstance(entry, metadata.TensorStorageMetadata):
                raise MalformedMessage(f"{name} is a tensor in one slot of a checkpoint, but not in another")
            index = metadata.MetadataIndex(name, torch.Size(stored.box.offset))
            if index not in places:
                places[index] = ItemLocation(supply, stored)
                box = stored.box
                entry.chunks.append(metadata.ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size)))
        for name in aside.values:
            entries.setdefault(name, metadata.BytesStorageMetadata())
            places.setdefault(metadata.MetadataIndex(name), ItemLocation(supply))
        paths.update(aside.paths)
    return metadata.Metadata(state_dict_metadata=entries, planner_data=paths or None, storage_data=places)


# torch's own planners store values that are no tensors by ``torch.save``, and read them by ``torch.load`` with
# ``weights_only=False``. An attacker who can put bytes into a peer's memory could then run code here.

PLAIN_PREFIX = b"everstep\x01"  # prefix of bytes that were stored without pickle


class VaultSavePlanner(DefaultSavePlanner):
    """torch's default planner, without pickle: values that would need it raise TypeError."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(PLAIN_PREFIX + encode_blob(object, path=write_item.index.fqn))
        return super().transform_object(write_item, object)


class VaultLoadPlanner(DefaultLoadPlanner):
    """torch's default planner, which reads values that are no tensors without pickle."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Load a value. Raises MalformedMessage for bytes that another planner stored."""
        data = value.getvalue()
        if not data.startswith(PLAIN_PREFIX):
            raise MalformedMessage(
                f"{read_item.dest_index.fqn} was stored by another planner: load it with the matching load planner"
            )
        loaded, fqn = decode_blob(data[len(PLAIN_PREFIX) :]), read_item.dest_index.fqn
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[fqn], loaded)
        else:
            self.state_dict[fqn] = loaded
