"""The vault's unix socket: frames in, answers out, for processes of the same user."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from everstep.channel import Channel
from everstep.errors import AuthenticationError, EverstepError, MalformedMessage, Unavailable
from everstep.framing import FrameDecoder, encode_frame
from everstep.wire.v1.local import MAX_FRAME_BYTES, Failed, FromVault, ToVault

log = logging.getLogger(__name__)

MOST_UNSENT_BYTES = 64 << 20
"""Answers a client may leave unread before it is given up."""

MOST_REQUESTS = 64
"""Requests of one client that are worked on at once; further ones are read when one of them is answered."""


class Client:
    """One connected process."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.supervisor = False
        """Whether findings go to it: it has said what only a supervisor says."""

    def send(self, message: FromVault) -> None:
        """Queues a frame. A client that is gone, or reads nothing, gets none."""
        transport = self._writer.transport
        if transport.is_closing():
            return
        if transport.get_write_buffer_size() > MOST_UNSENT_BYTES:
            log.warning("a client left %d bytes unread; it is given up", transport.get_write_buffer_size())
            transport.abort()
            return
        self._writer.write(encode_frame(message))

    def hand_over(self, message: FromVault, descriptor: int) -> None:
        """Sends a frame with a descriptor beside it; the other process gets one of its own.

        Raises Unavailable where what was sent before has not been taken yet: then the descriptor would come with
        another frame.
        """
        transport = self._writer.transport
        if transport.is_closing() or transport.get_write_buffer_size():
            raise Unavailable("the client is gone, or behind with its answers")
        frame = encode_frame(message)
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
            try:
                sent = socket.send_fds(own, [frame], [descriptor])
            except OSError as error:
                raise Unavailable(f"the client takes no descriptor: {error}") from error
        self._writer.write(frame[sent:])

    def close(self) -> None:
        self._writer.close()


class Handover(msgspec.Struct, frozen=True):
    """An answer, and the connection that goes with it."""

    answer: FromVault
    channel: Channel


Handler = Callable[[ToVault, Client], Awaitable[FromVault | Handover]]


class LocalServer:
    """Serves ``handle`` on a unix socket; ``refused`` hears the code of each refusal."""

    def __init__(self, path: Path, handle: Handler, refused: Callable[[str], None]) -> None:
        self._path = path
        self._handle = handle
        self._refused = refused
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.clients: set[Client] = set()

    async def start(self) -> None:
        """Takes the place of a dead vault's socket; the caller holds the run directory's lock."""
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._connected, str(self._path))
        self._path.chmod(0o600)

    async def stop(self) -> None:
        """Ends all connections and removes the socket."""
        if self._server is not None:
            self._server.close()
        for client in list(self.clients):
            client.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        client = Client(writer)
        self.clients.add(client)
        try:
            _check_peer(writer)
            await self._converse(reader, client)
        except (AuthenticationError, MalformedMessage) as error:
            self._refuse(client, 0, error)
        except ConnectionError:
            pass  # the process is gone
        finally:
            self.clients.discard(client)
            client.close()

    async def _converse(self, reader: asyncio.StreamReader, client: Client) -> None:
        frames: FrameDecoder[ToVault] = FrameDecoder(ToVault, MAX_FRAME_BYTES)
        room = asyncio.Semaphore(MOST_REQUESTS)
        while data := await reader.read(1 << 18):
            for message in frames.feed(data):
                await room.acquire()
                task = asyncio.create_task(self._answer(message, client))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(lambda _: room.release())
        if frames.pending_bytes:
            raise MalformedMessage(f"the connection ended {frames.pending_bytes} bytes into a frame")

    async def _answer(self, message: ToVault, client: Client) -> None:
        try:
            answer = await self._handle(message, client)
            if isinstance(answer, Handover):
                with answer.channel.detach() as sock:
                    client.hand_over(answer.answer, sock.fileno())
            else:
                client.send(answer)
        except EverstepError as error:
            self._refuse(client, message.request, error)
        except Exception as error:
            log.exception("%s failed", type(message).__name__)
            self._refuse(client, message.request, EverstepError(f"{type(error).__name__}: {error}"))

    def _refuse(self, client: Client, request: int, error: EverstepError) -> None:
        self._refused(error.code)
        client.send(Failed(request=request, code=error.code, message=str(error)[:4096]))


def _check_peer(writer: asyncio.StreamWriter) -> None:
    """Raises AuthenticationError where the other process is neither this user's nor root's."""
    sock = writer.get_extra_info("socket")
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid not in (0, os.geteuid()):
        raise AuthenticationError(
            f"process {pid} belongs to user {uid}; this vault serves user {os.geteuid()} and root"
        )
