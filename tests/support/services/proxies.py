"""Proxies to a database's unix socket or a controller's port that stop forwarding bytes when a test requests it."""

from __future__ import annotations

import contextlib
import selectors
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from sqlalchemy.engine import make_url

_PORT = 5432
_PIECE = 1 << 16


class Proxy:
    """Forward bytes in a thread of its own until ``cut``, and again after ``mend``.

    Args:
        url: Address of the proxy for its clients.
        listener: Listening socket of the proxy.
        connect: Opens a connection to the server.
    """

    def __init__(self, url: str, listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
        self.url = url
        self._listener = listener
        self._connect = connect
        self._listener.listen(64)
        self._forwarding = threading.Event()
        self._forwarding.set()
        self._is_closing = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._forward, name="proxy")
        self._thread.start()

    def cut(self) -> None:
        """Stop forwarding without closing any connection."""
        self._forwarding.clear()
        self._wake_sender.send(b"x")

    def mend(self) -> None:
        """Forward the waiting bytes, and go on."""
        self._forwarding.set()

    def close(self) -> None:
        self._is_closing = True
        self.cut()
        self.mend()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._wake_sender.close()

    def _forward(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select():
                self._forwarding.wait()
                if key.fileobj is self._wake_receiver:
                    self._wake_receiver.recv(_PIECE)
                elif key.fileobj is self._listener:
                    self._accept()
                elif key.data is not None and key.fd >= 0:
                    self._forward_piece(key.fileobj, key.data)  # type: ignore[arg-type]

    def _accept(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = self._connect()
        except OSError:
            near.close()
            return
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _forward_piece(self, source: socket.socket, target: socket.socket) -> None:
        if source.fileno() < 0:  # its other end was closed in this round
            return
        data = b""
        with contextlib.suppress(OSError):
            data = source.recv(_PIECE)
        try:
            target.sendall(data)
        except OSError:
            data = b""
        if not data:
            for end in (source, target):
                self._selector.unregister(end)
                end.close()


@contextlib.contextmanager
def database_proxy(database: str) -> Iterator[Proxy]:
    """Yield a proxy to a test's database. Clients use its ``url``."""
    url, directory = make_url(database), Path(tempfile.mkdtemp(prefix="everstep-proxy-"))
    over = url.set(query={**url.query, "host": str(directory)}).render_as_string(hide_password=False)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / f".s.PGSQL.{_PORT}"))

    def connect() -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        far.connect(f"{url.query['host']}/.s.PGSQL.{_PORT}")
        return far

    try:
        yield from _open(Proxy(over, listener, connect))
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def controller_proxy(address: Callable[[], str]) -> Iterator[Proxy]:
    """Yield a proxy to a controller. ``address`` returns the current ``host:port`` for each connection."""
    listener = socket.create_server(("127.0.0.1", 0))

    def connect() -> socket.socket:
        host, _, port = address().rpartition(":")
        return socket.create_connection((host, int(port)), timeout=5.0)

    yield from _open(Proxy(f"http://127.0.0.1:{listener.getsockname()[1]}", listener, connect))


def _open(proxy: Proxy) -> Iterator[Proxy]:
    try:
        yield proxy
    finally:
        proxy.close()
