"""A receiver of remediations at a site, as the documentation of the webhook describes it."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import parse_qs, urlsplit

from everstep_controller.remediation.webhook import signature


class WebhookReceiver:
    """Carry out each remediation once, and answer with the result of ``answer``, the state "done" by default.

    ``done``: remediations in the order in which they were carried out. ``posts``: number of requests received.
    """

    def __init__(self, secret: bytes, nodes: tuple[str, ...] = ()) -> None:
        self.done: dict[str, dict[str, str]] = {}
        self.posts = 0
        self.cordoned: dict[str, dict[str, str]] = {}
        self.status = 200
        self.answer: Callable[[str], dict[str, str]] = lambda remediation: {"state": "done"}
        self._nodes = nodes
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def _serve(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                subject = self.headers["Everstep-Remediation"]
                signed = signature(secret, self.headers["Everstep-Timestamp"], self.command, subject, body)
                status = receiver.status if signed == self.headers["Everstep-Signature"] else 401
                answer = receiver._answer(self.command, self.path, body) if status == 200 else {}
                data = json.dumps(answer).encode()
                with suppress(ConnectionError):  # the client may have ended
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_GET = do_POST = _serve  # noqa: N815 - the library's names

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/hook?site=a"

    def _answer(self, method: str, path: str, body: bytes) -> object:
        query = parse_qs(urlsplit(path).query)
        assert query["site"] == ["a"]
        if "nodes" in query:
            return {node: self.cordoned.get(node, {}) for node in query["nodes"][0].split(",") if node in self._nodes}
        if method == "GET":
            remediation = query["remediation"][0]
            return self.answer(remediation) if remediation in self.done else {"state": "pending"}
        self.posts += 1
        remediation = json.loads(body)
        if self._nodes and remediation["node"] not in self._nodes:
            return {"state": "refused", "detail": f"no node {remediation['node']}"}
        self.done.setdefault(remediation["id"], remediation)
        return self.answer(remediation["id"])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
