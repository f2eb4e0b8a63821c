"""A controller's agent routes, played by a thread: speaks the wire messages over real HTTP and remembers what it heard.

It keeps the contract that an agent relies on: reports are taken once by number, directives wait in a queue until they
are acknowledged by ``after``, and a poll is held until something comes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import msgspec

from everstep.errors import AuthenticationError, EverstepError, MalformedMessage, NotFound
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.agent import (
    DirectivesAnswer,
    Heartbeat,
    HeartbeatAnswer,
    Numbered,
    Register,
    Registered,
    Reports,
    ReportsAnswer,
)
from everstep.wire.v1.directives import AnyDirective, Directive

T = TypeVar("T")
DEADLINE_S = 20.0


class ControllerStub:
    """Serves on ``url``. ``start`` and ``stop`` may be called again and again: the address stays.

    ``refusals`` maps a route (register, heartbeat, reports, directives) to a function that may raise an EverstepError
    for a request's body. ``token``: what a bearer must show.
    """

    def __init__(self, token: str = "agent:n1:mac", interval_s: float = 0.05) -> None:
        self.token = token
        self.interval_s = interval_s
        self.registered: list[Register] = []
        self.beats: list[Heartbeat] = []
        self.taken: list[Numbered] = []
        self.requests: list[tuple[str, int]] = []
        self.polls: list[int] = []
        self.refusals: dict[str, Callable[[bytes], None]] = {}
        self.knows_node = False
        self.resend = False
        self.first_directive = 1
        self.changed = threading.Condition()
        self._directives: list[Directive] = []
        self._server: _Server | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        self._server = _Server(self, self._port)
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        """Goes away as a killed process does: nobody listens, and every connection ends."""
        server, self._server = self._server, None
        if server is None:
            return
        server.shutdown()
        server.server_close()
        with self.changed:
            server.gone = True
            self.changed.notify_all()
        server.cut_connections()

    def forget(self) -> None:
        """Loses its memory, as a controller that lost its database."""
        with self.changed:
            self.knows_node = False
            self._directives.clear()

    def push(self, body: AnyDirective, seq: int | None = None) -> int:
        """Queues a directive and wakes the poll that waits for it; returns its number."""
        with self.changed:
            last = self._directives[-1].seq if self._directives else self.first_directive - 1
            directive = Directive(seq=last + 1 if seq is None else seq, body=body)
            self._directives.append(directive)
            self.changed.notify_all()
            return directive.seq

    def wait_for(self, condition: Callable[[], T]) -> T:
        """What ``condition`` returns, once it is true. Raises AssertionError past the deadline."""
        with self.changed:
            if not self.changed.wait_for(condition, DEADLINE_S):
                heard = [type(n.body).__name__ for n in self.taken]
                raise AssertionError(f"waited in vain; heard {len(self.beats)} beats and {heard}")
            return condition()

    def reports(self, kind: type[T]) -> list[T]:
        """The reports of one kind that were taken, in order."""
        return [n.body for n in list(self.taken) if isinstance(n.body, kind)]

    def one(self, kind: type[T]) -> T:
        """Waits for the first report of a kind."""
        return self.wait_for(lambda: self.reports(kind))[0]

    # --- the routes ----------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, token: str, body: bytes, server: _Server) -> Any:
        parts = urlsplit(path)
        route = parts.path.rpartition("/")[2]
        with self.changed:
            self.requests.append((route, len(body)))
            self.changed.notify_all()
        if token != f"Bearer {self.token}":
            raise AuthenticationError("the token does not verify")
        if len(body) > 1 << 20:
            raise MalformedMessage(f"a body of {len(body)} bytes")
        if route in self.refusals:
            self.refusals[route](body)
        if route == "directives":
            return self._poll(parse_qs(parts.query), server)
        with self.changed:
            answer = getattr(self, f"_{route}")(body)
            self.changed.notify_all()
            return answer

    def _register(self, body: bytes) -> Registered:
        self.registered.append(msgspec.json.decode(body, type=Register))
        self.knows_node, self.resend = True, False
        return Registered(
            protocol=1,
            heartbeat_interval_s=self.interval_s,
            next_directive=self.first_directive,
            controller="stub",
            server_at=SYSTEM_CLOCK.wall(),
        )

    def _require_node(self) -> None:
        if not self.knows_node:
            raise NotFound("no such node")

    def _heartbeat(self, body: bytes) -> HeartbeatAnswer:
        self._require_node()
        self.beats.append(msgspec.json.decode(body, type=Heartbeat))
        return HeartbeatAnswer(server_at=SYSTEM_CLOCK.wall(), resend=self.resend)

    def _reports(self, body: bytes) -> ReportsAnswer:
        self._require_node()
        batch = msgspec.json.decode(body, type=Reports)
        last = self.taken[-1].number if self.taken else 0
        self.taken += [n for n in batch.reports if n.number > last]
        return ReportsAnswer(through=batch.reports[-1].number)

    def _poll(self, query: dict[str, list[str]], server: _Server) -> DirectivesAnswer:
        after = int(query["after"][0])
        with self.changed:
            self._require_node()
            self.polls.append(after)
            self._directives = [d for d in self._directives if d.seq > after]
            self.changed.notify_all()
            self.changed.wait_for(lambda: self._directives or server.gone, float(query["wait_s"][0]))
            return DirectivesAnswer(directives=tuple(self._directives))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, stub: ControllerStub, port: int) -> None:
        self.stub = stub
        self.gone = False
        self._open: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def finish_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        try:
            super().finish_request(request, client_address)
        except OSError:
            pass  # the other side, or we, went away in the middle
        finally:
            self._open.discard(request)

    def cut_connections(self) -> None:
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        token = self.headers.get("Authorization", "")
        try:
            status, answer = 200, self.server.stub.answer(self.command, self.path, token, body, self.server)
        except EverstepError as error:
            status, answer = error.status, {"error": {"code": error.code, "message": str(error)}}
        content = msgspec.json.encode(answer)
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        if not self.server.gone:
            self.wfile.write(head.encode() + content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextlib.contextmanager
def serving(stub: ControllerStub) -> Iterator[ControllerStub]:
    """A stub that serves inside the block."""
    stub.start()
    try:
        yield stub
    finally:
        stub.stop()
