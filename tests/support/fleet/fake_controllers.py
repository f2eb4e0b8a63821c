"""Fake controllers, which are HTTP ports with answers that a test sets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[], tuple[int, dict[str, object]] | None]


class FakeControllers:
    """Ports with set answers, which count their requests. An answer of None breaks the connection."""

    def __init__(self) -> None:
        self.servers: list[ThreadingHTTPServer] = []
        self.requests: list[str] = []

    def add(self, answer: Answer) -> str:
        """Add a port with this answer, and return its address."""
        name = f"c{len(self.servers)}"
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                requests.append(name)
                result = answer()
                if result is None:
                    self.close_connection = True
                    return
                body = json.dumps(result[1]).encode()
                self.send_response(result[0])
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    def close(self) -> None:
        for server in self.servers:
            server.shutdown()
            server.server_close()


def leader_answer() -> tuple[int, dict[str, object]]:
    """Answer as a leader does."""
    return 200, {"who": 1}


def standby_answer(leader: str = "") -> Answer:
    """Return the answer of a standby that knows this leader."""
    refusal = {"code": "unavailable", "detail": "this controller stands by", "role": "standby", "leader": leader}
    return lambda: (503, dict(refusal))


UNREACHABLE = "http://127.0.0.1:1"
"""An address on which no server listens."""
