"""What strangers and stolen tokens cost a controller, over real sockets.

    python -m bench.hostile [--nodes 2000] [--seconds 15] [--only NAME] [--quick] [--json FILE]

Attacks on one controller process whose fleet beats once a second. Tests hold the bounds of sessions, frames and heads.

* flood: a viewer's token reads ``/v1/nodes?limit=1000`` over many connections, each of which asks again as soon as it
  is answered. The figures are how long agents' beats wait for their answers, before and during the flood, and how long
  a rank's loss takes to reach all nodes of its job.
* routes: 32 strangers request one route without a token, again and again, for each route in turn. The figures are the
  waits of agents' beats beside the route that delays them most.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.fleet_load import fleet_of
from bench.load import trials
from bench.load.fleet import Controller, Fleet
from bench.table import Row, finish, parser_of
from everstep.bearer_tokens import TokenRole, mint

MIB = 1 << 20
CONNECTIONS = 200
"""Connections of the flood."""
PATH = "/v1/nodes?limit=1000"
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


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), 20)


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

        def connect() -> None:
            reader = _Reader(address, request, statuses)
            selector.register(reader.line, selectors.EVENT_READ, reader)

        for _ in range(int(connections)):
            connect()
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
                    connect()
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
    parser.add_argument("--only", choices=("flood", "routes"), default="")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.seconds, options.rounds = 500, 4.0, 1
    with fleet_of(options.nodes, 1.0, "") as (fleet, _):
        attacks: dict[str, Callable[[], list[Row]]] = {
            "flood": lambda: flood(fleet, options.seconds, options.rounds),
            "routes": lambda: routes(fleet, options.seconds / 3),
        }
        rows = [row for name, attack in attacks.items() if options.only in ("", name) for row in attack()]
    return finish("Hostile clients", rows, options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["flood"]:
        flood_main(*sys.argv[2:])
    else:
        raise SystemExit(main())
