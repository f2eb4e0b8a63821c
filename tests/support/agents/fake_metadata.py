"""A metadata service on 127.0.0.1 that answers as the test says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FakeMetadata(ThreadingHTTPServer):
    """Answers each path with (status, body); 404 for others. ``requests`` has all (method, path, headers)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers: dict[str, tuple[int, bytes]] = {"/latest/api/token": (200, b"token-1")}
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.date = ""
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeMetadata

    def do_GET(self) -> None:
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        status, body = self.server.answers.get(self.path, (404, b"<html>not found</html>"))
        if status == 0:  # never answers
            self.server.released.wait(30.0)
            return
        self.send_response_only(status)
        if self.server.date:
            self.send_header("Date", self.server.date)
        if status in (301, 302):
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_PUT(self) -> None:
        self.do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def fake_metadata() -> Iterator[FakeMetadata]:
    """Run the service until the end of the block."""
    server = FakeMetadata()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        server.shutdown()
        server.server_close()
        thread.join()
