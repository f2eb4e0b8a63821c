"""What torch.save writes, without torch: a zip archive around raw bytes, which torch.load reads.

The archive of a tensor is a head, the tensor's bytes as they are, and a tail, so that a tensor of any size is written
as a stream. Nothing is compressed, data begins at multiples of 64 bytes, and times are left out: the same tensor
gives the same bytes. The records and their names are those of torch 2.13 (torch/serialization.py,
caffe2/serialize/inline_container.cc); golden tests hold them against the torch that is installed.
"""

from __future__ import annotations

import math
import re
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from agent.spill.pickles import Call, Global, Persistent, dumps
from everstep.boxes import Extent
from everstep.errors import MalformedMessage

ALIGNMENT = 64
_TYPED = {
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""Storages that have a class of their own; a tensor of another dtype says its dtype beside untyped bytes."""
_DTYPE = re.compile(r"[a-z][a-z0-9_]*")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_UTF8, _CRC_FOLLOWS = 1 << 11, 1 << 3
_FIRST_DAY = (1 << 5) | 1  # 1 January 1980, the first that a zip can say
_LIMIT32 = 0xFFFFFFFF
_VERSION, _VERSION64 = 20, 45


class RawTensor(msgspec.Struct, frozen=True):
    """A small tensor with its bytes, inside an object; ``data`` is row-major, little-endian."""

    dtype: str
    shape: Extent
    data: bytes


class TensorArchive:
    """The archive of one tensor, around bytes that come later.

    ``head``, then ``nbytes`` bytes of the tensor in row-major order, then ``tail(crc)`` make ``length`` bytes.
    Raises MalformedMessage where ``dtype`` is no torch dtype's name.
    """

    def __init__(self, dtype: str, itemsize: int, shape: Extent) -> None:
        self.nbytes = math.prod(shape) * itemsize
        self._zip = _Zip()
        self._zip.add("data.pkl", dumps(_tensor(dtype, shape, self.nbytes, "0")))
        _add_signs(self._zip)
        self._zip.begin("data/0", self.nbytes)
        self.head = bytes(self._zip.written)
        self.length = len(self.head) + self.nbytes + len(self.tail(0))

    def tail(self, crc: int) -> bytes:
        """What follows the bytes, whose zlib.crc32 is ``crc``."""
        rest = self._zip.copy()
        rest.written.clear()
        rest.end(crc, self.nbytes)
        _add_ends(rest)
        return rest.closed()


def object_archive(value: Any) -> bytes:
    """The archive of a plain value, which may contain RawTensor. Raises ConfigurationError for what is not plain."""
    found: list[RawTensor] = []
    archive = _Zip()
    archive.add("data.pkl", dumps(_with_storages(value, found)))
    _add_signs(archive)
    for index, tensor in enumerate(found):
        archive.add(f"data/{index}", tensor.data, align=True)
    _add_ends(archive)
    return archive.closed()


def _with_storages(value: Any, found: list[RawTensor]) -> Any:
    if isinstance(value, RawTensor):
        found.append(value)
        return _tensor(value.dtype, value.shape, len(value.data), str(len(found) - 1))
    if isinstance(value, dict):
        return {key: _with_storages(item, found) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_storages(item, found) for item in value)
    return value


def _tensor(dtype: str, shape: Extent, nbytes: int, key: str) -> Call:
    if not _DTYPE.fullmatch(dtype):
        raise MalformedMessage(f"{dtype!r} is no dtype's name")
    typed = _TYPED.get(dtype)
    kind = Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage")
    storage = Persistent(("storage", kind, key, "cpu", math.prod(shape) if typed else nbytes))
    hooks = Call(Global("collections", "OrderedDict"))
    arguments = (storage, 0, tuple(shape), row_major(shape), False, hooks)
    if typed:
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), arguments)
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (*arguments, Global("torch", dtype)))


def row_major(shape: Sequence[int]) -> Extent:
    """Strides in elements of a contiguous tensor, as torch has them (an empty dimension counts as one)."""
    strides, stride = [], 1
    for n in reversed(shape):
        strides.append(stride)
        stride *= max(n, 1)
    return tuple(strides[::-1])


def _add_signs(archive: _Zip) -> None:
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT).encode())
    archive.add("byteorder", b"little")


def _add_ends(archive: _Zip) -> None:
    archive.add("version", b"3\n")
    archive.add(".data/serialization_id", b"0" * 40)  # torch writes a digest of the records; nothing reads it back


class _Record(msgspec.Struct):
    name: bytes
    at: int
    size: int
    crc: int
    flags: int


class _Zip:
    """An uncompressed zip archive under ``archive/``; ``written`` is what was made of it and not taken yet."""

    def __init__(self) -> None:
        self.written = bytearray()
        self._records: list[_Record] = []
        self._at = 0

    def copy(self) -> _Zip:
        twin = _Zip()
        twin.written[:] = self.written
        twin._records = [msgspec.structs.replace(r) for r in self._records]
        twin._at = self._at
        return twin

    def add(self, name: str, data: bytes, *, align: bool = False) -> None:
        self._header(name, len(data), zlib.crc32(data), 0, align=align)
        self._put(data)

    def begin(self, name: str, size: int) -> None:
        """The header of a record whose ``size`` bytes are put by others, and whose checksum follows them."""
        self._header(name, size, 0, _CRC_FOLLOWS, align=True)

    def end(self, crc: int, size: int) -> None:
        record = self._records[-1]
        record.crc = crc
        self._at += size
        sizes = struct.pack("<QQ" if size >= _LIMIT32 else "<II", size, size)
        self._put(b"PK\x07\x08" + struct.pack("<I", crc) + sizes)

    def closed(self) -> bytes:
        """What is written, with the directory."""
        start = self._at
        for record in self._records:
            self._put(_central(record))
        size, count = self._at - start, len(self._records)
        if start >= _LIMIT32 or size >= _LIMIT32:
            end64 = self._at
            self._put(_END64.pack(b"PK\x06\x06", 44, _VERSION64, _VERSION64, 0, 0, count, count, size, start))
            self._put(_LOCATOR64.pack(b"PK\x06\x07", 0, end64, 1))
        self._put(_END.pack(b"PK\x05\x06", 0, 0, count, count, min(size, _LIMIT32), min(start, _LIMIT32), 0))
        return bytes(self.written)

    def _header(self, name: str, size: int, crc: int, flags: int, *, align: bool) -> None:
        path = f"archive/{name}".encode()
        self._records.append(_Record(path, self._at, size, crc, flags | _UTF8))
        large = size >= _LIMIT32
        sizes64 = struct.pack("<HHQQ", 1, 16, *((0, 0) if flags else (size, size))) if large else b""
        stated = 0 if flags else min(size, _LIMIT32)
        extra = sizes64 + (self._padding(len(path) + len(sizes64)) if align else b"")
        version = _VERSION64 if large else _VERSION
        stated = _LIMIT32 if large else stated
        self._put(
            _LOCAL.pack(
                b"PK\x03\x04",
                version,
                flags | _UTF8,
                0,
                0,
                _FIRST_DAY,
                crc,
                stated,
                stated,
                len(path),
                len(extra),
            )
            + path
            + extra
        )

    def _padding(self, name_and_extra: int) -> bytes:
        """An extra field, as torch writes it, that moves the data to the next multiple of ALIGNMENT."""
        begins = self._at + _LOCAL.size + name_and_extra + 4
        padding = -begins % ALIGNMENT
        return struct.pack("<2sH", b"FB", padding) + b"Z" * padding

    def _put(self, data: bytes) -> None:
        self.written += data
        self._at += len(data)


def _central(record: _Record) -> bytes:
    large = [n for n in (record.size, record.size, record.at) if n >= _LIMIT32]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = _VERSION64 if large else _VERSION
    size, at = min(record.size, _LIMIT32), min(record.at, _LIMIT32)
    fixed = _CENTRAL.pack(
        b"PK\x01\x02",
        version,
        version,
        record.flags,
        0,
        0,
        _FIRST_DAY,
        record.crc,
        size,
        size,
        len(record.name),
        len(extra),
        0,
        0,
        0,
        0,
        at,
    )
    return fixed + record.name + extra
