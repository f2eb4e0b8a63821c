"""One connection to another node's vault, blocking, for a thread: frames, and bulk bytes at the wire's speed.

The kernel keeps the time (SO_RCVTIMEO, SO_SNDTIMEO): so a whole piece moves in one system call with Python's lock
released, where a socket with Python's own time-out would wake up for every packet train.
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

# ---- version
# Which protocol versions this build speaks, and how two sides agree on one.

SUPPORTED_VERSIONS: tuple[int, ...] = (1,)
VAULT_SUPPORTED_VERSIONS: tuple[int, ...] = (2,)
"""Among themselves. In version 1 a slot's manifest was part of the frame that offered it."""
MOST_SHOWN = 8
"""Of offered versions, in a refusal."""


def negotiate(offered: Iterable[int], supported: Iterable[int] = SUPPORTED_VERSIONS) -> int:
    """The newest version in both. Raises VersionMismatch, saying which side is older, where there is none."""
    theirs, ours = set(offered), set(supported)
    both = theirs & ours
    if both:
        return max(both)
    older = "the caller" if theirs and max(theirs) < min(ours) else "this side"
    raise VersionMismatch(
        f"no protocol version in common: offered {_newest(theirs)}, spoken here {_newest(ours)}; upgrade {older}"
    )


def _newest(versions: set[int]) -> str:
    """The newest few, in words: a stranger may offer thousands."""
    shown = sorted(versions)[-MOST_SHOWN:]
    return f"{shown}" if len(shown) == len(versions) else f"{shown} and {len(versions) - len(shown)} older"


# ---- framing
# Length-prefixed MessagePack frames, without sockets: bytes in, messages out.

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
            except DECODE_ERRORS as error:
                raise MalformedMessage(f"a frame of {length} bytes is not a known message: {error}") from error
        return messages

    @property
    def pending_bytes(self) -> int:
        """Bytes of an unfinished frame; not zero at end of stream means it was truncated."""
        return len(self._buffer)


_opening: msgspec.msgpack.Decoder[transfer.Opening] = msgspec.msgpack.Decoder(transfer.Opening)
_opening_answer: msgspec.msgpack.Decoder[transfer.OpeningAnswer] = msgspec.msgpack.Decoder(transfer.OpeningAnswer)
_request: msgspec.msgpack.Decoder[transfer.TransferRequest] = msgspec.msgpack.Decoder(transfer.TransferRequest)
_answer: msgspec.msgpack.Decoder[transfer.TransferAnswer] = msgspec.msgpack.Decoder(transfer.TransferAnswer)

MAX_IOVECS = 512


class VaultChannel:
    """A connected TCP socket. Used by one thread at a time; ``shutdown`` may come from any.

    Every method raises Unavailable where the peer is gone or too slow, and MalformedMessage for what it should not
    have sent. After either, the connection is of no more use.
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
        """How long to wait for the peer's next bytes, seconds."""
        if timeout_s != self._receive_timeout_s:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout_s))
            self._receive_timeout_s = timeout_s

    # --- frames ---------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        self.send_bulk([memoryview(encode_frame(message))])

    def receive_opening(self) -> transfer.Opening:
        return self._frame(_opening, transfer.MAX_GREETING_BYTES)

    def receive_opening_answer(self) -> transfer.OpeningAnswer:
        return self._frame(_opening_answer, transfer.MAX_GREETING_BYTES)

    def receive_request(self) -> transfer.TransferRequest:
        return self._frame(_request, transfer.MAX_TRANSFER_FRAME_BYTES)

    def receive_answer(self, kind: type[T]) -> T:
        """The peer's answer, of that kind. Raises what a refusal stands for."""
        answer = self.receive_any_answer()
        if isinstance(answer, kind):
            return answer
        raise MalformedMessage(f"{self.peer} answered with {type(answer).__name__}, not with {kind.__name__}")

    def receive_any_answer(self) -> transfer.TransferAnswer:
        """The peer's answer, of any kind. Raises what a refusal stands for."""
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

    # --- bulk -----------------------------------------------------------------------------------------------------

    def receive_into(self, view: memoryview) -> None:
        """Fills ``view``."""
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
        """Whether the piece just received still was the slot's."""
        byte = bytearray(1)
        self.receive_into(memoryview(byte))
        return bytes(byte) == transfer.PIECE_VALID

    def send_bulk(self, views: Sequence[memoryview]) -> None:
        """Sends the views one after another; when this returns, their bytes have been read."""
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

    # --- the end --------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Wakes whoever waits on this connection, with Unavailable. Safe from any thread."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it was closed or broken already

    def detach(self) -> socket.socket:
        """The socket, for whoever has the connection from now on."""
        return self._sock

    def close(self) -> None:
        self.shutdown()
        self._sock.close()


def connect(address: str, peer: str, connect_timeout_s: float, io_timeout_s: float) -> VaultChannel:
    """Raises Unavailable where nobody listens at ``address``."""
    try:
        sock = socket.create_connection(split_address(address), connect_timeout_s)
    except (OSError, ValueError) as error:
        raise Unavailable(f"{peer} does not answer at {address}: {error}") from error
    return VaultChannel(sock, peer, io_timeout_s)


def _timeval(seconds: float) -> bytes:
    whole = int(seconds)
    return struct.pack("@ll", whole, int((seconds - whole) * 1_000_000))
