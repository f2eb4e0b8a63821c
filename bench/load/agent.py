"""One lean agent of the bench: a non-blocking socket, the frames that go over it, and what it remembers."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import time
import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from bench.load import messages
from bench.load.messages import BeatForm
from everstep.wire.v1.agent import (
    ANSWER_INTERVAL_S,
    DIRECTIVE_NUMBER_BYTES,
    GAUGE_INTERVAL_S,
    PREFIX_BYTES,
    FrameKind,
    FrameRefused,
    HeartbeatAnswer,
    Registered,
    ReportsAnswer,
)
from everstep.wire.v1.directives import Directive, NewGeneration
from everstep.wire.v1.training import AnyReport

if TYPE_CHECKING:
    from bench.load.crowd import Crowd

MOST_IN_A_REQUEST = 1024
SO_TIMESTAMPNS = 35
"""Linux: each read says when the kernel had the last of its bytes."""
NOTE_BYTES = socket.CMSG_SPACE(16)
ESTABLISHED = 1
"""Linux: the state, first byte of TCP_INFO, of a connection that is there."""
IP_BIND_ADDRESS_NO_PORT = 24
"""Linux: ports are then counted per pair of addresses, not per source address."""


class Seats(NamedTuple):
    """A generation as agents use it: its number, and each node's first rank."""

    job: str
    number: int
    first_rank: dict[str, int]


class _Directive(msgspec.Struct):
    seq: int
    body: msgspec.Raw


class _Push(msgspec.Struct):
    directives: list[_Directive]


_IDLE = BeatForm("", 0, 0)


def _arrived(notes: list[tuple[int, int, bytes]]) -> float:
    """When an answer was there, by the kernel's clock (wall): an agent of a fleet has a machine of its own, and here
    thousands wait for their turn on two cores to read."""
    for level, kind, note in notes:
        if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack("qq", note)
            return float(seconds + nanoseconds / 1e9)
    return time.time()


