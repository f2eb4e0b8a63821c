"""From an urgent report to the push that it causes at every node of its job, against a real controller process.

    python -m bench.controller_latency [--quick] [--rounds 200] [--database URL] [--json FILE]

One node's agent reports a rank's loss; the controller opens the next generation, commits, and pushes it over the
sessions of the job's nodes. Beside it: the time until the report itself is acknowledged, and a heartbeat that says
nothing new.
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import Progress

from bench.table import Row, finish, parser_of
from everstep.bearer_tokens import TokenRole, mint
from everstep.wire.v1.agent import (
    PREFIX_BYTES,
    UPGRADE,
    Acknowledge,
    DirectivesAnswer,
    FrameKind,
    Heartbeat,
    NumberedReport,
    Register,
    Reports,
    encode_frame,
)
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.training import AnyReport, JobSpec, LauncherJoined, RankLost

NODES = ("n1", "n2", "n3", "n4")
PUSHED, ACKNOWLEDGED, BEAT = "report to the last node's push", "report to its acknowledgement", "idle heartbeat"
FLOOR_MS, AIM_MS = 20.0, 10.0
"""Of what a failure may cost in all, the decision and its delivery have 10 ms each."""


class Node:
    """One agent's session: frames go out from the caller, a thread reads what comes."""

    def __init__(self, address: str, secret: bytes, name: str) -> None:
        self.name = name
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 20)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")
        self._upgrade(mint(secret, TokenRole.AGENT, name))
        self._number = 0
        self._seq = 0
        self._generation = 0
        self._heard_at = 0.0
        self._news = threading.Condition()
        self._answers: queue.SimpleQueue[tuple[FrameKind, bytes]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        register = Register(protocols=(1,), node=name, incarnation=1, agent_version="bench", vault="127.0.0.1:1")
        self._ask(FrameKind.REGISTER, register, FrameKind.REGISTERED)

    def _upgrade(self, token: str) -> None:
        request = (
            f"GET /v1/agents/{self.name}/session HTTP/1.1\r\nHost: bench\r\nConnection: Upgrade\r\n"
            f"Upgrade: {UPGRADE}\r\nAuthorization: Bearer {token}\r\n\r\n"
        )
        self._socket.sendall(request.encode())
        status = self._stream.readline()
        if b" 101 " not in status:
            raise SystemExit(f"the session was refused: {status.decode().strip()}")
        while self._stream.readline().strip():
            pass  # the answer's headers

    def _ask(self, kind: FrameKind, body: Any, answered_by: FrameKind) -> None:
        self._socket.sendall(encode_frame(kind, msgspec.json.encode(body)))
        answer, said = self._answers.get(timeout=20)
        if answer is not answered_by:
            raise SystemExit(f"{kind.name} was refused: {said.decode()}")

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError):  # the bench is over
            while prefix := self._stream.read(PREFIX_BYTES):
                frame = self._stream.read(int.from_bytes(prefix, "big"))
                kind, body = FrameKind(frame[0]), frame[1:]
                if kind is FrameKind.PUSH:
                    self._take(body, time.perf_counter())
                else:
                    self._answers.put((kind, body))

    def _take(self, body: bytes, heard_at: float) -> None:
        directives = msgspec.json.decode(body, type=DirectivesAnswer).directives
        for directive in directives:
            if isinstance(directive.body, NewGeneration):
                with self._news:
                    self._generation, self._heard_at = directive.body.spec.number, heard_at
                    self._news.notify_all()
        done = Acknowledge(through=directives[-1].seq)
        self._socket.sendall(encode_frame(FrameKind.ACKNOWLEDGE, msgspec.json.encode(done)))

    def report(self, body: AnyReport) -> None:
        self._number += 1
        numbered = (NumberedReport(number=self._number, body=body),)
        self._ask(FrameKind.REPORTS, Reports(incarnation=1, reports=numbered), FrameKind.REPORTS_ANSWER)

    def beat(self, first: bool) -> None:
        self._seq += 1
        findings = () if first else None
        beat = Heartbeat(incarnation=1, seq=self._seq, sent_at=0.0, findings=findings)
        self._ask(FrameKind.HEARTBEAT, beat, FrameKind.HEARTBEAT_ANSWER)

    def heard(self, generation: int) -> float:
        """When the generation arrived."""
        with self._news:
            if not self._news.wait_for(lambda: self._generation >= generation, 20):
                raise SystemExit(f"{self.name} never heard of generation {generation}")
            return self._heard_at


