"""A slot's manifest, or bytes of its payload, from a peer: bulk that is hashed by who asks. Only that one knows by what
digest."""

from __future__ import annotations

from collections.abc import Sequence

from agent.vault.settings import VaultSettings
from everstep.channel import Channel
from everstep.errors import MalformedMessage
from everstep.ids import Version
from everstep.manifests import MOST_MANIFEST_BYTES
from everstep.slots import CHUNK_BYTES
from everstep.wire.v1.transfer import Data, DataEnd, Get


def ask_manifest(
    channel: Channel, settings: VaultSettings, rank: int, version: Version, *, parity: bool = False
) -> bytes:
    """What ``rank`` (``parity``: the group of that number) sealed as ``version``, unchecked.

    Raises what the peer refuses for, and MalformedMessage for more than a manifest may be.
    """
    channel.send(Get(rank=rank, version=version, ranges=(), parity=parity))
    channel.patience(settings.settle_timeout_s)
    length = channel.answer(Data).bytes
    if length > MOST_MANIFEST_BYTES:
        raise MalformedMessage(
            f"{channel.peer} announced a manifest of {length} bytes, and at most {MOST_MANIFEST_BYTES} are taken"
        )
    channel.patience(settings.io_timeout_s)
    return receive_pieces(channel, length)


def ask_bytes(
    channel: Channel, settings: VaultSettings, rank: int, version: Version, ranges: Sequence[tuple[int, int]]
) -> bytes:
    """Those (offset, length) of the payload that ``rank`` sealed as ``version``, one after another.

    The peer hashes before it answers. Raises what it refuses for, and MalformedMessage for another number of bytes.
    """
    channel.send(Get(rank=rank, version=version, ranges=tuple(ranges)))
    channel.patience(settings.settle_timeout_s)
    announced, wanted = channel.answer(Data).bytes, sum(length for _, length in ranges)
    if announced != wanted:
        raise MalformedMessage(f"{channel.peer} announced {announced} bytes where {wanted} were asked for")
    channel.patience(settings.io_timeout_s)
    return receive_pieces(channel, wanted)


def receive_pieces(channel: Channel, length: int) -> bytes:
    """The bulk that was announced. Raises what the peer breaks off for."""
    found = bytearray(length)
    for start in range(0, length, CHUNK_BYTES):
        channel.receive_into(memoryview(found)[start : start + CHUNK_BYTES])
        if not channel.status():
            channel.answer(DataEnd)  # raises what the peer refuses for
            raise MalformedMessage(f"{channel.peer} said that the slot moved on, and then that it did not")
    channel.answer(DataEnd)
    return bytes(found)
