"""Read ordinary checkpoints one box at a time: DCP folders, torch.save files, or weights as safetensors.

Everything is checked before use: Everstep's own files against their digests, while they are read; other archives
against their own checksums (docs/decisions/0028). Only tensors and plain values are unpickled: archives by torch's
restricted reader (``weights_only=True``), and ``.metadata`` by a reader that accepts only the classes torch writes
there.
"""

from __future__ import annotations

import io
import math
import pathlib
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, BinaryIO

import msgspec
import torch
import xxhash
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo

from everstep.errors import DECODE_ERRORS, ConfigurationError, DigestMismatch, MalformedMessage, NotRestorable
from everstep.layout.digests import DIGESTS_FILE, decode_digests
from everstep.layout.manifests import Box, Extent, full_box
from everstep.layout.object_storage import filesystem_of
from everstep_trainer.importers.storage_reads import DamagedCheckpoint, MappedArchive, check_archive, fetch_to_local
from everstep_trainer.slots.copy import view_of_box
from everstep_trainer.state.optimizer_state import map_tensors

KeyPath = tuple[str | int, ...]


class CheckpointReader:
    """A checkpoint's content by flattened key; ``paths`` has each key's path in the nested state dict."""

    paths: Mapping[str, KeyPath]
    tensors: Mapping[str, tuple[torch.dtype, Extent]]

    def __init__(self, url: str, filesystem: Any, folder: str) -> None:
        self.url = url
        self._fs = filesystem
        self._folder = folder

    def read(self, key: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Yield disjoint parts that make up ``box``, with values. Raises DamagedCheckpoint, or OSError."""
        raise NotImplementedError

    def read_value(self, key: str) -> Any:
        """Return a tensor or another value. Raises NotRestorable for pickles, DamagedCheckpoint or OSError."""
        dtype, shape = self.tensors[key]
        value = torch.empty(shape, dtype=dtype)
        for box, part in self.read(key, full_box(shape)):
            view_of_box(value, full_box(shape), box).copy_(part)
        return value

    def storage_identity(self, key: str) -> object:
        """Return the location of a tensor; tensors that are tied, or were when they were stored, share one."""
        raise NotImplementedError

    def close(self) -> None:
        """Release a fetched file, once all ranks of the node have opened it; reads stay valid."""

    def _bytes(self, name: str, offset: int = 0, length: int = -1) -> bytes:
        try:
            with self._fs.open(f"{self._folder}/{name}", "rb") as file:
                file.seek(offset)
                data = bytes(file.read(length))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamagedCheckpoint(f"{self.url}: {name} is missing") from error
        if len(data) < length:
            raise DamagedCheckpoint(f"{self.url}/{name} is too short: it ends {length - len(data)} bytes early")
        return data


# ---- safetensors files: weights in one or several files with an index, as transformers' ``save_pretrained`` writes
#
# Such a file is the length of its header (8 bytes, little-endian), that header in JSON, and the bytes of all tensors.
# It cannot contain code, and it has no checksum to detect a flipped bit.

SAFETENSORS_SUFFIX = ".safetensors"
SAFETENSORS_INDEX = f"{SAFETENSORS_SUFFIX}.index.json"
MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
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


class _SafetensorsEntry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def find_weights_file(filesystem: Any, folder: str) -> str:
    """Return the index, or the only weights file, of a folder; empty if it has neither. Raises NotRestorable."""
    names = sorted(_names_in(filesystem, folder))
    found = [n for n in names if n.endswith(SAFETENSORS_INDEX)] or [n for n in names if n.endswith(SAFETENSORS_SUFFIX)]
    usual = [name for name in found if name.startswith("model.")]
    if len(usual or found) > 1:
        raise NotRestorable(f"{folder} has {', '.join(found)}: name the one to start from")
    return f"{folder}/{(usual or found)[0]}" if found else ""


class SafetensorsCheckpoint(CheckpointReader):
    """A checkpoint of weights alone, in safetensors files. Raises DamagedCheckpoint, or NotRestorable for a dtype."""

    def __init__(self, url: str, filesystem: Any, path: str) -> None:
        folder, _, name = path.rpartition("/")
        super().__init__(url, filesystem, folder)
        self._locations: dict[str, tuple[str, int]] = {}  # the file of each tensor, and where its bytes begin in it
        tensors: dict[str, tuple[torch.dtype, Extent]] = {}
        if name.endswith(SAFETENSORS_INDEX):
            index = self._decoded(name, self._bytes(name), _Index)
            files: dict[str, set[str]] = defaultdict(set)
            for key, file in index.weight_map.items():
                files[file].add(key)
            for file, wanted in files.items():
                self._add_file(file, wanted, tensors)
        else:
            self._add_file(name, None, tensors)
        self.tensors = tensors
        self.paths = {key: (key,) for key in self.tensors}

    def read(self, key: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        """Read the rows that contain the box, and no others."""
        dtype, shape = self.tensors[key]
        rows = full_box(shape)
        if shape:
            rows = Box((box.offset[0], *rows.offset[1:]), (box.size[0], *shape[1:]))
        (file, start), row = self._locations[key], math.prod(shape[1:]) * dtype.itemsize
        data = self._bytes(file, start + sum(rows.offset) * row, rows.volume * dtype.itemsize)
        value = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        yield box, view_of_box(value.view(dtype).reshape(rows.size), rows, box)

    def storage_identity(self, key: str) -> object:
        return self._locations[key]

    def _add_file(self, file: str, keys: set[str] | None, tensors: dict[str, tuple[torch.dtype, Extent]]) -> None:
        """Add a file's tensors: all, or those that the index lists."""
        length = int.from_bytes(self._bytes(file, 0, 8), "little")
        size = int(self._fs.size(f"{self._folder}/{file}"))
        if length > min(size - 8, MAX_HEADER_BYTES):
            raise DamagedCheckpoint(f"{self._folder}/{file} is not a complete safetensors file")
        header = self._decoded(file, self._bytes(file, 8, length), dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        if lacking := sorted((keys or set()) - header.keys()):
            raise DamagedCheckpoint(f"{self._folder}/{file} has no {lacking[0]}, which the index lists there")
        for key in header.keys() if keys is None else keys:
            entry = self._decoded(file, header[key], _SafetensorsEntry)
            dtype = _DTYPES.get(entry.dtype)
            if dtype is None:
                raise NotRestorable(f"{self._folder}/{file}: {key} is of {entry.dtype}, which torch does not have")
            begin, end = entry.data_offsets
            if end - begin != math.prod(entry.shape) * dtype.itemsize or not 0 <= begin <= end <= size - 8 - length:
                raise DamagedCheckpoint(f"{self._folder}/{file} is damaged: the offsets of {key} contradict its shape")
            self._locations[key] = file, 8 + length + begin
            tensors[key] = dtype, entry.shape

    def _decoded(self, file: str, data: bytes | msgspec.Raw, kind: Any) -> Any:
        try:
            return msgspec.json.decode(data, type=kind)
        except DECODE_ERRORS as error:
            raise DamagedCheckpoint(f"{self._folder}/{file} is not a safetensors file: {error}") from error


_SPILL_FOLDER = re.compile(r"step-\d+-g\d+")


def _member(kind: object, name: str) -> object:
    """Return a member of an enumeration, as Python 3.11.2 and earlier pickle it: ``getattr(kind, name)``."""
    if kind is not dcp._MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"getattr of {kind!r} has no place in a checkpoint's metadata")
    return dcp._MEM_FORMAT_ENCODING[name]


_ALLOWED_CLASSES = {
    ("builtins", "getattr"): _member,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    ("collections", "OrderedDict"): dict,
    ("pathlib", "PosixPath"): pathlib.PurePosixPath,  # the original path: not used here
    ("pathlib._local", "PosixPath"): pathlib.PurePosixPath,
} | {
    ("torch.distributed.checkpoint.metadata", kind.__name__): kind
    for kind in (
        dcp.Metadata,
        dcp.MetadataIndex,
        dcp.TensorStorageMetadata,
        dcp.BytesStorageMetadata,
        dcp.ChunkStorageMetadata,
        dcp.TensorProperties,
        dcp.StorageMeta,
        dcp._MEM_FORMAT_ENCODING,
    )
}


def find_checkpoints(url: str) -> list[str]:
    """Return the checkpoints at a URL: itself, or those in it, newest first. Raises NotRestorable or OSError."""
    filesystem, path = _resolve_url(url)
    filesystem.invalidate_cache()
    if filesystem.isfile(path) or filesystem.isfile(f"{path}/.metadata"):
        return [url]
    if weights := find_weights_file(filesystem, path):
        return [f"{url.rstrip('/')}/{weights.rpartition('/')[2]}"]
    found = [f"{url.rstrip('/')}/{name}" for name in _newest_first(filesystem, path)]
    if not found:
        raise NotRestorable(
            f"{url} is not a checkpoint to start from: a torch.save file, a folder with .metadata or safetensors "
            "files, or a folder of Everstep checkpoints (step-00001234-g7)"
        )
    return found


def open_checkpoint(url: str) -> CheckpointReader:
    """Open a checkpoint that ``find_checkpoints`` returned. Raises NotRestorable, DamagedCheckpoint or OSError."""
    filesystem, path = _resolve_url(url)
    if path.endswith((SAFETENSORS_SUFFIX, SAFETENSORS_INDEX)):
        return SafetensorsCheckpoint(url, filesystem, path)
    kind = TorchFileCheckpoint if filesystem.isfile(path) else DcpCheckpoint
    return kind(url, filesystem, path)


def _resolve_url(url: str) -> tuple[Any, str]:
    try:
        filesystem, path = filesystem_of(url)
    except (ImportError, ValueError) as error:
        raise ConfigurationError(f"cannot open {url!r}: {error}") from error
    return filesystem, path.rstrip("/")


def _newest_first(filesystem: Any, path: str) -> list[str]:
    """Return names by the time they were written: a job restarted from storage counts generations from 1 again."""
    found = []
    for name in filter(_SPILL_FOLDER.fullmatch, _names_in(filesystem, path)):
        with suppress(FileNotFoundError):  # incomplete, or removed meanwhile
            found.append((filesystem.modified(f"{path}/{name}/.metadata"), name))
    return [name for _, name in sorted(found, reverse=True)]


def _names_in(filesystem: Any, folder: str) -> list[str]:
    entries = filesystem.ls(folder, detail=False) if filesystem.isdir(folder) else ()
    return [entry.rstrip("/").rpartition("/")[2] for entry in entries]


class _MetadataReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _ALLOWED_CLASSES.get((module, name))
        if known is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            known = getattr(torch, name)
        if known is None:
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata")
        return known


class DcpCheckpoint(CheckpointReader):
    """A folder written by torch.distributed.checkpoint.save or a vault."""

    def __init__(self, url: str, filesystem: Any, path: str) -> None:
        super().__init__(url, filesystem, path)
        body = self._bytes(".metadata")
        self._digests = self._digests_with(body)
        try:
            metadata = _MetadataReader(io.BytesIO(body)).load()
        except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise DamagedCheckpoint(f"{url}/.metadata cannot be read: {error}") from error
        if not isinstance(metadata, dcp.Metadata) or not isinstance(metadata.storage_data, dict):
            raise NotRestorable(f"{url}/.metadata was not written by torch.distributed.checkpoint")
        self._described = metadata.state_dict_metadata
        self._stored: dict[dcp.MetadataIndex, _StorageInfo] = metadata.storage_data
        paths: Mapping[str, KeyPath] = metadata.planner_data or {}
        self.paths = {key: paths.get(key) or tuple(key.split(".")) for key in self._described}
        self.tensors = {
            key: (entry.properties.dtype, tuple(entry.size))
            for key, entry in self._described.items()
            if isinstance(entry, dcp.TensorStorageMetadata)
        }

    def read(self, key: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        entry = self._described[key]
        assert isinstance(entry, dcp.TensorStorageMetadata)
        filled = 0
        for chunk in entry.chunks:
            held = Box(tuple(chunk.offsets), tuple(chunk.sizes))
            common = held.intersect(box)
            if common is None:
                continue
            tensor = self._load(key, dcp.MetadataIndex(key, chunk.offsets))
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != held.size:
                raise DamagedCheckpoint(f"{self.url}: the stored part of {key} at {held.offset} contradicts .metadata")
            filled += common.volume
            yield common, view_of_box(tensor, held, common)
        if filled != box.volume:
            raise DamagedCheckpoint(f"{self.url}: parts of {key} are missing or duplicated")

    def read_value(self, key: str) -> Any:
        return super().read_value(key) if key in self.tensors else self._load(key, dcp.MetadataIndex(key))

    def storage_identity(self, key: str) -> object:
        entry = self._described[key]
        assert isinstance(entry, dcp.TensorStorageMetadata)
        indices = (dcp.MetadataIndex(key, chunk.offsets) for chunk in entry.chunks)
        return tuple((at.relative_path, at.offset) for at in map(self._stored.get, indices) if at is not None) or key

    def _load(self, key: str, index: dcp.MetadataIndex) -> Any:
        info = self._stored.get(index)
        if info is None:
            raise DamagedCheckpoint(f"{self.url}: .metadata has no location of {key}")
        if getattr(info, "transform_descriptors", None):
            raise NotRestorable(f"{self.url}: {key} was written through an extension ({info.transform_descriptors})")
        data, place = self._bytes(info.relative_path, info.offset, info.length), f"{self.url}/{info.relative_path}"
        if self._digests is None:
            check_archive(data, f"{place} at {info.offset}")
        elif self._digests.get((info.relative_path, info.offset)) != (info.length, xxhash.xxh3_128_digest(data)):
            raise DamagedCheckpoint(f"{place} is damaged: {info.length} bytes at {info.offset} have the wrong digest")
        return _load_restricted(io.BytesIO(data), f"{place}: {key}")

    def _digests_with(self, metadata: bytes) -> dict[tuple[str, int], tuple[int, bytes]] | None:
        """Return length and digest of each archive by file and offset; None for folders of others or early releases."""
        try:
            body = self._bytes(DIGESTS_FILE)
        except DamagedCheckpoint:
            return None
        try:
            digests = decode_digests(body)
        except DigestMismatch as error:
            raise DamagedCheckpoint(f"{self.url}: {error}") from error
        except MalformedMessage as error:
            raise NotRestorable(f"{self.url}: {error}") from error
        if digests.metadata != xxhash.xxh3_128_digest(metadata):
            raise DamagedCheckpoint(f"{self.url}/.metadata is damaged: it has the wrong digest")
        return {
            (name, digest.offset): (digest.length, digest.digest)
            for name, all_ in digests.files.items()
            for digest in all_
        }


def _load_restricted(file: BinaryIO, label: str, **options: Any) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        raise NotRestorable(
            f"{label} cannot be read without running code that is stored in it. If you trust it, load it with "
            f"torch.load(..., weights_only=False) and save the tensors and plain values again. ({error})"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise DamagedCheckpoint(f"{label} was not written by torch.save: {error}") from error


class TorchFileCheckpoint(CheckpointReader):
    """A mapped torch.save file of nested dictionaries; a remote one is fetched first."""

    def __init__(self, url: str, filesystem: Any, path: str) -> None:
        super().__init__(url, filesystem, path)
        self._fetched: pathlib.Path | None = None
        if "file" in filesystem.protocol:
            self._archive = self._mapped(path, path)
        else:
            with fetch_to_local(filesystem, path, url) as local:
                self._archive = self._mapped(str(local), url)
                self._fetched = local
        state = self._archive.content
        if not isinstance(state, Mapping):
            raise NotRestorable(f"{url} holds a {type(state).__qualname__}, not a dictionary of state")
        leaves = dict(_leaves((), state))
        self.paths = {".".join(map(str, path)): path for path in leaves}
        self._values = {key: leaves[path] for key, path in self.paths.items()}
        self.tensors = {
            key: (value.dtype, tuple(value.shape))
            for key, value in self._values.items()
            if isinstance(value, torch.Tensor)
        }

    def read(self, key: str, box: Box) -> Iterator[tuple[Box, torch.Tensor]]:
        value = self._values[key]
        self._archive.check(value)
        yield box, view_of_box(value, full_box(tuple(value.shape)), box)

    def read_value(self, key: str) -> Any:
        self._archive.check(self._values[key])
        return map_tensors(self._values[key], torch.clone)  # a clone, since callers may write to it

    def storage_identity(self, key: str) -> object:
        value = self._values[key]
        return (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else key

    def close(self) -> None:
        if self._fetched is not None:
            self._fetched.unlink(missing_ok=True)  # existing mappings stay valid, here and in other ranks

    def _mapped(self, path: str, label: str) -> MappedArchive:
        load = partial(_load_restricted, path, self.url, mmap=True)  # type: ignore[arg-type]  # torch maps only a path's file
        return MappedArchive(path, label, load)


def _leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
    """Yield leaves as torch.distributed.checkpoint flattens, except that keys keep their type."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves((*path, key), item)
    elif isinstance(value, list) and any(isinstance(item, Mapping | torch.Tensor) for item in value):
        for index, item in enumerate(value):
            yield from _leaves((*path, index), item)
    else:
        yield path, value
