"""Serve ``agent.sock``, the unix socket that the launchers and ranks of this node connect to.

The socket lies in a directory that only this user may enter. The kernel's peer credentials (same user, or root) are the
authentication. The agent holds a pidfd per connection, so that a kill never hits a process that reused the pid.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from everstep.errors import EverstepError, MalformedMessage, PermissionDenied
from everstep.host.process_activity import ProcessSample, sample_process
from everstep.host.processes import PROC, read_stat
from everstep.wire.framing import FrameDecoder, encode_frame, negotiate
from everstep.wire.v1.directives import KillRank
from everstep.wire.v1.local import MAX_FRAME_BYTES, ConnectionRole, FromAgent, Goodbye, Hello, ToAgent, Welcome
from everstep_agent.jobs.death_watch import DeathWatch, open_watch
from everstep_agent.jobs.local_processes import ProcessEnd
from everstep_agent.jobs.registry import JobRegistry
from everstep_agent.lifecycle import peer_credentials

log = logging.getLogger(__name__)

HELLO_TIMEOUT_S = 5.0
"""Seconds after which a connection that has sent no Hello is closed."""

IDLE_CHECK_INTERVAL_S = 0.5
"""Most seconds between two checks for silent ranks."""

MAX_UNREAD_BYTES = 256 << 10
"""Bytes buffered for a peer that does not read; beyond that only the newest message of each kind is kept."""

READ_BYTES = 1 << 16

REFUSAL_REASONS = ("forbidden", "malformed", "protocol_version", "no_hello")
"""Reasons to refuse or cut a connection. Each is counted from 0 at the start, so that rates see the first."""

_SO_PEERPIDFD = 77
"""Socket option for the peer's pidfd at connect time (Linux 6.5+); the ``socket`` module does not name it."""


