"""Surroundings of a program: other processes, and servers on this machine."""

from __future__ import annotations

import contextlib
import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.calm.program import Surroundings, pace

PIECES, PIECE_BYTES, PIECE_S = 16, 4096, 0.5
DOWNLOAD_BYTES = PIECES * PIECE_BYTES


def busy_loops(count: int) -> Surroundings:
    """Return surroundings with processes that only compute."""

    @contextlib.contextmanager
    def running(_folder: Path) -> Iterator[Mapping[str, str]]:
        command = [sys.executable, "-c", "while True: sum(range(999))"]
        loops = [subprocess.Popen(command) for _ in range(count)] if pace() else []
        try:
            yield {}
        finally:
            for loop in loops:
                loop.kill()
            for loop in loops:
                loop.wait()

    return running


class _SlowAnswer(http.server.BaseHTTPRequestHandler):
    """Send a file in pieces."""

    def do_GET(self) -> None:
        """Answer a GET."""
        self.send_response(200)
        self.send_header("Content-Length", str(DOWNLOAD_BYTES))
        self.end_headers()
        with contextlib.suppress(ConnectionError):  # the rank was killed
            for _ in range(PIECES):
                time.sleep(PIECE_S * pace())
                self.wfile.write(bytes(PIECE_BYTES))

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def slow_server(_folder: Path) -> Iterator[Mapping[str, str]]:
    """Run a server whose answer takes 8 s."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _SlowAnswer) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield {"CALM_URL": f"http://127.0.0.1:{server.server_address[1]}/"}
        finally:
            server.shutdown()
            thread.join()