@dataclass(slots=True, eq=False)
class Agent:
    """A node's agent. The crowd calls ``connect``, ``beat``, ``report`` and, when there is something, ``readable``."""

    index: int
    job: str
    _upgrade: bytes
    _host: Crowd
    name: str = field(init=False)
    sock: socket.socket | None = None
    shown: bool = False
    hold: bool = True
    home: int = 0
    away: bool = False
    """Whether its controller died, and no other has answered."""
    seq: int = 0
    number: int = 0
    generation: int = 0
    first_rank: int | None = None
    beat_sent_at: float = 0.0
    report_sent_at: float = 0.0
    read_at: float = 0.0
    buffer: bytes = b""
    _head: bool = False
    _later: bytes | None = None
    _after: int = 0
    _ask_at: float = 0.0
    _gauges_at: float = 0.0
    _asked: list[AnyReport] = field(default_factory=list)
    _spool: deque[AnyReport] = field(default_factory=deque)
    _form: BeatForm = _IDLE

    def __post_init__(self) -> None:
        self.name = messages.node_name(self.index)

    # --- the connection ------------------------------------------------------------------------------------------

    def connect(self, address: tuple[str, int], source: str) -> None:
        """Opens the connection and asks for the session. Every agent has an address of its own, as in a fleet."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        if source:
            sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
            sock.bind((source, 0))
        sock.setblocking(False)
        result = sock.connect_ex(address)
        if result not in (0, errno.EINPROGRESS):
            sock.close()
            raise OSError(result, os.strerror(result))
        # On loopback it is there at once, though connect says otherwise, unless the controller's backlog is full.
        connected = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == ESTABLISHED
        self.sock, self.buffer, self._head = sock, b"", True
        self._take_back()
        self._later = None if connected else b""
        self._ask_at = 0.0

    def _take_back(self) -> None:
        """Send the reports again that were not acknowledged."""
        self._spool.extendleft(reversed(self._asked))
        self.number -= len(self._asked)
        self._asked = []

    @property
    def connecting(self) -> bool:
        """Whether the crowd should call ``writable`` when the socket is."""
        return self._later is not None

    def writable(self) -> None:
        """The connection is there, or broke: then OSError is raised."""
        assert self.sock is not None
        if error := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            raise OSError(error, os.strerror(error))
        said, self._later = self._later, None
        if said:
            self.send(said)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None

    def send(self, data: bytes) -> None:
        """Sends frames, after the upgrade where that is still to come. A full socket buffer is the bench's error."""
        assert self.sock is not None
        if self._head:
            data, self._head = self._upgrade + data, False
        if self._later is not None:
            self._later += data
            return
        if self.sock.send(data) != len(data):
            raise OSError("a send buffer is full")

    # --- what it says --------------------------------------------------------------------------------------------

    def introduce(self) -> None:
        self.send(messages.register(self.index))

    def show(self) -> None:
        """A beat with the whole picture."""
        self.seq = max(self.seq, 1)
        self.beat_sent_at = time.time()
        self.send(messages.picture())

    def beat(self, interval_s: float) -> None:
        """The next one. As the real agent it asks for an answer every few seconds, where it waits for one, and where it
        does not hold its session; it shows its picture to who comes after a controller that died; and its GPUs' gauges
        change all the time."""
        self.seq += 1
        now = time.time()
        asks = self.away or bool(self._asked) or not self.hold or now + 0.5 * interval_s >= self._ask_at
        measures = now >= self._gauges_at > 0.0
        if measures or not self._gauges_at:
            self._gauges_at = now + GAUGE_INTERVAL_S * (measures + random.random())
        frame = self._form.fill(self.seq, now, self._after, asks=asks, shows=self.away, measures=measures)
        if asks:
            self._ask_at = now + ANSWER_INTERVAL_S * (1.0 if self._ask_at else random.random())
            self.beat_sent_at = time.time()
        self.send(frame)
        if self._spool and not self._asked:
            self._send_reports()

    def report(self, *bodies: AnyReport) -> None:
        """Sends reports at once, or with the next request where one is under way."""
        self._spool.extend(bodies)
        if not self._asked:
            self._send_reports()

    def unreported(self) -> int:
        """Reports that are not acknowledged."""
        return len(self._spool) + len(self._asked)

    def _send_reports(self) -> None:
        self._asked = [self._spool.popleft() for _ in range(min(len(self._spool), MOST_IN_A_REQUEST))]
        first = self.number + 1
        self.number += len(self._asked)
        self.report_sent_at = time.time()
        self.send(messages.reports(first, self._asked))

    # --- what it is told -----------------------------------------------------------------------------------------

    def readable(self) -> None:
        """Reads what there is. Raises OSError when the connection broke."""
        assert self.sock is not None
        try:
            data, notes, _, _ = self.sock.recvmsg(1 << 18, NOTE_BYTES)
        except BlockingIOError:
            return  # it was seen of the connection that had this descriptor before, and was closed in the same round
        now = self.read_at = _arrived(notes)
        if not data:
            raise ConnectionResetError("the controller hung up")
        data = self.buffer + data if self.buffer else data
        if data[:5] == b"HTTP/":
            head, found, rest = data.partition(b"\r\n\r\n")
            if not found:
                self.buffer = data
                return
            if not head.startswith(b"HTTP/1.1 101"):
                raise ConnectionResetError(b" ".join((head.partition(b"\r\n")[0], rest)).decode())
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
        if kind == FrameKind.HEARTBEAT_ANSWER:
            self._beat_answered(body, now)
        elif kind == FrameKind.REPORTS_ANSWER:
            self._reports_answered(body, now)
        elif kind == FrameKind.PUSH:
            for directive in msgspec.json.decode(body, type=_Push).directives:
                self._directive(directive.seq, bytes(directive.body), now)
        elif kind == FrameKind.DEFLATED_PUSH:
            self._after = int.from_bytes(body[:DIRECTIVE_NUMBER_BYTES], "big")
            self._enter(self._host.seats_of(body[DIRECTIVE_NUMBER_BYTES:], True), now)
        elif kind == FrameKind.GO_AWAY:
            self.hold = False
            if not self._asked and not self.beat_sent_at:
                self._host.ended(self)
        elif kind == FrameKind.REGISTERED:
            self.hold = msgspec.json.decode(body, type=Registered).keep_open
            self._host.progressed(self, "registered")
        else:
            refusal = msgspec.json.decode(body, type=FrameRefused)
            what = FrameKind(refusal.frame_kind).name if refusal.frame_kind else "session"
            if refusal.frame_kind == FrameKind.REPORTS:  # said again with the next beat
                self._take_back()
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
        if not self.shown:
            self.shown = True
            self._host.progressed(self, "shown")
        if not self.hold and not self._asked:
            self._host.ended(self)

    def _reports_answered(self, body: bytes, now: float) -> None:
        through = msgspec.json.decode(body, type=ReportsAnswer).through
        if through != self.number:
            self._host.refused(self, f"REPORTS: up to {self.number}, answered with {through}")
        self._asked = []
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
    generation = spec.spec
    first = {node: place * generation.spec.nproc_per_node for node, place in generation.seat_index.items()}
    return Seats(generation.job, generation.number, first)
