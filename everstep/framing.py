"""Length-prefixed MessagePack frames, without sockets: bytes in, messages out."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from everstep.errors import UNREADABLE, MalformedMessage

PREFIX_BYTES = 4
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    """One frame: a 4-byte big-endian length and the message in MessagePack."""
    body = _encoder.encode(message)
    return len(body).to_bytes(PREFIX_BYTES, "big") + body


class FrameDecoder(Generic[T]):
    """Cuts a byte stream into messages of one (union) type.

    Args:
        kind: the type every frame must decode to.
        max_bytes: a longer frame raises MalformedMessage before it is buffered.
    """

    def __init__(self, kind: Any, max_bytes: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """The messages completed by ``data``. Raises MalformedMessage for an oversized or undecodable frame."""
        self._buffer += data
        messages: list[T] = []
        while len(self._buffer) >= PREFIX_BYTES:
            length = int.from_bytes(self._buffer[:PREFIX_BYTES], "big")
            if length > self._max_bytes:
                raise MalformedMessage(f"a frame of {length} bytes is over the limit of {self._max_bytes}")
            end = PREFIX_BYTES + length
            if len(self._buffer) < end:
                break
            body = bytes(self._buffer[PREFIX_BYTES:end])
            del self._buffer[:end]
            try:
                messages.append(self._decoder.decode(body))
            # msgspec lets bad UTF-8, and what is nested without end, through as the latter two
            except UNREADABLE as error:
                raise MalformedMessage(f"a frame of {length} bytes is not a known message: {error}") from error
        return messages

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame; not zero at end of stream means it was truncated."""
        return len(self._buffer)
