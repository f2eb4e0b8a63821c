"""An agent's unix socket for launchers and ranks, played by a thread: records what is said, says what it is told to."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.local import MAX_FRAME_BYTES, ConnectionRole, Hello, ToAgent, Welcome

M = TypeVar("M")
DEADLINE_S = 60.0


class Peer:
    """One connection. ``hello`` is what it began with; ``messages`` what followed, in order."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello: Hello | None = None
        self.messages: list[Any] = []
        self.closed = False

    def say(self, message: msgspec.Struct) -> None:
        self.connection.sendall(encode_frame(message))


class FakeAgent:
    """Serves ``path``. ``greet`` may be replaced to say more (or something else) than Welcome to a new peer."""

    def __init__(self, path: Path, node: str = "n1") -> None:
        self.path = path
        self.node = node
        self.peers: list[Peer] = []
        self.greet: Callable[[Peer], None] = lambda peer: peer.say(self.welcome())
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None

    def welcome(self) -> Welcome:
        return Welcome(
            protocol=1, node=self.node, vault_socket=str(self.path.parent / "vault.sock"), rank_heartbeat_interval_s=0.1
        )

    def start(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(self.path))
        self._listener.listen(64)
        self._spawn(self._accept, self._listener)

    def stop(self) -> None:
        """Closes everything, as an agent that is gone; ``start`` makes a new one at the same path."""
        assert self._listener is not None
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.path.unlink()
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
        self._threads.clear()
        self.peers.clear()

    def wait_until(self, condition: Callable[[], M | None], what: str) -> M:
        """What ``condition`` returns once that is true. It is looked at after every message."""
        deadline = time.perf_counter() + DEADLINE_S
        with self._changed:
            while not (result := condition()):
                left = deadline - time.perf_counter()
                if left <= 0:
                    raise AssertionError(f"never happened: {what}; heard {[p.messages for p in self.peers]}")
                self._changed.wait(left)
        return result

    def launcher(self) -> Peer:
        """The living launcher, once it has said Hello and something after it."""

        def there() -> Peer | None:
            for peer in self.peers:
                if (
                    peer.hello is not None
                    and peer.hello.role is ConnectionRole.LAUNCHER
                    and peer.messages
                    and not peer.closed
                ):
                    return peer
            return None

        return self.wait_until(there, "a launcher that joined")

    def heard(self, kind: type[M], matching: Callable[[M], bool] = lambda _: True) -> M:
        """The first message of this kind from anybody, once it is there."""

        def there() -> M | None:
            said = (m for peer in self.peers for m in peer.messages if isinstance(m, kind) and matching(m))
            return next(said, None)

        return self.wait_until(there, f"a {kind.__name__}")

    def _spawn(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            peer = Peer(connection)
            self.peers.append(peer)
            self._spawn(self._serve, peer)

    def _serve(self, peer: Peer) -> None:
        decoder: FrameDecoder[Any] = FrameDecoder(ToAgent, MAX_FRAME_BYTES)
        with peer.connection:
            while data := _receive(peer.connection):
                for message in decoder.feed(data):
                    self._take(peer, message)
            with self._changed:
                peer.closed = True
                self._changed.notify_all()

    def _take(self, peer: Peer, message: Any) -> None:
        with self._changed:
            if isinstance(message, Hello):
                peer.hello = message
                with contextlib.suppress(OSError):  # it may be gone again
                    self.greet(peer)
            else:
                peer.messages.append(message)
            self._changed.notify_all()


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except OSError:
        return b""


@contextlib.contextmanager
def fake_agent(path: Path, node: str = "n1") -> Iterator[FakeAgent]:
    """A fake agent that serves until the end of the block."""
    agent = FakeAgent(path, node)
    agent.start()
    try:
        yield agent
    finally:
        agent.stop()
