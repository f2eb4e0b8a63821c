"""A fake agent for launchers and ranks, which serves its unix socket in a thread and records their messages."""

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
    """One connection. ``hello``: its first message; ``messages``: the following ones in order."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.hello: Hello | None = None
        self.messages: list[Any] = []
        self.closed = False

    def send(self, message: msgspec.Struct) -> None:
        self.connection.sendall(encode_frame(message))


class FakeAgent:
    """Serve ``path``. ``greet`` may be replaced to send other messages than Welcome to a new peer."""

    def __init__(self, path: Path, node: str = "n1") -> None:
        self.path = path
        self.node = node
        self.peers: list[Peer] = []
        self.greet: Callable[[Peer], None] = lambda peer: peer.send(self.welcome())
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
        """Close all connections, as an agent that has died. ``start`` makes a new one at the same path."""
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

    def wait_until(self, condition: Callable[[], M | None], description: str) -> M:
        """Wait until ``condition``, which is checked after every message, is true, and return its value."""
        deadline = time.perf_counter() + DEADLINE_S
        with self._changed:
            while not (result := condition()):
                left = deadline - time.perf_counter()
                if left <= 0:
                    raise AssertionError(f"never happened: {description}; received {[p.messages for p in self.peers]}")
                self._changed.wait(left)
        return result

    def launcher(self) -> Peer:
        """Wait for a connected launcher that has sent a message after Hello."""

        def joined() -> Peer | None:
            for peer in self.peers:
                if (
                    peer.hello is not None
                    and peer.hello.role is ConnectionRole.LAUNCHER
                    and peer.messages
                    and not peer.closed
                ):
                    return peer
            return None

        return self.wait_until(joined, "a launcher that joined")

    def wait_for_message(self, kind: type[M], matching: Callable[[M], bool] = lambda _: True) -> M:
        """Wait for the first message of this kind from any peer, and return it."""

        def first() -> M | None:
            found = (m for peer in self.peers for m in peer.messages if isinstance(m, kind) and matching(m))
            return next(found, None)

        return self.wait_until(first, f"a {kind.__name__}")

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
                    self._record(peer, message)
            with self._changed:
                peer.closed = True
                self._changed.notify_all()

    def _record(self, peer: Peer, message: Any) -> None:
        with self._changed:
            if isinstance(message, Hello):
                peer.hello = message
                with contextlib.suppress(OSError):  # the peer may have ended
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
    """Yield a fake agent that serves until the end of the block."""
    agent = FakeAgent(path, node)
    agent.start()
    try:
        yield agent
    finally:
        agent.stop()
