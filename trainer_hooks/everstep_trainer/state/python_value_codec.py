"""Encode small Python state as bytes and back: MessagePack, no pickle.

These types survive the round trip: numbers, strings, bytes, None, lists, tuples, dicts, sets, collections.OrderedDict
and Counter, torch.Size, integers of any size, tensors, numpy arrays and scalars, torch dtypes and devices. Members of
an enumeration and other subclasses of numbers, strings or bytes come back as their base type. Anything else, including
other kinds of dictionaries and tuples, is a TypeError that names the path to it.

Tensors on a GPU are copied to the host behind the work already enqueued there. ``Blob.data`` waits for the copy;
making the Blob does not.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor

from everstep.errors import DECODE_ERRORS, ConfigurationError, MalformedMessage
from everstep_trainer.state.supported import require_own_memory

MAX_BLOB_BYTES = 8 << 20
KEEP_TENSORS_IN = (
    "keep large tensors in a module that is tracked, where they are stored in parts: torch.nn.ParameterList(...) of "
    "them, or torch.optim.swa_utils.AveragedModel for averaged weights; or each by a name of its own in an optimizer's "
    "state"
)
MAX_DEPTH = 32  # deeper nesting is taken for a cycle

_TUPLE, _SET, _FROZENSET, _INTEGER, _TENSOR, _ARRAY, _SCALAR, _DTYPE, _DEVICE, _COMPLEX, _MAPPING = range(1, 12)
_COUNTER, _ORDERED, _SIZE = range(12, 15)
_PLAIN_KEYS = (str, float, bool, bytes, type(None))
_AS_IT_IS = frozenset({float, bool, bytes, type(None)})
_ARRAY_KINDS = frozenset("biufc")
_ARRAYS = (np.ndarray, np.memmap)
_MAPPINGS: dict[type, int] = {Counter: _COUNTER, OrderedDict: _ORDERED}
_TUPLES: dict[type, int] = {tuple: _TUPLE, torch.Size: _SIZE}


class DeviceNumber:
    """A GPU tensor that is stored as the number it holds; ``item()`` would wait for the GPU."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class _Nested:
    """An extension whose value is encoded together with its surroundings."""

    def __init__(self, code: int, value: Any) -> None:
        self.code, self.value = code, value

    def __repr__(self) -> str:
        return f"{self.code}: {self.value!r}"


class _PendingCopy:
    """A tensor being copied from a GPU; yields its number, or its elements in row-major order."""

    def __init__(self, tensor: torch.Tensor, *, number: bool) -> None:
        self._number = number
        self._host = tensor.detach().contiguous().to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def longest(self) -> float | bytes:
        """Return a value whose encoding is at least as long as the final one."""
        return 0.0 if self._number else bytes(self._host.nbytes)

    def value(self) -> Any:
        self._copied.synchronize()
        return self._host.item() if self._number else as_bytes(self._host)


class Blob:
    """A captured value's encoding. Raises TypeError with the path of an unstorable value, ConfigurationError."""

    def __init__(self, value: Any, path: str = "state") -> None:
        packed, self._awaited = _pack(value, path, 0), False
        data = self._encode(packed, lambda coming: coming.longest())
        self.max_bytes = len(data)
        self._packed: Any = packed if self._awaited else None
        self._data: bytes | None = None if self._awaited else data
        if self.max_bytes > MAX_BLOB_BYTES:
            raise ConfigurationError(
                f"the Python state of {path} takes {self.max_bytes} bytes, the limit is {MAX_BLOB_BYTES}, and its "
                f"largest part is {self._largest(value, path)}: {KEEP_TENSORS_IN}"
            )

    def data(self) -> bytes:
        """Return the encoding, after pending copies from a GPU. For one thread at a time."""
        if self._data is None:
            self._data, self._packed = self._encode(self._packed, lambda coming: coming.value()), None
        return self._data

    def _largest(self, value: Any, path: str) -> str:
        """Return the path of the largest part: descend while one member makes up a third of its container."""
        pairs = [*value.items()] if isinstance(value, Mapping) else []
        if isinstance(value, list | tuple):
            pairs = [*enumerate(value)]
        sizes = [len(self._encode(_pack(inside, path, 0), lambda coming: coming.longest())) for _, inside in pairs]
        if not sizes or 3 * max(sizes) < sum(sizes):
            return path
        key, inside = pairs[sizes.index(max(sizes))]
        return self._largest(inside, f"{path}[{key!r}]")

    def _encode(self, packed: Any, read: Callable[[_PendingCopy], Any]) -> bytes:
        def finish(value: Any) -> Any:
            if isinstance(value, _Nested):
                return msgspec.msgpack.Ext(value.code, encoder.encode(value.value))
            self._awaited = True
            return read(value)

        encoder = msgspec.msgpack.Encoder(enc_hook=finish)
        return encoder.encode(packed)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of that name. Raises MalformedMessage if torch has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise MalformedMessage(f"{name!r} is no dtype of torch {torch.__version__}")
    return dtype


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the tensor's elements in row-major order."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def from_bytes(data: bytes | bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a fresh tensor. Raises MalformedMessage if the sizes do not fit."""
    kind = dtype_of(dtype)
    if math.prod(shape) * kind.itemsize != len(data):
        raise MalformedMessage(f"{len(data)} bytes are no {dtype} tensor of shape {shape}")
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)


