"""Lines that can be cut, to a database on a unix socket or to a controller's port: whoever is at either end hears
nothing more, and nothing that it says arrives."""

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


class CutLine:
    """Forwards bytes in a thread of its own until ``cut``, and again after ``mend``.

    Args:
        url: by which this end of the line is reached.
        listener: at this end.
        reach: a connection to the other one.
    """

    def __init__(self, url: str, listener: socket.socket, reach: Callable[[], socket.socket]) -> None:
        self.url = url
        self._listener = listener
        self._reach = reach
        self._listener.listen(64)
        self._whole = threading.Event()
        self._whole.set()
        self._ends = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._waking, self._waker = socket.socketpair()
        self._selector.register(self._waking, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._forward, name="line")
        self._thread.start()

    def cut(self) -> None:
        """From now on nothing passes, and no connection ends."""
        self._whole.clear()
        self._waker.send(b"x")

    def mend(self) -> None:
        """What waited passes."""
        self._whole.set()

    def close(self) -> None:
        self._ends = True
        self.cut()
        self.mend()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        self._selector.close()
        self._waker.close()

    def _forward(self) -> None:
        while not self._ends:
            for key, _ in self._selector.select():
                self._whole.wait()
                if key.fileobj is self._waking:
                    self._waking.recv(_PIECE)
                elif key.fileobj is self._listener:
                    self._join()
                elif key.data is not None and key.fd >= 0:
                    self._pass_on(key.fileobj, key.data)  # type: ignore[arg-type]

    def _join(self) -> None:
        near, _ = self._listener.accept()
        try:
            far = self._reach()
        except OSError:
            near.close()
            return
        self._selector.register(near, selectors.EVENT_READ, far)
        self._selector.register(far, selectors.EVENT_READ, near)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        if source.fileno() < 0:  # its other end was closed in this round
            return
        said = b""
        with contextlib.suppress(OSError):
            said = source.recv(_PIECE)
        try:
            target.sendall(said)
        except OSError:
            said = b""
        if not said:
            for one in (source, target):
                self._selector.unregister(one)
                one.close()


@contextlib.contextmanager
def line_to(database: str) -> Iterator[CutLine]:
    """A line to a test's database; ``url`` leads over it."""
    url, directory = make_url(database), Path(tempfile.mkdtemp(prefix="everstep-line-"))
    over = url.set(query={**url.query, "host": str(directory)}).render_as_string(hide_password=False)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / f".s.PGSQL.{_PORT}"))

    def reach() -> socket.socket:
        far = socket.socket(socket.AF_UNIX)
        far.connect(f"{url.query['host']}/.s.PGSQL.{_PORT}")
        return far

    try:
        yield from _open(CutLine(over, listener, reach))
    finally:
        shutil.rmtree(directory)


@contextlib.contextmanager
def line_to_port(place: Callable[[], str]) -> Iterator[CutLine]:
    """A line to a controller's port, ``host:port`` as it is when somebody comes; ``url`` leads over it."""
    listener = socket.create_server(("127.0.0.1", 0))

    def reach() -> socket.socket:
        host, _, port = place().rpartition(":")
        return socket.create_connection((host, int(port)), timeout=5.0)

    yield from _open(CutLine(f"http://127.0.0.1:{listener.getsockname()[1]}", listener, reach))


def _open(line: CutLine) -> Iterator[CutLine]:
    try:
        yield line
    finally:
        line.close()
