"""Serve ``node.sock``: one request and one answer, each a line of JSON, for processes of this machine."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from everstep.errors import DECODE_ERRORS, EverstepError, PermissionDenied
from everstep.wire.v1.node_status import LocalAnswer, LocalRefusal, LocalRequest
from everstep_agent.lifecycle import peer_credentials

log = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 128 << 10
READ_TIMEOUT_S = 5.0
"""Seconds in which the request must arrive and, later, the answer must be read."""

MAX_CONNECTIONS = 16

_decoder = msgspec.json.Decoder(LocalRequest)


class NodeSocketServer:
    """Listen in the private run directory. ``handle`` answers requests; its errors are refusals."""

    def __init__(self, path: Path, handle: Callable[[LocalRequest], Awaitable[LocalAnswer]]) -> None:
        self._path, self._handle = path, handle
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Start listening. Replaces the socket file of an agent that was killed."""
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._accept, str(self._path), limit=MAX_REQUEST_BYTES)
        finally:
            os.umask(before)

    def close(self) -> None:
        """Stop listening and cut all connections."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        self._path.unlink(missing_ok=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            answer = await self._answer(reader, writer)
            writer.write(msgspec.json.encode(answer) + b"\n")
            async with asyncio.timeout(READ_TIMEOUT_S):
                await writer.drain()
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError, asyncio.CancelledError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> LocalAnswer:
        """Read the request and return the answer. Raises OSError, EOFError, TimeoutError, LimitOverrunError."""
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):  # first, as the end of a connection with unread data is a reset
                line = await reader.readuntil(b"\n")
            self._admit(writer.get_extra_info("socket"))
            return await self._handle(_decoder.decode(line))
        except DECODE_ERRORS as error:
            return LocalRefusal(message=f"the request cannot be read: {error}"[:4096])
        except EverstepError as error:
            log.warning("refused a request on %s: %s", self._path, error)
            return LocalRefusal(message=str(error)[:4096])

    def _admit(self, connected: socket.socket) -> None:
        """Raise PermissionDenied for another user's process, or beyond the limit of connections."""
        pid, uid = peer_credentials(connected)
        if uid not in (os.geteuid(), 0):
            raise PermissionDenied(f"pid {pid} belongs to user {uid}; only the agent's user and root may ask")
        if len(self._tasks) > MAX_CONNECTIONS:
            raise PermissionDenied(f"{MAX_CONNECTIONS} requests are being answered: try again")
