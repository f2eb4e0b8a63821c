"""One lean agent of the bench: a non-blocking socket, the frames that go over it, and what it remembers."""

from __future__ import annotations

import socket
import time
import zlib
from collections import deque
from typing import Any, NamedTuple, Protocol

import msgspec

from bench.load import messages
from bench.load.messages import BeatForm
from everstep.wire.v1.agent import HeartbeatAnswer, Registered, ReportsAnswer
from everstep.wire.v1.directives import Directive, NewGeneration
from everstep.wire.v1.session import NUMBER_BYTES, PREFIX_BYTES, Frame, Refused
from everstep.wire.v1.training import AnyReport

MOST_IN_A_REQUEST = 1024
CONNECT_TIMEOUT_S = 10.0
IP_BIND_ADDRESS_NO_PORT = 24
"""Linux: ports are then counted per pair of addresses, not per source address."""


class Seats(NamedTuple):
    """A generation as agents use it: its number, and each node's first rank."""

    job: str
    number: int
    first_rank: dict[str, int]


class _Body(msgspec.Struct):
    """A directive's body before it is looked into."""

    type: str


class _Directive(msgspec.Struct):
    seq: int
    body: msgspec.Raw


class _Push(msgspec.Struct):
    directives: list[_Directive]


class Host(Protocol):
    """What an agent tells the crowd it belongs to."""

    def answered(self, agent: Agent, latency_s: float) -> None: ...
    def progressed(self, agent: Agent, phase: str) -> None: ...
    def entered(self, agent: Agent, seats: Seats, at: float) -> None: ...
    def refused(self, agent: Agent, refusal: str) -> None: ...
    def ended(self, agent: Agent) -> None: ...
    def seats_of(self, body: bytes, deflated: bool) -> Seats | None: ...


_IDLE = BeatForm("", 0, 0)


