"""Pickles written without the classes they name: a node's daemon has no torch, and the standard pickler imports what it
pickles. Protocol 2, and of it only what torch's own restricted reader (``weights_only=True``) accepts.

The same value gives the same bytes, always: a second writer of a file writes the same file.
"""

from __future__ import annotations

import pickle
import re
import struct
from typing import Any

import msgspec

from everstep.errors import ConfigurationError

_GLOBAL = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_SMALL_TUPLES = (pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3)


class Global(msgspec.Struct, frozen=True):
    """A class, a function or another object by its module and name."""

    module: str
    name: str


class Call(msgspec.Struct, frozen=True):
    """What ``function(*arguments)`` returns in the reader."""

    function: Global
    arguments: tuple[Any, ...] = ()


class Instance(msgspec.Struct, frozen=True):
    """``kind`` made without arguments, then given ``state``: its attributes, or what its __setstate__ takes."""

    kind: Global
    state: Any


class Persistent(msgspec.Struct, frozen=True):
    """What the reader makes of a persistent id; a torch archive's storages are such."""

    identity: tuple[Any, ...]


class Pairs(msgspec.Struct, frozen=True):
    """A dict, as its items: for keys that are made in the reader."""

    items: tuple[tuple[Any, Any], ...]


def dumps(value: Any) -> bytes:
    """``value`` as a pickle: None, bool, int, float, complex, str, bytes, tuple, list, dict, set, and the kinds above.

    Raises ConfigurationError for anything else.
    """
    return _Writer().whole(value)


class _Writer:
    def __init__(self) -> None:
        self._out = bytearray(pickle.PROTO + b"\x02")
        self._memo: dict[Global, int] = {}

    def whole(self, value: Any) -> bytes:
        self._write(value)
        return bytes(self._out + pickle.STOP)

    def _write(self, value: Any) -> None:
        write = _WRITERS.get(type(value))
        if write is None:
            raise ConfigurationError(f"a {type(value).__qualname__} cannot be written as a pickle of plain values")
        write(self, value)

    def _none(self, _: None) -> None:
        self._out += pickle.NONE

    def _bool(self, value: bool) -> None:
        self._out += pickle.NEWTRUE if value else pickle.NEWFALSE

    def _int(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self._out += pickle.BININT1 + struct.pack("<B", value)
        elif 0 <= value < 1 << 16:
            self._out += pickle.BININT2 + struct.pack("<H", value)
        elif -(1 << 31) <= value < 1 << 31:
            self._out += pickle.BININT + struct.pack("<i", value)
        else:
            raw = pickle.encode_long(value)
            if len(raw) > 255:
                raise ConfigurationError(f"an integer of {len(raw)} bytes is too long for a checkpoint's plain values")
            self._out += pickle.LONG1 + struct.pack("<B", len(raw)) + raw

    def _float(self, value: float) -> None:
        self._out += pickle.BINFLOAT + struct.pack(">d", value)

    def _complex(self, value: complex) -> None:
        self._call(Call(Global("builtins", "complex"), (value.real, value.imag)))

    def _str(self, value: str) -> None:
        raw = value.encode("utf-8", "surrogatepass")
        self._out += pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw

    def _bytes(self, value: bytes) -> None:
        self._call(Call(Global("_codecs", "encode"), (value.decode("latin-1"), "latin1")))

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if len(value) >= len(_SMALL_TUPLES):
            self._out += pickle.MARK
        for item in value:
            self._write(item)
        self._out += _SMALL_TUPLES[len(value)] if len(value) < len(_SMALL_TUPLES) else pickle.TUPLE

    def _list(self, value: list[Any]) -> None:
        self._out += pickle.EMPTY_LIST
        if value:
            self._out += pickle.MARK
            for item in value:
                self._write(item)
            self._out += pickle.APPENDS

    def _dict(self, value: dict[Any, Any]) -> None:
        self._pairs(Pairs(tuple(value.items())))

    def _pairs(self, value: Pairs) -> None:
        self._out += pickle.EMPTY_DICT
        if value.items:
            self._out += pickle.MARK
            for key, item in value.items:
                self._write(key)
                self._write(item)
            self._out += pickle.SETITEMS

    def _set(self, value: set[Any]) -> None:
        self._call(Call(Global("builtins", "set"), (sorted(value, key=lambda v: (type(v).__name__, repr(v))),)))

    def _global(self, value: Global) -> None:
        if value in self._memo:
            self._out += pickle.BINGET + struct.pack("<B", self._memo[value])
            return
        if not (_GLOBAL.fullmatch(value.module) and _GLOBAL.fullmatch(value.name)):
            raise ConfigurationError(f"{value.module!r} and {value.name!r} do not name anything that can be imported")
        self._out += pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode()
        if len(self._memo) < 256:
            self._out += pickle.BINPUT + struct.pack("<B", len(self._memo))
            self._memo[value] = len(self._memo)

    def _call(self, value: Call) -> None:
        self._global(value.function)
        self._tuple(value.arguments)
        self._out += pickle.REDUCE

    def _instance(self, value: Instance) -> None:
        self._global(value.kind)
        self._out += pickle.EMPTY_TUPLE + pickle.NEWOBJ
        self._write(value.state)
        self._out += pickle.BUILD

    def _persistent(self, value: Persistent) -> None:
        self._tuple(value.identity)
        self._out += pickle.BINPERSID


_WRITERS: dict[type, Any] = {
    type(None): _Writer._none,
    bool: _Writer._bool,
    int: _Writer._int,
    float: _Writer._float,
    complex: _Writer._complex,
    str: _Writer._str,
    bytes: _Writer._bytes,
    tuple: _Writer._tuple,
    list: _Writer._list,
    dict: _Writer._dict,
    set: _Writer._set,
    Global: _Writer._global,
    Call: _Writer._call,
    Instance: _Writer._instance,
    Persistent: _Writer._persistent,
    Pairs: _Writer._pairs,
}
