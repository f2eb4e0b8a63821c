"""Weights as safetensors files, one or several with an index, read a box at a time: what transformers'
``save_pretrained`` writes. Such a file is the length of its header (8 bytes, little-endian), that header in JSON, and
the bytes of all tensors: nothing of it can be code, and nothing tells a flipped bit.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch

from everstep.boxes import Box, Extent, whole
from everstep.errors import UNREADABLE, NotRestorable
from trainer_hooks.archive_checks import Damaged
from trainer_hooks.snapshot.copy import part_of

SUFFIX = ".safetensors"
INDEX = f"{SUFFIX}.index.json"
MOST_HEADER_BYTES = 100_000_000
"""As the format's own library has it."""
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
}


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Place(msgspec.Struct, frozen=True):
    """Of a tensor: its file, and where its bytes begin in that."""

    file: str
    at: int


def weights_in(filesystem: Any, folder: str) -> str:
    """The index, or the one file of weights, that a folder has; empty where it has neither.

    Raises NotRestorable where it has several.
    """
    if not filesystem.isdir(folder):
        return ""
    names = sorted(entry.rstrip("/").rpartition("/")[2] for entry in filesystem.ls(folder, detail=False))
    found = [n for n in names if n.endswith(INDEX)] or [n for n in names if n.endswith(SUFFIX)]
    usual = [name for name in found if name.startswith("model.")]
    if len(usual or found) > 1:
        raise NotRestorable(f"{folder} has {', '.join(found)}: name the one to start from")
    return f"{folder}/{(usual or found)[0]}" if found else ""


class Safetensors:
    """A checkpoint (trainer_hooks.plain_files) of weights alone.

    Raises Damaged where a file is not whole, or no safetensors file; NotRestorable for tensors that torch cannot hold.
    """

    def __init__(self, url: str, filesystem: Any, path: str) -> None:
        self.url = url
        self._fs = filesystem
        self._folder, _, name = path.rpartition("/")
        self._places: dict[str, _Place] = {}
        self._tensors: dict[str, tuple[torch.dtype, Extent]] = {}
        if name.endswith(INDEX):
            index = self._decoded(name, self._bytes(name, 0, None), _Index)
            files: dict[str, set[str]] = defaultdict(set)
            for key, file in index.weight_map.items():
                files[file].add(key)
            for file, wanted in files.items():
                self._take(file, wanted)
        else:
            self._take(name, None)
        self.tensors: Mapping[str, tuple[torch.dtype, Extent]] = self._tensors
        self.paths: Mapping[str, tuple[str | int, ...]] = {key: (key,) for key in self.tensors}

    def read(self, key: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """The rows that the box lies in are read, and no others."""
        dtype, shape = self.tensors[key]
        rows = whole(shape)
        if shape:
            rows = Box((box.offset[0], *rows.offset[1:]), (box.size[0], *shape[1:]))
        place, row = self._places[key], math.prod(shape[1:]) * dtype.itemsize
        data = self._bytes(place.file, place.at + sum(rows.offset) * row, rows.volume * dtype.itemsize)
        value = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        yield box, part_of(value.view(dtype).reshape(rows.size), rows, box)

    def value(self, key: str) -> Any:
        ((_, value),) = self.read(key, whole(self.tensors[key][1]))
        return value

    def origin(self, key: str) -> object:
        return self._places[key]

    def close(self) -> None:
        """Nothing was fetched."""

    def _take(self, file: str, wanted: set[str] | None) -> None:
        """What a file has, all of it or the tensors that the index says it has."""
        size = self._size(file)
        length = int.from_bytes(self._bytes(file, 0, 8), "little")
        if length > min(size - 8, MOST_HEADER_BYTES):
            raise Damaged(f"{self._folder}/{file} is no safetensors file, or not all of it")
        header = self._decoded(file, self._bytes(file, 8, length), dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        if lacking := sorted((wanted or set()) - header.keys()):
            raise Damaged(f"{self._folder}/{file} has no {lacking[0]}, which the index says is there")
        for key in header.keys() if wanted is None else wanted:
            entry = self._decoded(file, header[key], _Entry)
            dtype = _DTYPES.get(entry.dtype)
            if dtype is None:
                raise NotRestorable(f"{self._folder}/{file}: {key} is of {entry.dtype}, which torch has no tensors of")
            begin, end = entry.data_offsets
            if end - begin != math.prod(entry.shape) * dtype.itemsize or not 0 <= begin <= end <= size - 8 - length:
                raise Damaged(f"{self._folder}/{file} is not whole: the place of {key} is not what its shape says")
            self._places[key] = _Place(file, 8 + length + begin)
            self._tensors[key] = dtype, entry.shape

    def _decoded(self, file: str, data: bytes | msgspec.Raw, kind: Any) -> Any:
        try:
            return msgspec.json.decode(data, type=kind)
        except UNREADABLE as error:
            raise Damaged(f"{self._folder}/{file} is no safetensors file: {error}") from error

    def _size(self, file: str) -> int:
        try:
            return int(self._fs.size(f"{self._folder}/{file}"))
        except FileNotFoundError as error:
            raise Damaged(f"{self.url}: {file} is missing") from error

    def _bytes(self, file: str, offset: int, length: int | None) -> bytes:
        try:
            with self._fs.open(f"{self._folder}/{file}", "rb") as opened:
                opened.seek(offset)
                data = bytes(opened.read(-1 if length is None else length))
        except FileNotFoundError as error:
            raise Damaged(f"{self.url}: {file} is missing") from error
        if length is not None and len(data) != length:
            raise Damaged(f"{self._folder}/{file} is too short: it ends {length - len(data)} bytes early")
        return data
