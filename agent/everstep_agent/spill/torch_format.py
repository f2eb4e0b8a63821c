"""Write torch.save's format without torch: a zip archive around raw bytes, readable by torch.load.

A tensor's archive is a head, the tensor's bytes, and a tail, so that a tensor of any size is written as a stream.
Nothing is compressed, data begins at multiples of 64 bytes, and times are left out. Records and names are those of
torch 2.13 (torch/serialization.py, caffe2/serialize/inline_container.cc); golden tests compare them with the installed
torch.
"""

from __future__ import annotations

import math
import pickle
import re
import struct
import zlib
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import msgspec

from everstep.errors import ConfigurationError, MalformedMessage
from everstep.layout.manifests import Extent

# Pickles written without importing the classes they name: the daemon has no torch. Protocol 2, limited to what torch's
# restricted reader (``weights_only=True``) accepts. The same value always gives the same bytes.

_GLOBAL = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_SMALL_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)
_CONSTANTS = {None: pickle.NONE, True: pickle.NEWTRUE, False: pickle.NEWFALSE}


class Global(msgspec.Struct, frozen=True):
    """A class, a function or another object by its module and name."""

    module: str
    name: str


class PickledCall(msgspec.Struct, frozen=True):
    """A call ``function(*arguments)`` made by the reader."""

    function: Global
    arguments: tuple[Any, ...] = ()


class Instance(msgspec.Struct, frozen=True):
    """``kind`` made without arguments, then given ``state``: its attributes, or the argument of its __setstate__."""

    kind: Global
    state: Any


class PersistentId(msgspec.Struct, frozen=True):
    """A persistent id, resolved by the reader; a torch archive's storages are such."""

    identity: tuple[Any, ...]


class DictItems(msgspec.Struct, frozen=True):
    """A dict by its items, for keys that are made in the reader."""

    items: tuple[tuple[Any, Any], ...]


def dumps(value: Any) -> bytes:
    """Pickle None, bool, int, float, complex, str, bytes, tuple, list, dict, set, and the kinds above."""
    writer = _PickleWriter()
    writer.write(value)
    return bytes(writer.out + pickle.STOP)


