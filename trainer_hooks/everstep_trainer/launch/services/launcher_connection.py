"""Connect the launcher to its node's agent: offer the node to the job and receive directives.

Training never depends on the connection. While the agent is away the launcher keeps reconnecting, and reports wait.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path

from everstep.clock import Backoff
from everstep.errors import AuthenticationError, EverstepError, MalformedMessage, Unavailable
from everstep.wire.framing import SUPPORTED_VERSIONS, FrameDecoder, encode_frame
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob
from everstep.wire.v1.local import MAX_FRAME_BYTES, ConnectionRole, FromAgent, Goodbye, Hello, RankExited, Welcome
from everstep.wire.v1.node_status import NODE_SOCKET
from everstep.wire.v1.training import LauncherJoined, LauncherLeaving

log = logging.getLogger(__name__)

RETRY = Backoff(floor_s=0.02, ceiling_s=1.0)
MAX_UNSENT_REPORTS = 256
"""Reports kept while the agent is away; the oldest are dropped first. A launcher makes a handful in an hour."""
WELCOME_TIMEOUT_S = 10.0
"""Longest wait for an agent's Welcome before the launcher reconnects."""
_CREDENTIALS = struct.Struct("3i")

Directive = NewGeneration | KillRank | StopJob


class LauncherConnection:
    """Keeps one connection to the agent at ``path``.

    ``make_joined`` makes the LauncherJoined to send after each Welcome; ``on_directive`` receives every directive for
    the job.
    """

    def __init__(
        self, path: str, job: str, make_joined: Callable[[], LauncherJoined], on_directive: Callable[[Directive], None]
    ) -> None:
        self._path = path
        self._hello = Hello(protocols=SUPPORTED_VERSIONS, role=ConnectionRole.LAUNCHER, job=job, pid=os.getpid())
        self._make_joined = make_joined
        self._on_directive = on_directive
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: deque[RankExited | LauncherLeaving] = deque(maxlen=MAX_UNSENT_REPORTS)
        self.node: str | None = None
        self.welcome: Welcome | None = None

    @property
    def connected(self) -> bool:
        """True if the agent has welcomed this launcher and is still there."""
        return self._writer is not None

    def report(self, message: RankExited | LauncherLeaving) -> None:
        """Send a report at once, or when the agent is back."""
        if self._writer is None:
            self._unsent.append(message)
        else:
            self._writer.write(encode_frame(message))

    async def run(self) -> None:
        """Connect, listen and reconnect until cancelled."""
        attempt = 0
        logged = ""
        while True:
            try:
                await self._session()
                attempt, logged = 0, ""
                log.warning("the agent at %s closed the connection; training continues, reconnecting", self._path)
            except (OSError, EverstepError) as error:
                problem = describe_absence(self._path, error)
                if attempt >= 3 and problem != logged:  # an agent that restarts is back within a few attempts
                    log.warning("%s; training continues, reconnecting", problem)
                    logged = problem
            await asyncio.sleep(RETRY.delay_s(attempt, random.random()))
            attempt += 1

    async def leave(self, detail: str) -> None:
        """Say goodbye if the agent is connected."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.write(encode_frame(Goodbye(detail=detail[:4096])))
            async with asyncio.timeout(1.0):  # wait_for of Python 3.11 may swallow a second Ctrl-C's cancellation
                await writer.drain()
        except (OSError, TimeoutError):
            log.debug("the agent was not notified of the exit")
        finally:
            writer.close()

    async def _session(self) -> None:
        """Serve one connection, from Hello to end-of-file. Raises OSError or EverstepError if it fails."""
        reader, writer = await asyncio.open_unix_connection(self._path)
        is_welcome = False
        try:
            _check_peer(writer)
            writer.write(encode_frame(self._hello))
            decoder: FrameDecoder[FromAgent] = FrameDecoder(FromAgent, MAX_FRAME_BYTES)
            async with asyncio.timeout(WELCOME_TIMEOUT_S) as limit:
                while data := await reader.read(1 << 16):
                    for message in decoder.feed(data):
                        if not is_welcome:
                            self._begin(message, writer)
                            is_welcome = True
                            limit.reschedule(None)
                        elif isinstance(message, NewGeneration | KillRank | StopJob):
                            self._on_directive(message)
            if not is_welcome:
                raise Unavailable("it rejected the connection; see its log")
        finally:
            if self._writer is writer:
                self._writer = None
            writer.close()

    def _begin(self, welcome: FromAgent, writer: asyncio.StreamWriter) -> None:
        if not isinstance(welcome, Welcome):
            raise MalformedMessage(f"its first message was {type(welcome).__name__} instead of Welcome")
        self.welcome, self.node, self._writer = welcome, welcome.node, writer
        writer.write(encode_frame(self._make_joined()))
        while self._unsent:
            self.report(self._unsent.popleft())


def describe_absence(path: str, error: Exception) -> str:
    """Return why no agent serves jobs at the socket."""
    if isinstance(error, FileNotFoundError) and Path(path).with_name(NODE_SOCKET).exists():
        return (
            f"the agent in {Path(path).parent} runs standalone, without a controller, and serves no jobs: connect it "
            "by `everstep node join URL`, or omit --agent-socket for a run with a controller of its own"
        )
    return f"no agent at {path}: {error}"


def _check_peer(writer: asyncio.StreamWriter) -> None:
    """Raise AuthenticationError unless the agent runs as this user or as root."""
    connection: socket.socket = writer.get_extra_info("socket")
    _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid not in (0, os.getuid()):
        raise AuthenticationError(f"it runs as user {uid}; only agents of this user or of root are trusted")
