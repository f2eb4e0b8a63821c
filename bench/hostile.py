"""What strangers and stolen tokens cost a controller, over real sockets.

    python -m bench.hostile [--nodes 2000] [--seconds 15] [--only NAME] [--quick] [--json FILE]

Attacks on one controller process whose fleet beats once a second:

* trailers: ten connections without a token each send a chunked POST and then 15 MiB of five-byte trailers; then ten
  more each send heads of 60 KB in one piece. The figure is what the controller's resident memory grew by.
* flood: a viewer's token reads ``/v1/nodes?limit=1000`` over many connections, each of which asks again as soon as it
  is answered. The figures are how long agents' beats wait for their answers, before and during the flood, and how long
  a rank's loss takes to reach all nodes of its job.
* routes: 32 strangers request one route without a token, again and again, for each route in turn. The figures are the
  waits of agents' beats beside the route that delays them most.
* sessions: the token of one agent opens 1,500 sessions with 1 MB of an unfinished frame each, and then 3,000 that say
  nothing. The figures are the controller's memory, and how many sessions stay open.
* scrapes: strangers connect to an agent's ``/metrics`` and say nothing. The figure is the longest scrape.
* texts: the same token registers with 900 KB of text for 15 s. The figure is the growth of the controller's log.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from bench.load import messages, trials
from bench.load.fleet import Controller, Fleet
from bench.table import Row, finish, parser_of
from everstep.bearer_tokens import TokenRole, mint
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.agent import MAX_BODY_BYTES, PREFIX_BYTES, UPGRADE, FrameKind, Register, encode_frame
from everstep_agent.metrics import MetricsServer

MIB = 1 << 20
STRANGERS = 10
CONNECTIONS = 200
"""Connections of the flood."""
TRAILERS_BYTES = 15 * MIB
HEAD_BYTES = 60_000
PATH = "/v1/nodes?limit=1000"
POLL_S = 0.02
SETTLE_S = 2.0
"""Seconds after the attack for which the controller's memory is still sampled."""
ROUTE_STRANGERS = 32
ROUTES = (
    "/openapi.json",
    "/",
    "/docs",
    "/web/api.js",
    "/web/vendor/uplot.js",
    "/healthz",
    "/readyz",
    "/metrics",
    "/v1/nodes",
    "/v1/login",
    "/v1/agents/n1/heartbeat",
    "/nothing",
)
"""One route of each kind that a stranger may request."""
ONE_REQUEST = "/healthz with a new connection for each request"
UNFINISHED_SESSIONS = 1500
UNFINISHED_BYTES = 1_000_000
SILENT_SESSIONS = 3000
STOLEN = "stolen-agent"
TEXT_CHARACTERS = 900_000
TEXTS_S = 15.0
SCRAPES = 10


# --- strangers ---------------------------------------------------------------------------------------------------


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 20)


