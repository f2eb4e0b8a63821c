"""A sealed slot of this node, read from front to back: nothing of it is used that was not hashed before.

The slot's rank may fill it anew at any moment, so each chunk is copied first and the copy is hashed.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import xxhash

from everstep.boxes import Range
from everstep.errors import DigestMismatch, MalformedMessage, NotFound
from everstep.ids import Version
from everstep.manifests import BLOB_PREFIX, Manifest, decode_manifest
from everstep.slots import CHUNK_BYTES, SegmentView, SlotState


class SpilledSlot:
    """One slot, mapped read-only.

    Raises NotFound where the file or the version is not there, DigestMismatch where its manifest is damaged,
    MalformedMessage where it cannot be read.
    """

    def __init__(self, path: str, slot: int, rank: int, version: Version) -> None:
        self._what = f"rank {rank}'s {version} in slot {slot} of {path}"
        view = SegmentView(_map(path))
        header = view.header(slot)
        if header is None or (header.state, header.rank, header.version) != (SlotState.SEALED, rank, version):
            raise NotFound(f"{self._what} is not there any more")
        self.manifest_bytes = view.manifest(slot)
        self.manifest: Manifest = decode_manifest(self.manifest_bytes)
        self._digests = view.digests(slot)[1:]
        self._payload = view.payload(slot)
        if view.header(slot) != header:
            raise NotFound(f"{self._what} was filled anew")
        if (self.manifest.rank, self.manifest.payload_bytes) != (rank, len(self._payload)):
            raise MalformedMessage(f"the manifest of {self._what} is another slot's")
        self._chunk: tuple[int, memoryview] = (-1, memoryview(b""))

    def read(self, ranges: tuple[Range, ...]) -> Iterator[memoryview]:
        """The ranges' bytes, one after another, in pieces of at most CHUNK_BYTES; valid until the next is asked for.

        Raises DigestMismatch where a chunk is not what was sealed, MalformedMessage for ranges outside the payload.
        """
        for start, length in ranges:
            at, end = start, start + length
            if start < 0 or end > len(self._payload):
                raise MalformedMessage(f"bytes {start} to {end} are not within {self._what}")
            while at < end:
                index = at // CHUNK_BYTES
                base = index * CHUNK_BYTES
                piece = self._checked(index)[at - base : end - base]
                yield piece
                at += len(piece)

    def blob(self) -> bytes:
        """The rank's Python state."""
        at = self.manifest.blob_at
        length = int.from_bytes(b"".join(self.read(((at, BLOB_PREFIX),))), "little")
        if length > self.manifest.blob_capacity:
            raise MalformedMessage(
                f"the Python state of {self._what} is said to have {length} bytes, more than its room"
            )
        return b"".join(self.read(((at + BLOB_PREFIX, length),)))

    def _checked(self, index: int) -> memoryview:
        if self._chunk[0] != index:
            copy = bytes(self._payload[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])
            if xxhash.xxh3_128_digest(copy) != self._digests[index]:
                raise DigestMismatch(f"chunk {index} of {self._what} is not what was sealed")
            self._chunk = index, memoryview(copy)
        return self._chunk[1]


def _map(path: str) -> memoryview:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"the segment {path} is not there any more") from error
    try:
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    except ValueError as error:
        raise DigestMismatch(f"{path} is empty and no segment") from error
    finally:
        os.close(descriptor)
