"""Load the C library that copies and hashes in one pass (``copy_hash.c``).

It is compiled when the package is installed (``hatch_build.py``). Without a compiler, or on a machine without AVX2,
``copy_hash`` is None; callers then hash and copy in two passes, with the same bytes and digests.
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


class CopyHash:
    """The library's functions, which release Python's lock; columns are addresses of 64-bit integers, one per part.
    Nothing is checked: all memory must be mapped, and stay so."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scatter, self._gather = library.everstep_scatter, library.everstep_gather
        for call in (self._scatter, self._gather):
            call.argtypes, call.restype = _ARGUMENTS, None

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
