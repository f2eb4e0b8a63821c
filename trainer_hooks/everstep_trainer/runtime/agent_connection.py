"""Connect a rank to its node's agent: one thread, one Unix socket, for the life of the process.

The thread sleeps until a directive or the next tick is due. Training never waits for it: a message that the agent does
not accept at once is kept and sent later. If the agent is gone, the thread tries to reconnect for ever.

With its Welcome the agent sends memory, in which the thread holds a robust mutex while the connection lasts. The kernel
gives it up the moment that the process dies (``everstep_agent.jobs.death_watch``).
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from everstep.clock import Clock
from everstep.errors import MalformedMessage, Unavailable, VersionMismatch
from everstep.host.robust_mutex import HeldMutex
from everstep.wire.framing import FrameDecoder, encode_frame, negotiate
from everstep.wire.v1.local import MAX_FRAME_BYTES, FromAgent, Goodbye, Hello, ToAgent, Welcome
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.directives import DirectiveListener

logger = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 16
DEFAULT_TICK_S = 0.2
RARE_TICKS = 2
"""Factor of the interval while cores are full. The agent looks at a rank that is silent for two intervals or more."""


class FrameOutbox:
    """Frames to send, oldest first, at most ``max_frames``; a partly sent frame is never dropped."""

    def __init__(self, max_frames: int) -> None:
        self._limit = max_frames
        self._frames: deque[bytes] = deque()
        self._sent = 0

    def __bool__(self) -> bool:
        return bool(self._frames)

    def put(self, frame: bytes) -> None:
        if len(self._frames) >= self._limit:
            del self._frames[1 if self._sent else 0]
        self._frames.append(frame)

    def put_first(self, frames: list[bytes]) -> None:
        """Put frames first for a new connection, and send a partly sent frame from its beginning."""
        self._sent = 0
        self._frames.extendleft(reversed(frames))

    def flush(self, connection: socket.socket) -> None:
        """Send what the socket accepts now. Raises OSError if the connection is gone."""
        while self._frames:
            frame = self._frames[0]
            try:
                rest, flags = memoryview(frame)[self._sent :], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                self._sent += connection.send(rest, flags)
            except BlockingIOError:
                return
            if self._sent == len(frame):
                self._frames.popleft()
                self._sent = 0


@dataclass(eq=False)
class AgentConnection:
    """The connection to the agent's socket at ``path``."""

    path: str
    hello: Hello  # the first frame of every connection
    listener: DirectiveListener  # called from the connection's thread; must not block
    settings: HookSettings
    clock: Clock
    uniform: Callable[[], float]  # draws from [0, 1) for the back-off's jitter

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._outbox = FrameOutbox(self.settings.outbox_frames)
        self._persistent_message: ToAgent | None = None
        self._connection: socket.socket | None = None
        self._mutex: HeldMutex | None = None  # held by the connection's thread, which lives as long as the process
        self._welcome: Welcome | None = None
        self._welcomed = threading.Event()
        self._refused: VersionMismatch | None = None
        self._closing = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="everstep-agent", daemon=True)

    def start(self, timeout_s: float) -> Welcome:
        """Start the thread; return the agent's Welcome. Raises Unavailable after ``timeout_s``, or VersionMismatch."""
        self._thread.start()
        if not self._welcomed.wait(timeout_s):
            raise Unavailable(f"no agent answered at {self.path} within {timeout_s:.0f} s: is everstep-agent running?")
        if self._refused is not None:
            raise self._refused
        assert self._welcome is not None
        return self._welcome

    def send(self, message: ToAgent) -> None:
        """Send a message, at once or as soon as the agent accepts it. Never blocks; callable from any thread."""
        frame = encode_frame(message)
        with self._lock:
            self._outbox.put(frame)
            self._flush()
            waiting = bool(self._outbox) and self._connection is not None
        if waiting:
            self._wake()

    def send_persistent(self, message: ToAgent | None) -> None:
        """Send a message again after every reconnect, until the next call; None ends this."""
        self._persistent_message = message
        if message is not None:
            self.send(message)

    def close(self, detail: str) -> None:
        """Say goodbye and end the thread."""
        self.send(Goodbye(detail=detail))
        self._closing.set()
        self._wake()
        self._thread.join()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _flush(self) -> None:
        if self._connection is not None:
            with suppress(OSError):  # the thread sees the end of the connection and reconnects
                self._outbox.flush(self._connection)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # a wake-up is pending already
            os.write(self._wake_write, b"\0")

    # --- the thread

    def _run(self) -> None:
        attempt = 0
        while not self._closing.is_set():
            connection = self._connect()
            if connection is None:
                self._pause(self.settings.reconnect.delay_s(attempt, self.uniform()))
                attempt += 1
                continue
            attempt = 0
            with connection:
                try:
                    self._serve(connection)
                finally:
                    with self._lock:
                        self._connection = None
                    self._release_mutex()

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self.path)
        except OSError:
            connection.close()
            return None
        first = (self.hello, self.listener.make_tick(), self._persistent_message)
        with self._lock:
            self._outbox.put_first([encode_frame(message) for message in first if message is not None])
            self._connection = connection
            self._flush()
        return connection

    def _pause(self, seconds: float) -> None:
        """Wait for the next attempt, ticking meanwhile."""
        until = self.clock.monotonic() + seconds
        while not self._closing.is_set() and (left := until - self.clock.monotonic()) > 0:
            self.listener.make_tick()
            self._closing.wait(min(left, self._interval_s()))

    def _interval_s(self) -> float:
        if self.listener.is_aborting():
            return self.settings.abort_interval_s
        interval_s = self._welcome.rank_heartbeat_interval_s if self._welcome is not None else DEFAULT_TICK_S
        return RARE_TICKS * interval_s if self.listener.may_tick_rarely() else interval_s

    def _next_tick_at(self) -> float:
        """Return when to tick next: at the same moments on all ranks of a node, as they share its clock. Then a step of
        all ranks is disturbed once, and the agent wakes up once for all of them."""
        interval_s = self._interval_s()
        return (self.clock.monotonic() // interval_s + 1) * interval_s

    def _serve(self, connection: socket.socket) -> None:
        decoder: FrameDecoder[FromAgent] = FrameDecoder(FromAgent, MAX_FRAME_BYTES)
        with selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self._wake_read, selectors.EVENT_READ)
            due = self._next_tick_at()
            while not self._closing.is_set():
                with self._lock:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
                selector.modify(connection, wanted)  # a system call only if it changes
                events = {key.fd: mask for key, mask in selector.select(max(0.0, due - self.clock.monotonic()))}
                if self._wake_read in events:
                    os.read(self._wake_read, 4096)
                if not self._exchange(connection, decoder, events.get(connection.fileno(), 0)):
                    return
                if self.clock.monotonic() >= due or self.listener.is_aborting():
                    self._tick()
                    due = self._next_tick_at()

    def _exchange(self, connection: socket.socket, decoder: FrameDecoder[FromAgent], events: int) -> bool:
        """Send and receive what is ready; return False at the end of the connection."""
        if events & selectors.EVENT_WRITE:
            with self._lock:
                self._flush()
        if not events & selectors.EVENT_READ:
            return True
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, RECEIVE_BYTES, 1)
            for descriptor in descriptors:
                self._hold_mutex(descriptor)
            for message in decoder.feed(data):
                self._take(message)
        except OSError:
            return False
        except MalformedMessage as error:
            logger.warning("the agent sent an unreadable message; reconnecting: %s", error)
            return False
        return bool(data)

    def _hold_mutex(self, descriptor: int) -> None:
        """Hold a mutex in memory of the agent, or go without: the end of the connection tells of a death too."""
        try:
            if self._mutex is None:
                self._mutex = HeldMutex(descriptor)
        except OSError as error:
            logger.debug("the agent learns of a death by the connection only: %s", error)
        finally:
            os.close(descriptor)

    def _release_mutex(self) -> None:
        mutex, self._mutex = self._mutex, None
        if mutex is not None:
            mutex.release()

    def _take(self, message: FromAgent) -> None:
        if isinstance(message, Welcome):
            try:
                negotiate((message.protocol,))
            except VersionMismatch as error:
                self._refused = error
            self._welcome = message
            self._welcomed.set()
        else:
            self.listener.handle_message(message)

    def _tick(self) -> None:
        """Send a tick unless frames are waiting: a tick that is late is worthless."""
        tick = self.listener.make_tick()
        if tick is None:
            return
        with self._lock:
            if not self._outbox:
                self._outbox.put(encode_frame(tick))
                self._flush()