def serve(directory: Path, database: str) -> tuple[subprocess.Popen[bytes], str, bytes]:
    secret_file, ready = directory / "secret", directory / "ready.json"
    secret_file.touch(mode=0o600)
    secret_file.write_text(secrets.token_hex(32))
    command = [sys.executable, "-m", "everstep_controller.main", "serve", "--listen", "127.0.0.1:0", "--preset", "lab"]
    command += ["--database", database or f"sqlite:///{directory / 'c.db'}", "--secret-file", str(secret_file)]
    command += ["--ready-file", str(ready), "--die-with-parent"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    while not ready.exists():
        if process.poll() is not None:
            raise SystemExit((directory / "log").read_text())
        time.sleep(0.01)
    return process, json.loads(ready.read_text())["address"], secret_file.read_bytes()


def form(nodes: list[Node]) -> None:
    """Lets the nodes' launchers join one job, and waits for its first generation."""
    spec = JobSpec(job="bench", min_nodes=1, max_nodes=len(nodes), nproc_per_node=1)
    for node in nodes:
        node.beat(first=True)
        node.report(LauncherJoined(job="bench", at=time.time(), spec=spec, launcher=1, store="127.0.0.1:29500"))
    for node in nodes:
        node.heard(1)


def lose(nodes: list[Node], generation: int) -> tuple[float, float]:
    """Seconds from the report of a rank's loss to its acknowledgement, and to the last node's new generation."""
    rank = generation % len(nodes)
    lost = RankLost(
        job="bench", at=time.time(), generation=generation, rank=rank, local_rank=0, detail="bench", signal=9
    )
    started = time.perf_counter()
    nodes[rank].report(lost)
    acknowledged = time.perf_counter() - started
    return acknowledged, max(node.heard(generation + 1) for node in nodes) - started


def beat(node: Node) -> float:
    """Seconds that a heartbeat without news takes."""
    started = time.perf_counter()
    node.beat(first=False)
    return time.perf_counter() - started


def measure(nodes: list[Node], rounds: int, progress: Progress) -> dict[str, list[float]]:
    """Seconds of each round, by what was measured."""
    form(nodes)
    lost = [lose(nodes, number) for number in progress.track(range(1, rounds + 1), description="ranks lost")]
    beats = [beat(nodes[0]) for _ in progress.track(range(rounds), description="heartbeats")]
    return {PUSHED: [pushed for _, pushed in lost], ACKNOWLEDGED: [one for one, _ in lost], BEAT: beats}


def rows_of(times: dict[str, list[float]]) -> list[Row]:
    """Median and 99th percentile of each; only the median of the push is judged."""
    rows = []
    for name, values in times.items():
        floor, aim = (FLOOR_MS, AIM_MS) if name == PUSHED else (None, None)
        against = "decision and delivery: 10 ms each" if name == PUSHED else ""
        rows.append(Row(f"{name}, median of {len(values)}", statistics.median(values) * 1e3, "ms", floor, aim, against))
        rows.append(Row(f"{name}, 99th percentile", sorted(values)[int(len(values) * 0.99) - 1] * 1e3, "ms"))
    return rows


def main(argv: list[str]) -> int:
    parser = parser_of("controller_latency", __doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--database", default="", help="default: an SQLite file in a temporary directory")
    options = parser.parse_args(argv)
    rounds = min(options.rounds, 50) if options.quick else options.rounds
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as directory, Progress() as progress:
        process, address, secret = serve(Path(directory), options.database)
        try:
            times = measure([Node(address, secret, name) for name in NODES], rounds, progress)
        finally:
            process.terminate()
            process.wait(10)
    return finish("From an urgent report to the nodes it concerns", rows_of(times), options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