class _PickleWriter:
    def __init__(self) -> None:
        self.out = bytearray(pickle.PROTO + b"\x02")
        self._memo: dict[Global, int] = {}

    def write(self, value: Any) -> None:
        write = _PICKLE_WRITERS.get(type(value))
        if write is None:
            raise ConfigurationError(f"a {type(value).__qualname__} cannot be written as a pickle of plain values")
        write(self, value)

    def _constant(self, value: bool | None) -> None:
        self.out += _CONSTANTS[value]

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += pickle.BININT1 + struct.pack("<B", value)
        elif 0 <= value < 1 << 16:
            self.out += pickle.BININT2 + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += pickle.BININT + struct.pack("<i", value)
        else:
            raw = pickle.encode_long(value)
            if len(raw) > 255:
                raise ConfigurationError(f"an integer of {len(raw)} bytes is too long for a checkpoint's plain values")
            self.out += pickle.LONG1 + struct.pack("<B", len(raw)) + raw

    def _float(self, value: float) -> None:
        self.out += pickle.BINFLOAT + struct.pack(">d", value)

    def _complex(self, value: complex) -> None:
        self._call(PickledCall(Global("builtins", "complex"), (value.real, value.imag)))

    def _str(self, value: str) -> None:
        raw = value.encode("utf-8", "surrogatepass")
        self.out += pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw

    def _bytes(self, value: bytes) -> None:
        self._call(PickledCall(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1")))

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) >= len(_SMALL_TUPLES):
            self.out += pickle.MARK
        for item in value:
            self.write(item)
        self.out += _SMALL_TUPLES[len(value)] if len(value) < len(_SMALL_TUPLES) else pickle.TUPLE

    def _list(self, value: list[Any]) -> None:
        self.out += pickle.EMPTY_LIST
        if value:
            self.out += pickle.MARK
            for item in value:
                self.write(item)
            self.out += pickle.APPENDS

    def _dict(self, value: dict[Any, Any]) -> None:
        self._pairs(DictItems(tuple(value.items())))

    def _pairs(self, value: DictItems) -> None:
        self.out += pickle.EMPTY_DICT
        if value.items:
            self.out += pickle.MARK
            for key, item in value.items:
                self.write(key)
                self.write(item)
            self.out += pickle.SETITEMS

    def _set(self, value: set[Any]) -> None:
        self._call(PickledCall(Global("builtins", "set"), (sorted(value, key=lambda v: (type(v).__name__, repr(v))),)))

    def _global(self, value: Global) -> None:
        if value in self._memo:
            self.out += pickle.BINGET + struct.pack("<B", self._memo[value])
            return
        if not (_GLOBAL.fullmatch(value.module) and _GLOBAL.fullmatch(value.name)):
            raise ConfigurationError(f"{f'{value.module}.{value.name}'!r} is not a valid name to import")
        self.out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        if len(self._memo) < 256:
            self.out += pickle.BINPUT + struct.pack("<B", len(self._memo))
            self._memo[value] = len(self._memo)

    def _call(self, value: PickledCall) -> None:
        self._global(value.function)
        self._tuple(value.arguments)
        self.out += pickle.REDUCE

    def _instance(self, value: Instance) -> None:
        self._global(value.kind)
        self.out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        self.write(value.state)
        self.out += pickle.BUILD

    def _persistent(self, value: PersistentId) -> None:
        self._tuple(value.identity)
        self.out += pickle.BINPERSID


_PICKLE_WRITERS: dict[type, Any] = {
    type(None): _PickleWriter._constant,
    bool: _PickleWriter._constant,
    int: _PickleWriter._int,
    float: _PickleWriter._float,
    complex: _PickleWriter._complex,
    str: _PickleWriter._str,
    bytes: _PickleWriter._bytes,
    tuple: _PickleWriter._tuple,
    list: _PickleWriter._list,
    dict: _PickleWriter._dict,
    set: _PickleWriter._set,
    Global: _PickleWriter._global,
    PickledCall: _PickleWriter._call,
    Instance: _PickleWriter._instance,
    PersistentId: _PickleWriter._persistent,
    DictItems: _PickleWriter._pairs,
}


ALIGNMENT = 64
_STORAGE_TYPES = {
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
"""Storages with a class of their own; a tensor of another dtype names its dtype beside untyped bytes."""
_DTYPE = re.compile(r"[a-z][a-z0-9_]*")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_CENTRAL = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")
_UTF8, _CRC_FOLLOWS = 1 << 11, 1 << 3
_FIRST_DAY = (1 << 5) | 1  # 1 January 1980, the earliest date of a zip
_LIMIT32 = 0xFFFFFFFF
_VERSION, _VERSION64 = 20, 45


class RawTensor(msgspec.Struct, frozen=True):
    """A small tensor with its bytes, inside an object; ``data`` is row-major, little-endian."""

    dtype: str
    shape: Extent
    data: bytes


class TensorArchive:
    """The archive of one tensor, of ``length`` bytes: ``head``, ``nbytes`` bytes in row-major order, ``tail(crc)``."""

    def __init__(self, dtype: str, itemsize: int, shape: Extent) -> None:
        self.nbytes = math.prod(shape) * itemsize
        self._zip = _Zip()
        self._zip.add("data.pkl", dumps(_tensor(dtype, shape, self.nbytes, "0")))
        _add_format_records(self._zip)
        self._zip.begin("data/0", self.nbytes)
        self.head = bytes(self._zip.buffer)
        self.length = len(self.head) + self.nbytes + len(self.tail(0))

    def tail(self, crc: int) -> bytes:
        """Return the bytes after the data, whose zlib.crc32 is ``crc``."""
        rest = deepcopy(self._zip)
        rest.buffer.clear()
        rest.end(crc, self.nbytes)
        _add_version_records(rest)
        return rest.finish()


def object_archive(value: Any) -> bytes:
    """Return the archive of a plain value, which may contain RawTensor. Raises ConfigurationError for other values."""
    found: list[RawTensor] = []
    archive = _Zip()
    archive.add("data.pkl", dumps(_with_storages(value, found)))
    _add_format_records(archive)
    for index, tensor in enumerate(found):
        archive.add(f"data/{index}", tensor.data, align=True)
    _add_version_records(archive)
    return archive.finish()


def _with_storages(value: Any, found: list[RawTensor]) -> Any:
    if isinstance(value, RawTensor):
        found.append(value)
        return _tensor(value.dtype, value.shape, len(value.data), str(len(found) - 1))
    if isinstance(value, dict):
        return {key: _with_storages(item, found) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_storages(item, found) for item in value)
    return value


def _tensor(dtype: str, shape: Extent, nbytes: int, key: str) -> PickledCall:
    if not _DTYPE.fullmatch(dtype):
        raise MalformedMessage(f"{dtype!r} is not the name of a dtype")
    typed = _STORAGE_TYPES.get(dtype)
    kind = Global("torch", typed) if typed else Global("torch.storage", "UntypedStorage")
    storage = PersistentId(("storage", kind, key, "cpu", math.prod(shape) if typed else nbytes))
    hooks = PickledCall(Global("collections", "OrderedDict"))
    arguments = (storage, 0, tuple(shape), row_major(shape), False, hooks)
    if typed:
        return PickledCall(Global("torch._utils", "_rebuild_tensor_v2"), arguments)
    return PickledCall(Global("torch._utils", "_rebuild_tensor_v3"), (*arguments, Global("torch", dtype)))


def row_major(shape: Sequence[int]) -> Extent:
    """Return the strides in elements of a contiguous tensor, as in torch (an empty dimension counts as one)."""
    strides, stride = [], 1
    for n in reversed(shape):
        strides.append(stride)
        stride *= max(n, 1)
    return tuple(strides[::-1])


def _add_format_records(archive: _Zip) -> None:
    archive.add(".format_version", b"1")
    archive.add(".storage_alignment", str(ALIGNMENT).encode())
    archive.add("byteorder", b"little")


def _add_version_records(archive: _Zip) -> None:
    archive.add("version", b"3\n")
    # torch writes a digest of the records here, which no reader checks
    archive.add(".data/serialization_id", b"0" * 40)


class _ZipEntry(msgspec.Struct):
    name: bytes
    offset: int
    size: int
    crc: int
    flags: int


class _Zip:
    """An uncompressed zip archive under ``archive/``. ``buffer`` holds the bytes not taken yet."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self._records: list[_ZipEntry] = []
        self._at = 0

    def add(self, name: str, data: bytes, *, align: bool = False) -> None:
        self._header(name, len(data), zlib.crc32(data), 0, align=align)
        self._put(data)

    def begin(self, name: str, size: int) -> None:
        """Write the header of a record whose ``size`` bytes are written elsewhere, and whose checksum follows them."""
        self._header(name, size, 0, _CRC_FOLLOWS, align=True)

    def end(self, crc: int, size: int) -> None:
        self._records[-1].crc = crc
        self._at += size
        sizes = struct.pack("<QQ" if size >= _LIMIT32 else "<II", size, size)
        self._put(b"PK\x07\x08" + struct.pack("<I", crc) + sizes)

    def finish(self) -> bytes:
        """Write the directory and return the buffer."""
        start = self._at
        for record in self._records:
            self._put(_central(record))
        size, count = self._at - start, len(self._records)
        if start >= _LIMIT32 or size >= _LIMIT32:
            end64 = self._at
            self._put(_END64.pack(b"PK\x06\x06", 44, _VERSION64, _VERSION64, 0, 0, count, count, size, start))
            self._put(_LOCATOR64.pack(b"PK\x06\x07", 0, end64, 1))
        self._put(_END.pack(b"PK\x05\x06", 0, 0, count, count, min(size, _LIMIT32), min(start, _LIMIT32), 0))
        return bytes(self.buffer)

    def _header(self, name: str, size: int, crc: int, flags: int, *, align: bool) -> None:
        path = f"archive/{name}".encode()
        self._records.append(_ZipEntry(path, self._at, size, crc, flags | _UTF8))
        large = size >= _LIMIT32
        stated = 0 if flags else size
        sizes64 = struct.pack("<HHQQ", 1, 16, stated, stated) if large else b""
        extra = sizes64 + (self._padding(len(path) + len(sizes64)) if align else b"")
        version, stated = (_VERSION64, _LIMIT32) if large else (_VERSION, stated)
        fields = (b"PK\x03\x04", version, flags | _UTF8, 0, 0, _FIRST_DAY, crc, stated, stated, len(path), len(extra))
        self._put(_LOCAL.pack(*fields) + path + extra)

    def _padding(self, name_and_extra: int) -> bytes:
        """Return an extra field, as torch writes it, that moves the data to the next multiple of ALIGNMENT."""
        begins = self._at + _LOCAL.size + name_and_extra + 4
        padding = -begins % ALIGNMENT
        return struct.pack("<2sH", b"FB", padding) + b"Z" * padding

    def _put(self, data: bytes) -> None:
        self.buffer += data
        self._at += len(data)


def _central(record: _ZipEntry) -> bytes:
    large = [n for n in (record.size, record.size, record.offset) if n >= _LIMIT32]
    extra = struct.pack(f"<HH{len(large)}Q", 1, 8 * len(large), *large) if large else b""
    version = _VERSION64 if large else _VERSION
    size, at = min(record.size, _LIMIT32), min(record.offset, _LIMIT32)
    fields = (b"PK\x01\x02", version, version, record.flags, 0, 0, _FIRST_DAY, record.crc, size, size)
    return _CENTRAL.pack(*fields, len(record.name), len(extra), 0, 0, 0, 0, at) + record.name + extra
