"""Encode the digests of a checkpoint on storage: a file in its folder, written by vaults and read by ranks.

A digest covers an archive inside a file, not the file: ranks read only the archives that they need, each from end to
end. torch ignores the subfolder of this file.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec
import xxhash

from everstep.errors import DECODE_ERRORS, DigestMismatch, MalformedMessage
from everstep.native import DIGEST_BYTES


class RangeHasher:
    """Computes the xxh3-128 of each range from the ranges' bytes, fed in order while they are still in the cache.

    ``known`` has a digest or None for each range; bytes of ranges with a known digest are skipped. Empty: none is.
    """

    def __init__(self, lengths: Sequence[int], known: Sequence[bytes | None] = ()) -> None:
        self._left = deque(lengths)
        self._known = deque(known or [None] * len(lengths))
        self._digests: list[bytes] = []
        self._hash = xxhash.xxh3_128()

    def update(self, view: memoryview) -> None:
        while view:
            self._close_finished()
            part = view[: self._left[0]]
            if self._known[0] is None:
                self._hash.update(part)
            self._left[0] -= len(part)
            view = view[len(part) :]

    def _close_finished(self) -> None:
        while self._left and not self._left[0]:
            self._left.popleft()
            known = self._known.popleft()
            self._digests.append(self._hash.digest() if known is None else known)
            self._hash.reset()

    def digests(self) -> bytes:
        """Return all digests concatenated, after all bytes were fed."""
        self._close_finished()
        return b"".join(self._digests)


DIGESTS_FILE = ".everstep/digests"
"""Name of the file in a checkpoint's folder."""
_FORMAT = 1


class ArchiveDigest(msgspec.Struct, frozen=True, array_like=True):
    """The xxh3-128 of ``length`` bytes from ``offset`` on in a file."""

    offset: int
    length: int
    digest: bytes


class StoredDigests(msgspec.Struct, frozen=True, array_like=True):
    """The xxh3-128 of ``.metadata``, and those of all archives by the name of their file."""

    metadata: bytes
    files: dict[str, tuple[ArchiveDigest, ...]]


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    format: int
    digests: msgspec.Raw


def encode_digests(digests: StoredDigests) -> bytes:
    """Return the file's bytes; equal digests give equal bytes."""
    body = msgspec.msgpack.encode(_Sealed(_FORMAT, msgspec.Raw(msgspec.msgpack.encode(digests))))
    return xxhash.xxh3_128_digest(body) + body


def decode_digests(data: bytes) -> StoredDigests:
    """Decode the file. Raises DigestMismatch if its bytes are not those written, MalformedMessage for another
    format."""
    body = data[DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:DIGEST_BYTES]:
        raise DigestMismatch(f"{DIGESTS_FILE} is not what was written")
    try:
        sealed = msgspec.msgpack.decode(body, type=_Sealed)
        if sealed.format != _FORMAT:
            raise MalformedMessage(
                f"{DIGESTS_FILE} has format {sealed.format}, of another release: {_FORMAT} is read here"
            )
        return msgspec.msgpack.decode(sealed.digests, type=StoredDigests)
    except DECODE_ERRORS as error:
        raise MalformedMessage(f"{DIGESTS_FILE} cannot be read: {error}") from error
