"""``agent.sock``: where the launchers and ranks of this node are connected.

A unix stream socket in a directory of our own; the kernel's word on the other end (same user, or root) is the
authentication. Beside each connection the process behind it is held by a pidfd, so that a kill reaches that process
or nobody, whatever has become of its number.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import struct
from collections import Counter
from pathlib import Path

import msgspec

from everstep.errors import EverstepError, MalformedMessage, PermissionDenied
from everstep.wire.framing import FrameDecoder, encode_frame, negotiate
from everstep.wire.v1.directives import KillRank
from everstep.wire.v1.local import MAX_FRAME_BYTES, FromAgent, Goodbye, Hello, ToAgent, Welcome
from everstep_agent.jobs.registry import JobRegistry

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
"""A connection that has not said who it is by then is closed."""

IDLE_CHECK_INTERVAL_S = 0.5
"""Between looks for silent ranks while none is connected."""

MAX_UNREAD_BYTES = 256 << 10
"""What may wait unread in our own buffer for a peer that does not read; after that only the newest of each kind."""

REFUSAL_REASONS = ("forbidden", "malformed", "protocol_version", "no_hello")
"""Why a connection is turned away or cut; ``counts`` has each from the start, so that a rate over it sees the first."""

_SO_PEERPIDFD = 77
"""Linux 6.5 and later: the peer's pidfd as of its connect; ``socket`` does not name it yet."""

_UCRED = struct.Struct("iII")