def encode_blob(value: Any, path: str = "state") -> bytes:
    """Return ``value`` as bytes. Raises TypeError and ConfigurationError as `Blob` does."""
    return Blob(value, path).data()


def decode_blob(data: bytes | memoryview) -> Any:
    """Decode a value. Raises MalformedMessage."""
    try:
        return msgspec.msgpack.decode(data, ext_hook=_unpack)
    except (*DECODE_ERRORS, ValueError, TypeError) as error:
        raise MalformedMessage(f"the stored Python state cannot be read: {error}") from error


def _ext(code: int, value: Any) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, msgspec.msgpack.encode(value))


_Path = str | tuple[Any, object]
"""Place of a value for error messages: a name, or a path and a key in the container there."""


def _describe_path(path: _Path) -> str:
    return path if isinstance(path, str) else f"{_describe_path(path[0])}[{path[1]!r}]"


def _pack(value: Any, path: _Path, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise TypeError(f"{_describe_path(path)} is nested more than {MAX_DEPTH} deep, or contains itself")
    kind = type(value)
    if kind in _AS_IT_IS:
        return value
    if kind is str:
        return _text(value, path)
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 63 else _ext(_INTEGER, hex(value))
    if kind is list:
        return [_pack(v, (path, i), depth + 1) for i, v in enumerate(value)]
    if kind is dict or isinstance(value, Mapping):
        return _pack_mapping(value, path, depth)
    return _pack_rest(value, path, depth)


def _pack_mapping(value: Mapping[Any, Any], path: _Path, depth: int) -> Any:
    """Pack as a MessagePack map if the keys allow that; else as a list of pairs, since extensions are unhashable."""
    kind = type(value)
    if kind is not dict and kind not in _MAPPINGS:
        raise _unsupported_error(value, path, "dict(...)")
    pairs = [
        (k if type(k) is str and k.isascii() else _pack_key(k, path), _pack(v, (path, k), depth + 1))
        for k, v in value.items()
    ]
    if kind in _MAPPINGS:
        return _Nested(_MAPPINGS[kind], pairs)
    if msgspec.msgpack.Ext in {type(key) for key, _ in pairs}:
        return _Nested(_MAPPING, pairs)
    return dict(pairs)


def _pack_key(key: Any, path: _Path) -> Any:
    if type(key) in _PLAIN_KEYS:
        return _text(key, path) if type(key) is str else key
    if type(key) is int:
        return _pack(key, path, 0)
    if type(key) is tuple:
        return _ext(_TUPLE, [_pack_key(k, path) for k in key])
    raise TypeError(
        f"{_describe_path(path)} has a key of type {type(key).__qualname__}, which cannot be stored without pickle: "
        "take strings, numbers or tuples of them for keys in state_dict(), or leave it out"
    )


def _text(value: str, path: _Path) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise TypeError(
                f"{_describe_path(path)} has the string {value!r} with surrogates, as Python decodes a file name "
                "that is not UTF-8. Return bytes from state_dict(), by os.fsencode(...)"
            ) from None
    return value


def _pack_rest(value: Any, path: _Path, depth: int) -> Any:
    if isinstance(value, tuple):
        if type(value) not in _TUPLES:
            raise _unsupported_error(value, path, "tuple(...)")
        return _Nested(_TUPLES[type(value)], [_pack(v, (path, i), depth + 1) for i, v in enumerate(value)])
    if isinstance(value, set | frozenset):
        items = sorted((_pack(v, path, depth + 1) for v in value), key=repr)
        return _Nested(_SET if isinstance(value, set) else _FROZENSET, items)
    if isinstance(value, DeviceNumber):
        return _PendingCopy(value.tensor, number=True)
    if isinstance(value, torch.Tensor):
        place = _describe_path(path)
        if isinstance(value, DTensor):
            track = "track the module that holds it (AveragedModel, say), so that it is stored in parts"
            raise TypeError(f"{place} is a DTensor: {track}")
        require_own_memory(place, value, "leave it out of state_dict(), or store the dense tensors it is made of")
        elements = _PendingCopy(value, number=False) if value.is_cuda else as_bytes(value)
        return _Nested(_TENSOR, [dtype_name(value.dtype), list(value.shape), elements])
    if isinstance(value, np.ndarray | np.generic):
        return _pack_numpy(value, path)
    if isinstance(value, torch.dtype):
        return _ext(_DTYPE, dtype_name(value))
    if isinstance(value, torch.device):
        return _ext(_DEVICE, str(value))
    if isinstance(value, complex):
        return _ext(_COMPLEX, [value.real, value.imag])
    if isinstance(value, int | float | str | bytes):  # a member of an enumeration, say
        base: Any = next(kind for kind in (int, float, str, bytes) if isinstance(value, kind))
        return _pack(base(getattr(value, "value", value)), path, depth)
    raise TypeError(
        f"{_describe_path(path)} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be stored "
        "without pickle: leave it out of state_dict(), or store the numbers it is made of"
    )


def _unsupported_error(value: Any, path: _Path, fix_hint: str) -> TypeError:
    """Return the error for a subclass that would be restored as its plain base type."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return TypeError(
        f"{_describe_path(path)} is a {kind}, which would come back as another type: give a {fix_hint} of it "
        "in state_dict()"
    )


def _pack_numpy(value: Any, path: _Path) -> msgspec.msgpack.Ext:
    if value.dtype.kind not in _ARRAY_KINDS:
        raise TypeError(
            f"{_describe_path(path)} is a numpy array of {value.dtype}, which cannot be stored without pickle: "
            "store numbers, or lists of strings"
        )
    if isinstance(value, np.ndarray) and type(value) not in _ARRAYS:
        raise _unsupported_error(value, path, "numpy array")
    code = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
    return _ext(code, [value.dtype.str, list(value.shape), value.tobytes()])


def _unpack(code: int, data: memoryview) -> Any:
    value = msgspec.msgpack.decode(data, ext_hook=_unpack)
    if code not in _UNPACKERS:
        raise ValueError(f"extension {code} is not known here")
    return _UNPACKERS[code](value)


def _unpack_array(value: Any) -> Any:
    dtype = np.dtype(value[0])
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"numpy dtype {value[0]!r} is not stored here")
    return np.frombuffer(value[2], dtype=dtype).reshape(value[1]).copy()


_UNPACKERS: dict[int, Callable[[Any], Any]] = {
    _TUPLE: tuple,
    _SET: set,
    _FROZENSET: frozenset,
    _INTEGER: lambda v: int(v, 16),
    _TENSOR: lambda v: from_bytes(v[2], v[0], tuple(v[1])),
    _ARRAY: _unpack_array,
    _SCALAR: lambda v: _unpack_array(v)[()],
    _DTYPE: dtype_of,
    _DEVICE: torch.device,
    _COMPLEX: lambda v: complex(*v),
    _MAPPING: dict,
    _COUNTER: lambda pairs: Counter(dict(pairs)),
    _ORDERED: OrderedDict,
    _SIZE: torch.Size,
}
