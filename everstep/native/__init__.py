"""The one piece of this project that is in C: copies that hash what they copy in the same pass (``copy_hash.c``).

It is compiled when the package is installed (``hatch_build.py``). Without a compiler then, or on a machine without
AVX2, ``copy_hash`` is None, and whoever would use it hashes and copies in two passes: the same bytes and digests.
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
"""Environment variable: 0 leaves the library alone."""

_Address = ctypes.c_void_p
_ARGUMENTS = (_Address, ctypes.c_uint64, _Address, _Address, _Address, ctypes.c_uint64, _Address)


class CopyHash:
    """The library's calls, which release Python's lock. Columns are addresses of as many 64-bit integers as parts.

    Nothing is checked: all that is named must be mapped, and stay so.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._scatter, self._gather = library.everstep_scatter, library.everstep_gather
        for call in (self._scatter, self._gather):
            call.argtypes, call.restype = _ARGUMENTS, None

    def scatter(self, source: int, length: int, offsets: int, targets: int, sizes: int, count: int) -> bytes:
        """The xxh3-128 of ``length`` bytes at address ``source``, SHORTEST_BYTES at least, of which ``count`` parts are
        copied: ``sizes`` bytes from ``offsets`` on, which ascend, to the addresses ``targets``."""
        digest = ctypes.create_string_buffer(DIGEST_BYTES)
        self._scatter(source, length, offsets, targets, sizes, count, digest)
        return digest.raw

    def gather(self, target: int, length: int, offsets: int, sources: int, sizes: int, count: int) -> bytes:
        """The xxh3-128 of ``length`` bytes at address ``target``, SHORTEST_BYTES at least, after ``count`` parts of it
        were filled: ``sizes`` bytes from ``offsets`` on, which ascend, from the addresses ``sources``."""
        digest = ctypes.create_string_buffer(DIGEST_BYTES)
        self._gather(target, length, offsets, sources, sizes, count, digest)
        return digest.raw


def _load() -> CopyHash | None:
    if os.environ.get(ENV_VARIABLE) == "0" or not LIBRARY.exists():
        return None
    try:
        library = ctypes.CDLL(str(LIBRARY))
        return CopyHash(library) if library.everstep_usable() else None
    except (OSError, AttributeError) as error:  # another platform's, or an older release's
        log.warning("%s cannot be used, copies are hashed in a second pass: %s", LIBRARY, error)
        return None


copy_hash = _load()
"""None where there is none."""
