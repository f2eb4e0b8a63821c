"""Forward TCP connections so that the end of the server does not show at the client.

JAX ends a process as soon as its connection to the coordination service breaks, by ``LOG(FATAL)`` in C++ (XLA's
``coordination_service_agent.cc``, jaxlib 0.10.2). A client that connects through a forwarder in its own process keeps
an open, silent connection instead. Everstep knows earlier than JAX that a rank is lost, and replaces the client.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading

BUFFER_BYTES = 64 << 10
CONNECT_TIMEOUT_S = 10.0


class _Side:
    """One socket of a forwarded connection, and the bytes that it is still to send."""

    def __init__(self, connection: socket.socket, *, is_upstream: bool) -> None:
        self.connection, self.is_upstream = connection, is_upstream
        self.unsent = bytearray()
        self.other: _Side | None = None


class TcpForwarder:
    """Listens on a free port of ``host`` and forwards each connection to ``target``, in a thread of its own.

    Args:
        host: Address to listen on.
        target: Host and port of the server.
        hold: Keep a client's connection open when the server's side ends.
    """

    def __init__(self, host: str, target: tuple[str, int], *, hold: bool) -> None:
        self._target, self._hold = target, hold
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._sides: set[_Side] = set()
        self._thread = threading.Thread(target=self._run, name="everstep-forwarder", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close all connections, first those of clients, so that none receives what the server says as it ends."""
        self._wake(b"x")
        self._thread.join()
        self._wake_sender.close()

    def close_when_idle(self) -> None:
        """Close once no client is connected any more; returns at once."""
        self._wake(b"i")

    def _wake(self, order: bytes) -> None:
        with contextlib.suppress(OSError):  # ended before
            self._wake_sender.send(order)

    def _run(self) -> None:
        until_idle = False
        try:
            while not (until_idle and not self._sides):
                for key, events in self._selector.select():
                    if key.fileobj is self._wake_receiver:
                        if self._wake_receiver.recv(1) != b"i":
                            return
                        until_idle = True
                    elif key.fileobj is self._listener:
                        self._accept()
                    elif key.data in self._sides:  # not ended by an event before
                        self._move(key.data, events)
        finally:
            for side in sorted(self._sides, key=lambda side: side.is_upstream):
                side.connection.close()
            self._sides.clear()
            self._selector.close()
            self._listener.close()
            self._wake_receiver.close()
            self._wake_sender.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        try:
            server = socket.create_connection(self._target, CONNECT_TIMEOUT_S)
        except OSError:
            client.close()  # gRPC tries again
            return
        pair = _Side(client, is_upstream=False), _Side(server, is_upstream=True)
        pair[0].other, pair[1].other = pair[1], pair[0]
        for side in pair:
            side.connection.setblocking(False)
            side.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sides.add(side)
            self._selector.register(side.connection, selectors.EVENT_READ, side)

    def _move(self, side: _Side, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._send(side)
        if events & selectors.EVENT_READ and side in self._sides:
            try:
                data = side.connection.recv(BUFFER_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end(side)
            elif side.other is not None:
                side.other.unsent += data
                self._send(side.other)

    def _send(self, side: _Side) -> None:
        try:
            while side.unsent:
                del side.unsent[: side.connection.send(side.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._end(side)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if side.unsent else 0)
        self._selector.modify(side.connection, wanted, side)

    def _end(self, side: _Side) -> None:
        """End one side, and the other too unless it is a client's that is held."""
        self._drop(side)
        other, side.other = side.other, None
        if other is None:
            return
        other.other = None  # what it sends from now on is read and dropped
        if not (self._hold and side.is_upstream):
            self._drop(other)

    def _drop(self, side: _Side) -> None:
        if side in self._sides:
            self._sides.discard(side)
            self._selector.unregister(side.connection)
            side.connection.close()
