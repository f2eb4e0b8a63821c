"""Exchange frames and bulk bytes with another node's vault over a blocking connection, for a thread.

The kernel enforces time-outs (SO_RCVTIMEO, SO_SNDTIMEO). So a whole piece moves in one system call without Python's
lock; a socket with Python's own time-out would wake up for every packet train.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from everstep.errors import DECODE_ERRORS, MalformedMessage, Unavailable, VersionMismatch
from everstep.ids import split_address
from everstep.wire.v1 import transfer

# ---- protocol versions of this build, and negotiation

SUPPORTED_VERSIONS: tuple[int, ...] = (1,)
VAULT_SUPPORTED_VERSIONS: tuple[int, ...] = (2,)
"""Versions between vaults. In version 1 a slot's manifest was part of the frame that offered it."""
MAX_LISTED_VERSIONS = 8
"""Most offered versions named in a refusal."""


def negotiate(offered: Iterable[int], supported: Iterable[int] = SUPPORTED_VERSIONS) -> int:
    """Return the newest version in both. Raises VersionMismatch, naming the older side, if there is none."""
    theirs, ours = set(offered), set(supported)
    both = theirs & ours
    if both:
        return max(both)
    older = "the caller" if theirs and max(theirs) < min(ours) else "this side"
    raise VersionMismatch(
        f"no protocol version in common: offered {_newest(theirs)}, spoken here {_newest(ours)}; upgrade {older}"
    )


def _newest(versions: set[int]) -> str:
    """Return the newest few versions in words: a stranger may offer thousands."""
    shown = sorted(versions)[-MAX_LISTED_VERSIONS:]
    return f"{shown}" if len(shown) == len(versions) else f"{shown} and {len(versions) - len(shown)} older"


# ---- length-prefixed MessagePack frames, without sockets: bytes in, messages out

PREFIX_BYTES = 4
T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: Any) -> bytes:
    """Return one frame: a 4-byte big-endian length and the message in MessagePack."""
    body = _encoder.encode(message)
    return len(body).to_bytes(PREFIX_BYTES, "big") + body