class Agent:
    """A node's agent. The crowd calls ``connect``, ``beat``, ``report`` and, when there is something, ``readable``."""

    __slots__ = (
        "_after",
        "_asking",
        "_form",
        "_head",
        "_host",
        "_spool",
        "_upgrade",
        "beat_sent_at",
        "buffer",
        "first_rank",
        "generation",
        "hold",
        "index",
        "job",
        "name",
        "number",
        "registered",
        "report_sent_at",
        "seq",
        "sock",
    )

    def __init__(self, index: int, job: str, upgrade: bytes, host: Host) -> None:
        self.index = index
        self.name = messages.node_name(index)
        self.job = job
        self.sock: socket.socket | None = None
        self.registered = False
        self.hold = True
        self.seq = 0
        self.number = 0
        self.generation = 0
        self.first_rank: int | None = None
        self.beat_sent_at = 0.0
        self.report_sent_at = 0.0
        self.buffer = b""
        self._upgrade = upgrade
        self._head = False
        self._after = 0
        self._asking: tuple[int, int] | None = None
        self._spool: deque[AnyReport] = deque()
        self._form = _IDLE
        self._host = host

    # --- the connection ------------------------------------------------------------------------------------------

    def connect(self, address: tuple[str, int], source: str) -> None:
        """Opens the connection and asks for the session. Every agent has an address of its own, as in a fleet."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if source:
            sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source, 0))
        sock.settimeout(CONNECT_TIMEOUT_S)
        sock.connect(address)  # takes 30 us on loopback
        sock.setblocking(False)
        self.sock, self.buffer, self._head, self._asking = sock, b"", True, None

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def send(self, data: bytes) -> None:
        """Sends frames, after the upgrade where that is still to come. A full socket buffer is the bench's error."""
        assert self.sock is not None
        if self._head:
            data, self._head = self._upgrade + data, False
        if self.sock.send(data) != len(data):
            raise OSError("a send buffer is full")

    # --- what it says --------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        self.send(messages.register(self.index))

    def show(self) -> None:
        """The first beat, with the whole picture."""
        self.seq = 1
        self.beat_sent_at = time.perf_counter()
        self.send(messages.first_beat())

    def beat(self) -> None:
        self.seq += 1
        frame = self._form.fill(self.seq, time.time(), self.number, self._after)
        self.beat_sent_at = time.perf_counter()
        self.send(frame)

    def report(self, *bodies: AnyReport) -> None:
        """Sends reports at once, or with the next request where one is under way."""
        self._spool.extend(bodies)
        if self._asking is None:
            self._send_reports()

    def unreported(self) -> int:
        """Reports that are not acknowledged."""
        asked = self._asking[1] - self._asking[0] if self._asking else 0
        return len(self._spool) + asked

    def _send_reports(self) -> None:
        taken = [self._spool.popleft() for _ in range(min(len(self._spool), MOST_IN_A_REQUEST))]
        first = self.number + 1
        self.number += len(taken)
        self._asking = (first - 1, self.number)
        self.report_sent_at = time.perf_counter()
        self.send(messages.reports(first, taken))

    # --- what it is told -----------------------------------------------------------------------------------------

    def readable(self) -> None:
        """Reads what there is. Raises OSError when the connection broke."""
        assert self.sock is not None
        data = self.sock.recv(1 << 18)
        now = time.perf_counter()
        if not data:
            raise ConnectionResetError("the controller hung up")
        data = self.buffer + data if self.buffer else data
        if data[:5] == b"HTTP/":
            head, found, rest = data.partition(b"\r\n\r\n")
            if not found:
                self.buffer = data
                return
            if not head.startswith(b"HTTP/1.1 101"):
                raise ConnectionResetError(head.split(b"\r\n", 1)[0].decode())
            data = rest
        self.buffer = self._frames(data, now)

    def _frames(self, data: bytes, now: float) -> bytes:
        at = 0
        while len(data) - at > PREFIX_BYTES and self.sock is not None:  # what comes after it hung up comes again
            end = at + PREFIX_BYTES + int.from_bytes(data[at : at + PREFIX_BYTES], "big")
            if end > len(data):
                break
            self._take(data[at + PREFIX_BYTES], data[at + PREFIX_BYTES + 1 : end], now)
            at = end
        return data[at:]

    def _take(self, kind: int, body: bytes, now: float) -> None:
        if kind == Frame.HEARTBEAT_ANSWER:
            self._beat_answered(body, now)
        elif kind == Frame.REPORTS_ANSWER:
            self._reports_answered(body, now)
        elif kind == Frame.PUSH:
            for directive in msgspec.json.decode(body, type=_Push).directives:
                self._directive(directive.seq, bytes(directive.body), now)
        elif kind == Frame.DEFLATED_PUSH:
            self._after = int.from_bytes(body[:NUMBER_BYTES], "big")
            self._enter(self._host.seats_of(body[NUMBER_BYTES:], True), now)
        elif kind == Frame.REGISTERED:
            self.hold = msgspec.json.decode(body, type=Registered).hold
            self.registered = True
            self._host.progressed(self, "registered")
        else:
            refusal = msgspec.json.decode(body, type=Refused)
            what = Frame(refusal.of).name if refusal.of else "session"
            self._host.refused(self, f"{what}: {refusal.code}: {refusal.message}")

    def _beat_answered(self, body: bytes, now: float) -> None:
        self._host.answered(self, now - self.beat_sent_at)
        self.beat_sent_at = 0.0
        self.hold = b'"hold":false' not in body
        if b'"resend":true' in body:
            self._host.refused(self, "HEARTBEAT: asked to send its picture again")
        if b'"directives"' in body:
            for directive in msgspec.json.decode(body, type=HeartbeatAnswer).directives:
                self._directive(directive.seq, msgspec.json.encode(directive.body), now)
        if self.seq == 1:
            self._host.progressed(self, "shown")
        if not self.hold and self._asking is None:
            self._host.ended(self)

    def _reports_answered(self, body: bytes, now: float) -> None:
        assert self._asking is not None
        through = msgspec.json.decode(body, type=ReportsAnswer).through
        if through != self._asking[1]:
            self._host.refused(self, f"REPORTS: {self._asking} answered with {through}")
        self._asking = None
        self._host.progressed(self, "reported")
        if self._spool:
            self._send_reports()
        elif not self.hold and not self.beat_sent_at:
            self._host.ended(self)

    def _directive(self, seq: int, body: bytes, now: float) -> None:
        self._after = max(self._after, seq)
        if body.startswith(b'{"type":"NewGeneration"'):
            self._enter(self._host.seats_of(body, False), now)

    def _enter(self, seats: Seats | None, now: float) -> None:
        if seats is None or seats.number <= self.generation:
            return
        self.generation = seats.number
        self._host.entered(self, seats, now)
        first = self.first_rank = seats.first_rank.get(self.name)
        self._form = BeatForm(seats.job if first is not None else "", seats.number, first or 0)


def read_generation(body: bytes, deflated: bool) -> Seats | None:
    """The generation in a directive's body; None for another directive."""
    text: Any = zlib.decompress(body) if deflated else body
    spec = msgspec.json.decode(b'{"seq":0,"body":' + text + b"}", type=Directive).body
    if not isinstance(spec, NewGeneration):
        return None
    first: dict[str, int] = {}
    for member in spec.spec.roster:
        first.setdefault(member.node, member.rank)
    return Seats(spec.spec.job, spec.spec.number, first)