class AgentSocketServer:
    """Listens on ``agent.sock`` and brings what is heard to ``jobs``.

    Args:
        path: of the socket, in a directory that is ours alone.
        welcome: the answer to a Hello.
        jobs: told of everything.
        max_connections: more are turned away.
    """

    def __init__(self, path: Path, welcome: Welcome, jobs: JobRegistry, max_connections: int) -> None:
        self.refused_counts: Counter[str] = Counter(dict.fromkeys(REFUSAL_REASONS, 0))
        self.welcome = welcome
        self.jobs = jobs
        self.connections: set[_Connection] = set()
        self.max_connections = max_connections
        self._path = path
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Listens. A socket file left behind by an agent that was killed is replaced."""
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: _Connection(self), str(self._path), backlog=128
            )
        finally:
            os.umask(before)

    async def watch_silence(self, interval_s: float) -> None:
        """Looks for silent ranks until cancelled; the loop's own lateness is taken off their silence."""
        loop = asyncio.get_running_loop()
        while True:
            pause_s = interval_s if self.jobs.is_busy() else IDLE_CHECK_INTERVAL_S
            due = loop.time() + pause_s
            await asyncio.sleep(pause_s)
            self.jobs.check_silence(max(0.0, loop.time() - due))

    def close(self) -> None:
        """Closes the socket and all connections, telling nobody: who is connected runs on and comes again."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_silently()
        self._path.unlink(missing_ok=True)

    def count_refusal(self, reason: str, error: EverstepError | str) -> None:
        """Counts a connection that was turned away or cut, and says why."""
        self.refused_counts[reason] += 1
        log.warning("a local connection is closed: %s", error)


class _Connection(asyncio.Protocol):
    """One connected process; a ``Peer`` of ``everstep_agent.jobs.seats`` once it has said Hello."""

    def __init__(self, server: AgentSocketServer) -> None:
        self._server = server
        self._decoder: FrameDecoder[ToAgent] = FrameDecoder(ToAgent, MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._hello: Hello | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._pid = 0
        self._pidfd = -1
        self._paused = False
        self._unsent_by_kind: dict[tuple[type, int], FromAgent] = {}
        self._close_reason = ""

    # --- what asyncio calls --------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._server.connections.add(self)
        try:
            self._admit(transport.get_extra_info("socket"))
        except EverstepError as error:
            self._server.count_refusal(error.code, error)
            transport.abort()
            return
        transport.set_write_buffer_limits(high=MAX_UNREAD_BYTES)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self._check_hello)

    def data_received(self, data: bytes) -> None:
        if self._close_reason:
            return
        try:
            for message in self._decoder.feed(data):
                self._handle_message(message)
        except EverstepError as error:
            self._server.count_refusal(error.code, f"pid {self._pid}: {error}")
            self._close_reason = f"its connection was closed: {error}"[:1000]
            self.close()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        unsent, self._unsent_by_kind = self._unsent_by_kind, {}
        for message in unsent.values():
            self.send(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._hello is not None:
            self._server.jobs.handle_disconnect(self, self._close_reason or self._describe_end(exc))
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    # --- what jobs call ------------------------------------------------------------------------------------------

    def send(self, message: FromAgent) -> None:
        """Sends now; to a peer that does not read, the newest of each kind when it reads again."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._paused:
            key = (type(message), message.local_rank if isinstance(message, KillRank) else 0)
            self._unsent_by_kind.pop(key, None)
            self._unsent_by_kind[key] = message
        else:
            self._transport.write(encode_frame(message))

    def kill(self) -> None:
        """SIGKILL to the process behind this connection."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except (ProcessLookupError, OSError) as error:
            log.warning("pid %d could not be killed: %s", self._pid, error)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def process_state(self) -> str:
        """The kernel's letter for the process; empty where it is gone."""
        try:
            stat = Path(f"/proc/{self._pid}/stat").read_bytes()
        except OSError:
            return ""
        return stat.rpartition(b")")[2].split()[0].decode()

    def close_silently(self) -> None:
        """Closes without telling the jobs: it is the agent that goes, not the process."""
        self._hello = None
        self.close()

    @property
    def unsent_bytes(self) -> int:
        """What waits in our own memory for the peer to read."""
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    # --- inside --------------------------------------------------------------------------------------------------

    def _admit(self, connected: socket.socket) -> None:
        """Raises PermissionDenied for another user's process, and for one too many."""
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self._pid, uid, _ = _UCRED.unpack(credentials)
        if uid not in (os.geteuid(), 0):
            raise PermissionDenied(
                f"pid {self._pid} belongs to user {uid}; agent and trainer must run as the same user"
            )
        if len(self._server.connections) > self._server.max_connections:
            raise PermissionDenied(
                f"{self._server.max_connections} launchers and ranks are connected already; raise --max-connections"
            )
        self._pidfd = _peer_pidfd(connected, self._pid)

    def _handle_message(self, message: ToAgent) -> None:
        if self._hello is not None:
            if isinstance(message, Hello):
                raise MalformedMessage("a second Hello on one connection")
            self._server.jobs.handle_message(self, message)
            return
        if isinstance(message, Goodbye):
            self.close()
            return
        if not isinstance(message, Hello):
            raise MalformedMessage(f"the first frame must be Hello, not {type(message).__name__}")
        assert self._transport is not None
        protocol = negotiate(message.protocols)
        self._transport.write(encode_frame(msgspec.structs.replace(self._server.welcome, protocol=protocol)))
        self._server.jobs.handle_hello(self, message)
        self._hello = message

    def _check_hello(self) -> None:
        if self._hello is None:
            self._server.count_refusal("no_hello", f"pid {self._pid} did not say Hello within {HELLO_TIMEOUT_S} s")
            self.close()

    def _describe_end(self, exc: Exception | None) -> str:
        if exc is not None:
            return f"its connection broke: {exc}"
        if self._decoder.pending_bytes:
            return "its connection ended in the middle of a frame"
        return "its connection ended"


def _peer_pidfd(connected: socket.socket, pid: int) -> int:
    """A pidfd of the process that connected. Raises PermissionDenied where there is none any more."""
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass  # a kernel before 6.5: the moment between connect and here is all that is left to chance
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise PermissionDenied(f"pid {pid} is gone, or in another pid namespace: {error.strerror}") from error