class FrameDecoder(Generic[T]):
    """Cuts a byte stream into messages of ``kind``, a (union) type. Frames over ``max_bytes`` are not buffered."""

    def __init__(self, kind: Any, max_bytes: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[T]:
        """Return the messages completed by ``data``. Raises MalformedMessage for an oversized or undecodable frame."""
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
            except DECODE_ERRORS as error:
                raise MalformedMessage(f"a frame of {length} bytes is not a known message: {error}") from error
        return messages

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame; not zero at the end of the stream means that it was truncated."""
        return len(self._buffer)


_opening: msgspec.msgpack.Decoder[transfer.Opening] = msgspec.msgpack.Decoder(transfer.Opening)
_opening_answer: msgspec.msgpack.Decoder[transfer.OpeningAnswer] = msgspec.msgpack.Decoder(transfer.OpeningAnswer)
_request: msgspec.msgpack.Decoder[transfer.TransferRequest] = msgspec.msgpack.Decoder(transfer.TransferRequest)
_answer: msgspec.msgpack.Decoder[transfer.TransferAnswer] = msgspec.msgpack.Decoder(transfer.TransferAnswer)

MAX_IOVECS = 512


class VaultChannel:
    """A connected TCP socket. Used by one thread at a time; ``shutdown`` may come from any.

    Every method raises Unavailable if the peer is gone or too slow, and MalformedMessage for an unexpected message.
    After either, the connection cannot be used any more.
    """

    def __init__(self, sock: socket.socket, peer: str, timeout_s: float) -> None:
        self.peer = peer
        self._sock = sock
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
        self._receive_timeout_s = 0.0
        self.set_receive_timeout(timeout_s)

    def set_receive_timeout(self, timeout_s: float) -> None:
        """Set how long to wait for the peer's next bytes, seconds."""
        if timeout_s != self._receive_timeout_s:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
            self._receive_timeout_s = timeout_s

    # --- frames -------------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        self.send_bulk([memoryview(encode_frame(message))])

    def receive_opening(self) -> transfer.Opening:
        return self._frame(_opening, transfer.MAX_GREETING_BYTES)

    def receive_opening_answer(self) -> transfer.OpeningAnswer:
        return self._frame(_opening_answer, transfer.MAX_GREETING_BYTES)

    def receive_request(self) -> transfer.TransferRequest:
        return self._frame(_request, transfer.MAX_TRANSFER_FRAME_BYTES)

    def receive_answer(self, kind: type[T]) -> T:
        """Return the peer's answer of that kind. Raises the error of a refusal."""
        answer = self.receive_any_answer()
        if isinstance(answer, kind):
            return answer
        raise MalformedMessage(f"{self.peer} answered with {type(answer).__name__}, not with {kind.__name__}")

    def receive_any_answer(self) -> transfer.TransferAnswer:
        """Return the peer's answer of any kind. Raises the error of a refusal."""
        answer = self._frame(_answer, transfer.MAX_TRANSFER_FRAME_BYTES)
        if isinstance(answer, transfer.TransferRefused):
            raise transfer.error_from_refused(answer, self.peer)
        return answer

    def _frame(self, decoder: msgspec.msgpack.Decoder[T], most: int) -> T:
        prefix = bytearray(PREFIX_BYTES)
        self.receive_into(memoryview(prefix))
        length = int.from_bytes(prefix, "big")
        if length > most:
            raise MalformedMessage(f"{self.peer} sent a frame of {length} bytes, over the limit of {most}")
        body = bytearray(length)
        self.receive_into(memoryview(body))
        try:
            return decoder.decode(body)
        except DECODE_ERRORS as error:
            raise MalformedMessage(f"{self.peer} sent a frame that is no known message: {error}") from error

    # --- bulk ---------------------------------------------------------------------------------------------------------

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view``."""
        while view:
            try:
                count = self._sock.recv_into(view, 0, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise Unavailable(f"{self.peer} sent nothing for {self._receive_timeout_s} s") from error
            except OSError as error:
                raise Unavailable(f"the connection to {self.peer} broke: {error.strerror or error}") from error
            if not count:
                raise Unavailable(f"{self.peer} closed the connection")
            view = view[count:]

    def receive_piece_status(self) -> bool:
        """Return whether the piece just received still belonged to the slot."""
        byte = bytearray(1)
        self.receive_into(memoryview(byte))
        return bytes(byte) == transfer.PIECE_VALID

    def require_good_piece(self) -> None:
        """Receive the status of a piece, and raise the sender's refusal if it is bad."""
        if not self.receive_piece_status():
            self.receive_answer(transfer.DataEnd)  # raises the refusal
            raise MalformedMessage(f"{self.peer} sent contradictory status: slot refilled, then not refilled")

    def send_bulk(self, views: Sequence[memoryview]) -> None:
        """Send the views in order; after this returns, their bytes may change."""
        try:
            if len(views) == 1:
                self._sock.sendall(views[0])
            else:
                for start in range(0, len(views), MAX_IOVECS):
                    self._send_vector(list(views[start : start + MAX_IOVECS]))
        except BlockingIOError as error:
            raise Unavailable(f"{self.peer} takes no bytes any more") from error
        except OSError as error:
            raise Unavailable(f"the connection to {self.peer} broke: {error.strerror or error}") from error

    def _send_vector(self, views: list[memoryview]) -> None:
        while views:
            sent = self._sock.sendmsg(views)
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if views:
                views[0] = views[0][sent:]

    def send_piece_status(self, good: bool) -> None:
        self.send_bulk([memoryview(transfer.PIECE_VALID if good else transfer.PIECE_STALE)])

    # --- end ----------------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wake all waiters on this connection, with Unavailable. Safe from any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # closed or broken already

    def detach(self) -> socket.socket:
        """Return the socket, for a new owner of the connection."""
        return self._sock

    def close(self) -> None:
        self.shutdown()
        self._sock.close()


def connect(address: str, peer: str, connect_timeout_s: float, io_timeout_s: float) -> VaultChannel:
    """Connect to a vault. Raises Unavailable if no vault listens at ``address``."""
    try:
        sock = socket.create_connection(split_address(address), connect_timeout_s)
    except (OSError, ValueError) as error:
        raise Unavailable(f"{peer} does not answer at {address}: {error}") from error
    return VaultChannel(sock, peer, io_timeout_s)


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1_000_000))
