"""A line between one controller and a database on a unix socket that can be cut: whoever is at either end hears nothing
more, and nothing that it says arrives."""

from __future__ import annotations

import contextlib
import selectors
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy.engine import make_url

_PORT = 5432
_PIECE = 1 << 16


class CutLine:
    """Forwards bytes in a thread of its own until ``cut``, and again after ``mend``."""

    def __init__(self, database: str) -> None:
        url = make_url(database)
        self._target = f"{url.query['host']}/.s.PGSQL.{_PORT}"
        self._directory = Path(tempfile.mkdtemp(prefix="everstep-line-"))
        self.url = url.set(query={**url.query, "host": str(self._directory)}).render_as_string(hide_password=False)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._directory / f".s.PGSQL.{_PORT}"))
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
        shutil.rmtree(self._directory)

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
        far = socket.socket(socket.AF_UNIX)
        far.connect(self._target)
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
    line = CutLine(database)
    try:
        yield line
    finally:
        line.close()
