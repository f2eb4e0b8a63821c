"""Exchange messages with file descriptors between processes of one launcher.

A sequenced-packet Unix socket pair keeps message boundaries, carries descriptors, and signals end-of-file when the
other side is gone. Both ends belong to the launcher's processes from the start, so no authentication is needed.
Messages never leave the machine, so they carry no version.
"""

from __future__ import annotations

import array
import os
import socket
from typing import Any, Generic, TypeVar

import msgspec

from everstep.errors import DECODE_ERRORS, MalformedMessage


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the fork server: fork a child that calls ``target`` (``module:function``).

    The function gets the accompanying descriptors as a tuple, and ``arguments`` by keyword. File names and the like go
    as bytes (``os.fsencode``): messages hold UTF-8 only, which names of files need not be.
    """

    serial: int  # the launcher's number for this child
    target: str
    arguments: dict[str, Any] = {}
    environment: dict[str, bytes | None] = {}  # changes to the fork server's own; None removes a name


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To the fork server: send ``number`` to a child (SIGKILL: to its whole process group). Ignored if it is dead.

    It goes through the fork server because only the parent can be sure that the pid still names its child.
    """

    serial: int
    number: int


class StartForkServer(msgspec.Struct, frozen=True, tag=True):
    """To the zygote: fork a fork server. Its end of the channel to the launcher comes along."""


class ForkServerReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the fork server: its imports are done."""


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the fork server: the child exists."""

    serial: int
    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From the fork server: the child is dead and reaped; one of ``code`` and ``signal`` is set."""

    serial: int
    pid: int
    code: int | None
    signal: int | None


class ReachedMain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From a worker: the script has reached ``everstep.main``."""


class Promote(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """To a standby: it is now ``local_rank``."""

    local_rank: int


ToForkServer = Fork | Signal
FromForkServer = ForkServerReady | Forked | Exited


MAX_MESSAGE_BYTES = 192 << 10
"""Below the kernel's default send buffer (208 KiB), so that one message always fits."""
MAX_DESCRIPTORS = 8

T = TypeVar("T")


class ControlChannel(Generic[T]):
    """One end of a socket pair; ``message_type`` is the (union) type of the messages that it receives."""

    def __init__(self, end: socket.socket, message_type: Any) -> None:
        self._socket = end
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(message_type)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def send(self, message: msgspec.Struct, descriptors: tuple[int, ...] = ()) -> None:
        """Send one message. Raises OSError if the other side is gone, MalformedMessage if the message is too big."""
        body = msgspec.msgpack.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise MalformedMessage(
                f"a {type(message).__name__} of {len(body)} bytes is over the limit of {MAX_MESSAGE_BYTES}: "
                "shorten the script's arguments"
            )
        socket.send_fds(self._socket, [body], list(descriptors), socket.MSG_NOSIGNAL)

    def receive(self, *, wait: bool = True) -> tuple[T, tuple[int, ...]] | None:
        """Return the next message and its descriptors (close-on-exec), or None at end-of-file.

        Raises:
            BlockingIOError: Nothing is there and ``wait`` is false.
            MalformedMessage: The message is unknown.
        """
        flags = socket.MSG_CMSG_CLOEXEC | (0 if wait else socket.MSG_DONTWAIT)
        descriptors = array.array("i")
        try:  # socket.recv_fds of Python 3.11 ignores its flags
            room = socket.CMSG_LEN(MAX_DESCRIPTORS * descriptors.itemsize)
            body, ancillary, _, _ = self._socket.recvmsg(MAX_MESSAGE_BYTES, room, flags)
        except ConnectionResetError:
            return None
        if not body:
            return None
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        try:
            return self._decoder.decode(body), tuple(descriptors)
        except DECODE_ERRORS as error:
            for number in descriptors:
                os.close(number)
            raise MalformedMessage(f"a packet of {len(body)} bytes is not a known message: {error}") from error


def make_socket_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends, both close-on-exec."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
