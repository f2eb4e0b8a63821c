"""What the bytes of a checkpoint on storage hash to: a file in its folder, written by vaults, read by ranks.

A digest stands for an archive inside a file, not for the file: of a file a rank reads the archives of what it needs,
each from end to end. torch does not look into the folder in which this lies.
"""

from __future__ import annotations

import msgspec
import xxhash

from everstep.errors import UNREADABLE, DigestMismatch, MalformedMessage

DIGESTS = ".everstep/digests"
"""Its name in a checkpoint's folder."""
DIGEST_BYTES = 16
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
    """The file's bytes. The same digests give the same."""
    body = msgspec.msgpack.encode(_Sealed(_FORMAT, msgspec.Raw(msgspec.msgpack.encode(digests))))
    return xxhash.xxh3_128_digest(body) + body


def decode_digests(data: bytes) -> StoredDigests:
    """Raises DigestMismatch where these are not the bytes that were written, MalformedMessage for another format."""
    body = data[DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != data[:DIGEST_BYTES]:
        raise DigestMismatch(f"{DIGESTS} is not what was written")
    try:
        sealed = msgspec.msgpack.decode(body, type=_Sealed)
        if sealed.format != _FORMAT:
            raise MalformedMessage(f"{DIGESTS} has format {sealed.format}, of another release: {_FORMAT} is read here")
        return msgspec.msgpack.decode(sealed.digests, type=StoredDigests)
    except UNREADABLE as error:
        raise MalformedMessage(f"{DIGESTS} cannot be read: {error}") from error