class AgentSocketServer:
    """Listen on ``agent.sock``, in a private directory, and pass every message and disconnect to ``jobs``."""

    def __init__(self, path: Path, welcome: Welcome, jobs: JobRegistry, max_connections: int) -> None:
        self.refused_counts: Counter[str] = Counter(dict.fromkeys(REFUSAL_REASONS, 0))
        self.welcome, self.jobs, self.max_connections = welcome, jobs, max_connections
        self.connections: set[_Connection] = set()
        self._path = path
        self._server: asyncio.AbstractServer | None = None

    async def start(self) -> None:
        """Start listening. Replaces the socket file of an agent that was killed."""
        self._path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.get_running_loop().create_unix_server(
                lambda: _Connection(self), str(self._path), backlog=128
            )
        finally:
            os.umask(before)

    async def watch_silence(self, interval_s: float) -> None:
        """Check for silent ranks until cancelled, whenever one may have been silent for too long, but no more often
        than every ``interval_s``. The event loop's own delay is subtracted from their silence."""
        loop = asyncio.get_running_loop()
        while True:
            pause_s = max(interval_s, min(self.jobs.next_check_s(), IDLE_CHECK_INTERVAL_S))
            due = loop.time() + pause_s
            await asyncio.sleep(pause_s)
            self.jobs.check_silence(max(0.0, loop.time() - due))

    def close(self) -> None:
        """Close the socket and all connections without telling the jobs. The connected processes run on and
        reconnect."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_silently()
        self._path.unlink(missing_ok=True)

    def count_refusal(self, reason: str, error: EverstepError | str) -> None:
        """Count a refused or cut connection and log the reason."""
        self.refused_counts[reason] += 1
        log.warning("closed a local connection: %s", error)


class _Connection(asyncio.Protocol):
    """One connected process; a ``LocalConnection`` once it has sent a Hello."""

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
        self._watch: DeathWatch | None = None
        self._end: ProcessEnd | None = None

    # asyncio protocol callbacks

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
            self._close_reason = f"the agent closed its connection: {error}"[:1000]
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
        if exc is not None:
            self._read_remaining()
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._hello is not None:
            self._server.jobs.handle_disconnect(self, self._close_reason or self._describe_end(exc), self._end)
        if self._watch is not None:
            self._watch.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    # LocalConnection methods called by the jobs

    def send(self, message: FromAgent) -> None:
        """Send now; while the peer does not read, keep only the newest message of each kind."""
        if self._transport is None or self._transport.is_closing():
            return
        if self._paused:
            key = (type(message), message.local_rank if isinstance(message, KillRank) else 0)
            self._unsent_by_kind.pop(key, None)
            self._unsent_by_kind[key] = message
        else:
            self._transport.write(encode_frame(message))

    def kill(self) -> None:
        """Send SIGKILL to the process behind this connection, and to no other that reused its pid."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except OSError as error:
            log.warning("pid %d could not be killed: %s", self._pid, error)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def process_state(self) -> str:
        try:
            return read_stat(PROC / str(self._pid))[0]
        except OSError:
            return ""

    def sample(self, at: float) -> ProcessSample | None:
        return sample_process(self._pid, at)

    def close_silently(self) -> None:
        """Close without telling the jobs, because the agent ends and not the process."""
        self._hello = None
        self.close()

    def _admit(self, connected: socket.socket) -> None:
        """Raise PermissionDenied for another user's process, or beyond ``max_connections``."""
        self._pid, uid = peer_credentials(connected)
        if uid not in (os.geteuid(), 0):
            rule = "agent and trainer must run as the same user"
            raise PermissionDenied(f"pid {self._pid} belongs to user {uid}; {rule}")
        limit = self._server.max_connections
        if len(self._server.connections) > limit:
            raise PermissionDenied(f"the limit of {limit} launchers and ranks is reached; raise --max-connections")
        self._pidfd = _peer_pidfd(connected, self._pid)

    def _handle_message(self, message: ToAgent) -> None:
        if self._hello is not None:
            if isinstance(message, Hello):
                raise MalformedMessage("a second Hello on one connection")
            self._server.jobs.handle_message(self, message)
            if self._watch is not None:
                self._watch.start_if_locked()
            return
        if isinstance(message, Goodbye):
            self.close()
            return
        if not isinstance(message, Hello):
            raise MalformedMessage(f"the first frame must be Hello, not {type(message).__name__}")
        welcome = msgspec.structs.replace(self._server.welcome, protocol=negotiate(message.protocols))
        self._send_welcome(welcome, for_rank=message.role is ConnectionRole.RANK)
        self._server.jobs.handle_hello(self, message)
        self._hello = message

    def _send_welcome(self, welcome: Welcome, *, for_rank: bool) -> None:
        """Send the first frame; to a rank with memory for its mutex, which an older rank does not take."""
        assert self._transport is not None
        frame, sent = encode_frame(welcome), 0
        if for_rank:
            notify = partial(_call_soon, asyncio.get_running_loop(), self.handle_death)
            self._watch = open_watch(self._pid, self._pidfd, notify)
        if self._watch is not None:
            number = self._transport.get_extra_info("socket").fileno()
            # Without the descriptor the rank holds no mutex, and the end of its connection tells of its death.
            with suppress(OSError), socket.socket(fileno=os.dup(number)) as own:
                sent = socket.send_fds(own, [frame], [self._watch.descriptor], socket.MSG_NOSIGNAL)
        self._transport.write(frame[sent:])

    def handle_death(self, end: ProcessEnd) -> None:
        """Handle the death of the process, long before its connection ends if it has much memory."""
        if self._hello is None or self._transport is None or self._transport.is_closing():
            return
        self._read_remaining()  # it may have said goodbye
        self._end = end
        self._close_reason = self._close_reason or "its process ended"
        self._transport.abort()

    def _read_remaining(self) -> None:
        """Read what the peer sent before it closed. A write that fails ends the reading: a Goodbye would be lost."""
        assert self._transport is not None
        descriptor = self._transport.get_extra_info("socket").fileno()
        try:
            while data := os.read(descriptor, READ_BYTES):
                self.data_received(data)
        except OSError:
            pass  # all is read, or the connection was reset

    def _check_hello(self) -> None:
        if self._hello is None:
            self._server.count_refusal("no_hello", f"pid {self._pid} sent no Hello within {HELLO_TIMEOUT_S} s")
            self.close()

    def _describe_end(self, exc: Exception | None) -> str:
        if exc is not None:
            return f"its connection broke: {exc}"
        if self._decoder.pending_bytes:
            return "its connection ended in the middle of a frame"
        return "its connection ended"


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[ProcessEnd], None], end: ProcessEnd) -> None:
    """Call from another thread; nothing happens once the loop is closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, end)


def _peer_pidfd(connected: socket.socket, pid: int) -> int:
    """Return a pidfd of the connected process. Raises PermissionDenied if it is gone."""
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass  # before Linux 6.5 the pid may be reused between connect and pidfd_open
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise PermissionDenied(f"pid {pid} has ended, or is in another pid namespace: {error.strerror}") from error
