"""Load the C library that copies and hashes in one pass, and makes weighted sums (``copy_hash.c``).

It is compiled when the package is installed (``hatch_build.py``). Without a compiler, or on a machine without AVX2,
``copy_hash`` is None; callers then hash and copy in two passes, and add otherwise, with the same bytes and digests.
"""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("copy_hash.so")
MIN_BYTES = 241
"""XXH3 hashes shorter input by other rules."""
DIGEST_BYTES = 16
"""Size of an xxh3-128 digest."""
ENV_VARIABLE = "EVERSTEP_NATIVE"
"""Environment variable; 0 disables the library."""

_Address = ctypes.c_void_p
_ARGUMENTS = (_Address, ctypes.c_uint64, _Address, _Address, _Address, ctypes.c_uint64, _Address)
_WEIGH_ARGUMENTS = (_Address, _Address, ctypes.c_uint64, ctypes.c_uint64, _Address, ctypes.c_uint64, _Address)


class CopyHash:
    """The library's functions, which release Python's lock; columns are addresses of 64-bit integers, one per part.
    Nothing is checked: all memory must be mapped, and stay so."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scatter, self._gather = library.everstep_scatter, library.everstep_gather
        for call in (self._scatter, self._gather):
            call.argtypes, call.restype = _ARGUMENTS, None
        self._weigh = library.everstep_weigh
        self._weigh.argtypes, self._weigh.restype = _WEIGH_ARGUMENTS, ctypes.c_int64

    def scatter(self, source: int, length: int, offsets: int, targets: int, sizes: int, count: int) -> bytes:
        """Copy ``count`` parts out of ``length`` bytes (at least MIN_BYTES) at ``source``, and return their xxh3-128.
        The parts are ``sizes`` bytes at ascending ``offsets``, copied to the addresses ``targets``."""
        digest = ctypes.create_string_buffer(DIGEST_BYTES)
        self._scatter(source, length, offsets, targets, sizes, count, digest)
        return digest.raw

    def gather(self, target: int, length: int, offsets: int, sources: int, sizes: int, count: int) -> bytes:
        """Fill ``count`` parts of ``length`` bytes (at least MIN_BYTES) at ``target``; return the xxh3-128 of all. The
        parts are ``sizes`` bytes at ascending ``offsets``, filled from the addresses ``sources``."""
        digest = ctypes.create_string_buffer(DIGEST_BYTES)
        self._gather(target, length, offsets, sources, sizes, count, digest)
        return digest.raw

    def weigh(self, sources: int, sizes: int, count: int, place: int, weights: int, columns: int, keys: int) -> int:
        """Return the weighted sum, as a signed number, of ``count`` parts of memory one after the other.

        Both halves of a word of 8 bytes are multiplied with the halves of its column's weight, and each row's sum with
        its key. The parts are ``sizes`` bytes at the addresses ``sources``; the first begins at byte ``place`` of a row
        of ``columns`` words, and ``keys`` is the address of that row's key.
        """
        result: int = self._weigh(sources, sizes, count, place, weights, columns, keys)
        return result


def _load() -> CopyHash | None:
    if os.environ.get(ENV_VARIABLE) == "0" or not LIBRARY.exists():
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
        return CopyHash(library) if library.everstep_usable() else None
    except (OSError, AttributeError) as error:  # of another platform or an older release
        log.warning("%s cannot be used, copies are hashed in a second pass: %s", LIBRARY, error)
        return None


copy_hash = _load()
"""The library, or None if it is not available."""