def trailers(controller: Controller) -> list[Row]:
    """Measure the growth of the controller's memory under trailers, then under long heads, without a token."""
    before = controller.resident_bytes()
    head = b"POST /v1/maintenance HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n"
    sent, largest = _pour(controller, head, b"a:b\r\n" * (64 * 1024 // 5), TRAILERS_BYTES)
    rows = [
        Row("memory before", before / MIB, "MiB"),
        Row(f"memory gained under trailers of {STRANGERS} strangers", (largest - before) / MIB, "MiB", 64.0, 16.0),
        Row("of 150 MiB of trailers were taken", sent / MIB, "MiB"),
    ]
    before = controller.resident_bytes()
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\n" + b"X-Long: y\r\n" * (HEAD_BYTES // 11) + b"\r\n"
    answers = Counter(_status(controller, head) for _ in range(STRANGERS))
    grown = (controller.resident_bytes() - before) / MIB
    return [*rows, Row("memory gained under heads of 60 KB", grown, "MiB", 64.0, 16.0, f"answers: {dict(answers)}")]


def _pour(controller: Controller, head: bytes, piece: bytes, most: int) -> tuple[int, int]:
    """Return the bytes sent over all connections, and the controller's largest memory meanwhile."""
    sent, largest = 0, 0
    with contextlib.ExitStack() as stack:
        for _ in range(STRANGERS):
            line = stack.enter_context(contextlib.closing(_connected(controller.address)))
            with contextlib.suppress(OSError):  # the controller closes the connection
                line.sendall(head)
                for _ in range(most // len(piece)):
                    line.sendall(piece)
                    sent += len(piece)
            largest = max(largest, controller.resident_bytes())
        end = time.perf_counter() + SETTLE_S
        while time.perf_counter() < end:
            largest = max(largest, controller.resident_bytes())
            time.sleep(POLL_S)
    return sent, largest


def _status(controller: Controller, request: bytes) -> str:
    with contextlib.closing(_connected(controller.address)) as line:
        try:
            line.sendall(request)
            return line.recv(64).split(b" ")[1].decode()
        except (OSError, IndexError) as error:
            return type(error).__name__


# --- an agent's token --------------------------------------------------------------------------------------------


def _session(controller: Controller, more: bytes = b"") -> socket.socket:
    """Open a session with the stolen token, and send ``more`` after its request."""
    token = mint(controller.secret_file.read_bytes().strip(), TokenRole.AGENT, STOLEN)
    line = _connected(controller.address)
    head = f"GET /v1/agents/{STOLEN}/session HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: {UPGRADE}\r\n"
    with contextlib.suppress(OSError):  # the controller closes the connection
        line.sendall(f"{head}Authorization: Bearer {token}\r\n\r\n".encode() + more)
    return line


def _is_open(line: socket.socket) -> bool:
    """Return whether the controller has not closed its end."""
    line.setblocking(False)
    try:
        while line.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def sessions(controller: Controller) -> list[Row]:
    """Measure the growth of memory under unfinished frames, and the sessions that stay open with one agent's token."""
    before = largest = controller.resident_bytes()
    unfinished = (MAX_BODY_BYTES + 1).to_bytes(PREFIX_BYTES, "big") + bytes((FrameKind.HEARTBEAT,))
    unfinished += b" " * (UNFINISHED_BYTES - 1)
    rows = []
    for name, count, more in (("unfinished", UNFINISHED_SESSIONS, unfinished), ("silent", SILENT_SESSIONS, b"")):
        with contextlib.ExitStack() as stack:
            lines = []
            for _ in range(count):
                lines.append(stack.enter_context(contextlib.closing(_session(controller, more))))
                largest = max(largest, controller.resident_bytes())
            time.sleep(SETTLE_S)
            largest = max(largest, controller.resident_bytes())
            left = sum(map(_is_open, lines))
        rows.append(Row(f"{name} sessions of one agent that stay open, of {count}", left, "", 64, 32))
    grown = f"memory gained under {UNFINISHED_SESSIONS} unfinished frames of 1 MB, and silent sessions"
    return [*rows, Row(grown, (largest - before) / MIB, "MiB", 40.0, 20.0)]


def texts(controller: Controller, seconds: float) -> list[Row]:
    """Measure the growth of the log under registrations with a long text."""
    log = controller.directory / "controller.log"
    before, sent, incarnation = log.stat().st_size, 0, int(time.time() * 1000)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        register = Register(
            protocols=(1,),
            node=STOLEN,
            incarnation=incarnation + sent,
            agent_version="x" * TEXT_CHARACTERS,
            vault="10.9.9.9:7702",
        )
        frame = encode_frame(FrameKind.REGISTER, msgspec.json.encode(register))
        with contextlib.closing(_session(controller, frame)) as line, contextlib.suppress(OSError):
            line.shutdown(socket.SHUT_WR)
            while line.recv(1 << 16):
                pass
        sent += 1
    grown = (log.stat().st_size - before) / 1e6
    return [Row(f"log written for {sent} registrations with 900 KB of text", grown, "MB", 1.0, 0.1)]


# --- routes without a token --------------------------------------------------------------------------------------


def routes(fleet: Fleet, seconds: float) -> list[Row]:
    """Measure agents' heartbeats beside strangers, for each route."""
    rows: list[Row] = []
    for path in (*ROUTES, ONE_REQUEST):
        with flooded(fleet.controller, ROUTE_STRANGERS, path, "") as result:
            time.sleep(0.5)
            fleet.sample()
            time.sleep(seconds)
            beats = fleet.sample()["beats"]
        against = f"answers: {result['statuses']}"
        rows.append(Row(f"beats beside {path}, median of {beats.count}", beats.quantile(0.5) * 1e3, "ms", 10.0, 3.0))
        rows.append(Row("the same, 99th percentile", beats.quantile(0.99) * 1e3, "ms", 50.0, 20.0, against))
    return rows


# --- an agent's own port -----------------------------------------------------------------------------------------


def scrapes() -> list[Row]:
    """Measure an agent's metrics beside strangers that connect to its port and send nothing."""
    server = MetricsServer("127.0.0.1", 0, lambda: "secret", CollectorRegistry(), SYSTEM_CLOCK)
    request = urllib.request.Request(f"http://{server.address}/metrics", headers={"Authorization": "Bearer secret"})
    waits = []
    with contextlib.ExitStack() as stack:
        stack.callback(server.close)
        for _ in range(SCRAPES):
            for _ in range(ROUTE_STRANGERS):  # the server closes the earlier ones
                stack.enter_context(contextlib.closing(_connected(server.address)))
            began = time.perf_counter()
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
            waits.append(time.perf_counter() - began)
    return [
        Row(
            f"an agent's metrics beside {ROUTE_STRANGERS} idle strangers, longest", max(waits) * 1e3, "ms", 1000.0, 50.0
        )
    ]


# --- a viewer's token --------------------------------------------------------------------------------------------


class _Reader:
    """A connection that repeats a request after each complete answer."""

    def __init__(self, address: str, request: bytes, statuses: Counter[str]) -> None:
        self.line = _connected(address)
        self.line.setblocking(False)
        self._request, self._statuses = request, statuses
        self._once = b"Connection: close" in request
        self._left, self._head = 0, b""
        self.bytes = 0
        self.line.send(request)

    def readable(self) -> None:
        data = self.line.recv(1 << 18)
        if not data:
            raise ConnectionError("closed")
        self.bytes += len(data)
        if not self._left:
            self._head += data
            head, found, rest = self._head.partition(b"\r\n\r\n")
            if not found:
                return
            lines = head.lower().split(b"\r\n")
            self._statuses[head.split(b" ")[1].decode()] += 1
            self._left = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
            self._head, data = b"", rest
        self._left -= len(data)
        if not self._left and not self._once:
            self.line.send(self._request)


def _request(path: str, secret_file: str) -> bytes:
    """Return the request of a stranger, or of a viewer if there is a secret to mint its token."""
    lines = [f"GET {path.split(' ')[0]} HTTP/1.1", "Host: x"]
    if secret_file:
        token = mint(Path(secret_file).read_bytes().strip(), TokenRole.VIEWER, "stolen")
        lines.append(f"Authorization: Bearer {token}")
    if path == ONE_REQUEST:
        lines.append("Connection: close")
    return "\r\n".join((*lines, "", "")).encode()


def flood_main(address: str, connections: str, path: str, secret_file: str) -> None:
    """Flood the controller until standard input ends. Print a line at the beginning, then statuses and bytes."""
    request = _request(path, secret_file)
    statuses: Counter[str] = Counter()
    total = 0
    with selectors.DefaultSelector() as selector:
        for _ in range(int(connections)):
            reader = _Reader(address, request, statuses)
            selector.register(reader.line, selectors.EVENT_READ, reader)
        selector.register(sys.stdin, selectors.EVENT_READ, None)
        print("{}", flush=True)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    print(json.dumps({"statuses": statuses, "bytes": total}), flush=True)
                    return
                reader = key.data
                before = reader.bytes
                try:
                    reader.readable()
                except BlockingIOError:
                    continue
                except OSError as error:
                    if path != ONE_REQUEST:
                        statuses[type(error).__name__] += 1
                    selector.unregister(reader.line)
                    reader.line.close()
                    reader = _Reader(address, request, statuses)
                    selector.register(reader.line, selectors.EVENT_READ, reader)
                else:
                    total += reader.bytes - before


@contextlib.contextmanager
def flooded(controller: Controller, connections: int, path: str, secret_file: str) -> Iterator[dict[str, object]]:
    """Flood the controller from a process inside the block. The dictionary has its answers afterwards."""
    result: dict[str, object] = {}
    command = [sys.executable, "-m", "bench.hostile", "flood", controller.address, str(connections), path, secret_file]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        process.stdout.readline()  # the process is connected
        yield result
        process.stdin.close()
        result |= json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()


def flood(fleet: Fleet, seconds: float, rounds: int) -> list[Row]:
    """Measure agents' heartbeats and a rank's loss, without and beside the flood."""
    controller = fleet.controller
    trials.begin(fleet, 1.0)
    rows = _measured(fleet, "in calm", seconds, rounds, None, None)
    with flooded(controller, CONNECTIONS, PATH, str(controller.secret_file)) as result:
        time.sleep(2.0)
        fleet.sample()
        beside = _measured(fleet, f"beside {CONNECTIONS} connections", seconds, rounds, 100.0, 25.0)
    answered = f"answers: {result['statuses']}, {int(str(result['bytes'])) / MIB:.0f} MiB"
    grown = Row("memory beside the flood", controller.resident_bytes() / MIB, "MiB", against=answered)
    return [*rows, *beside, grown]


def _measured(
    fleet: Fleet, when: str, seconds: float, rounds: int, floor: float | None, aim: float | None
) -> list[Row]:
    cpu_s, started = fleet.controller.cpu_s(), time.perf_counter()
    time.sleep(seconds)
    cpu = (fleet.controller.cpu_s() - cpu_s) / (time.perf_counter() - started)
    beats = fleet.sample()["beats"]
    lost = trials.one_failure(fleet, rounds) if rounds else []
    fleet.sample()
    return [
        Row(f"beats {when}, 99th percentile of {beats.count}", beats.quantile(0.99) * 1e3, "ms", floor, aim),
        Row(f"beats {when}, longest", beats.largest * 1e3, "ms"),
        Row(f"controller {when}", cpu, "cores"),
        *(Row(f"{row.name}, {when}", row.value, row.unit) for row in lost),
    ]


def main() -> int:
    parser = parser_of("hostile", __doc__)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settings", default="", help="lines of TOML for the controller")
    parser.add_argument("--only", choices=("flood", "routes", "scrapes", "sessions", "texts", "trailers"), default="")
    options, texts_s = parser.parse_args(), TEXTS_S
    if options.quick:
        options.nodes, options.seconds, options.rounds, texts_s = 500, 4.0, 1, 3.0
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="everstep-hostile-")))
        controller = Controller(directory, "", options.settings)
        stack.callback(controller.end)
        fleet = Fleet(controller, options.nodes, jobs=max(1, options.nodes // messages.NODES_OF_A_JOB))
        stack.callback(fleet.end)
        fleet.all("beat", interval_s=1.0)
        fleet.open()
        fleet.join()
        attacks: dict[str, Callable[[], list[Row]]] = {
            "flood": lambda: flood(fleet, options.seconds, options.rounds),
            "routes": lambda: routes(fleet, options.seconds / 3),
            "sessions": lambda: sessions(controller),
            "scrapes": scrapes,
            "texts": lambda: texts(controller, texts_s),
            "trailers": lambda: trailers(controller),
        }
        rows = [row for name, attack in attacks.items() if options.only in ("", name) for row in attack()]
    return finish("Hostile clients", rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["flood"]:
        flood_main(*sys.argv[2:])
    else:
        raise SystemExit(main())
