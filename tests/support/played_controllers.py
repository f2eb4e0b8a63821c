"""HTTP ports that answer as a test tells them, in the place of controllers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = Callable[[], tuple[int, dict[str, object]] | None]


class PlayedControllers:
    """Ports that answer as they are told, and count what they were asked. None: the connection breaks."""

    def __init__(self) -> None:
        self.servers: list[ThreadingHTTPServer] = []
        self.asked: list[str] = []

    def add(self, answer: Answer) -> str:
        """The address of one more."""
        name = f"c{len(self.servers)}"
        asked = self.asked

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                asked.append(name)
                said = answer()
                if said is None:
                    self.close_connection = True
                    return
                body = json.dumps(said[1]).encode()
                self.send_response(said[0])
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


def leads() -> tuple[int, dict[str, object]]:
    return 200, {"who": 1}


def stands_by(leader: str = "") -> Answer:
    refusal = {"code": "unavailable", "detail": "this controller stands by", "role": "standby", "leader": leader}
    return lambda: (503, dict(refusal))


NOBODY = "http://127.0.0.1:1"
