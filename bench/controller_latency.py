"""From an urgent report to the answer of the long poll that it causes, against a real controller process.

    python -m bench.controller_latency [--rounds 200] [--database URL] [--json FILE]

One node's agent posts a rank loss; the controller opens the next generation, commits, and answers the long polls of
the job's nodes. Beside it: the time until the report itself is acknowledged, and a heartbeat that says nothing new.
"""

from __future__ import annotations

import argparse
import http.client
import json
import secrets
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from everstep.tokens import TokenRole, mint
from everstep.wire.v1.agent import DirectivesAnswer, Heartbeat, Numbered, Register, Registered, Reports
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.training import AnyReport, JobSpec, LauncherJoined, RankLost

NODES = ("n1", "n2", "n3", "n4")


class Node:
    """One agent: a connection for reports and beats, a thread that holds the long poll."""

    def __init__(self, address: str, secret: bytes, name: str) -> None:
        self.name = name
        self._headers = {"Authorization": f"Bearer {mint(secret, TokenRole.AGENT, name)}"}
        host, _, port = address.rpartition(":")
        self._talk = http.client.HTTPConnection(host, int(port), timeout=35)
        self._poll = http.client.HTTPConnection(host, int(port), timeout=35)
        self._number = 0
        self._seq = 0
        self._generation = 0
        self._heard_at = 0.0
        self._news = threading.Condition()
        register = Register(protocols=(1,), node=name, incarnation=1, agent_version="bench", vault="127.0.0.1:1")
        self._after = self._ask("register", register, Registered).next_directive - 1
        threading.Thread(target=self._listen, daemon=True).start()

    def _ask(self, verb: str, body: Any, kind: type[Any]) -> Any:
        self._talk.request("POST", f"/v1/agents/{self.name}/{verb}", msgspec.json.encode(body), self._headers)
        response = self._talk.getresponse()
        answer = response.read()
        if response.status != 200:
            raise SystemExit(f"{verb} was refused: {answer.decode()}")
        return msgspec.json.decode(answer, type=kind)

    def _listen(self) -> None:
        while True:
            path = f"/v1/agents/{self.name}/directives?incarnation=1&after={self._after}&wait_s=30"
            try:
                self._poll.request("GET", path, headers=self._headers)
                body = self._poll.getresponse().read()
            except (OSError, http.client.HTTPException):
                return  # the bench is over
            heard_at = time.perf_counter()
            for directive in msgspec.json.decode(body, type=DirectivesAnswer).directives:
                self._after = directive.seq
                if isinstance(directive.body, NewGeneration):
                    with self._news:
                        self._generation, self._heard_at = directive.body.spec.number, heard_at
                        self._news.notify_all()

    def report(self, body: AnyReport) -> None:
        self._number += 1
        numbered = (Numbered(number=self._number, body=body),)
        self._ask("reports", Reports(incarnation=1, reports=numbered), msgspec.Raw)

    def beat(self, first: bool) -> None:
        self._seq += 1
        findings = () if first else None
        self._ask("heartbeat", Heartbeat(incarnation=1, seq=self._seq, sent_at=0.0, findings=findings), msgspec.Raw)

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
    command = [sys.executable, "-m", "controller.main", "serve", "--listen", "127.0.0.1:0", "--preset", "lab"]
    command += ["--database", database or f"sqlite:///{directory / 'c.db'}", "--secret-file", str(secret_file)]
    command += ["--ready-file", str(ready), "--die-with-parent"]
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log)
    while not ready.exists():
        if process.poll() is not None:
            raise SystemExit((directory / "log").read_text())
        time.sleep(0.01)
    return process, json.loads(ready.read_text())["address"], secret_file.read_bytes()


def measure(nodes: list[Node], rounds: int) -> dict[str, list[float]]:
    spec = JobSpec(job="bench", min_nodes=1, max_nodes=len(nodes), nproc_per_node=1)
    for node in nodes:
        node.beat(first=True)
        node.report(LauncherJoined(job="bench", at=time.time(), spec=spec, launcher=1, store="127.0.0.1:29500"))
    for node in nodes:
        node.heard(1)
    times: dict[str, list[float]] = {"report to the last poll's answer": [], "report to its acknowledgement": []}
    for generation in range(1, rounds + 1):
        rank = generation % len(nodes)
        lost = RankLost(
            job="bench", at=time.time(), generation=generation, rank=rank, local_rank=0, detail="bench", signal=9
        )
        started = time.perf_counter()
        nodes[rank].report(lost)
        times["report to its acknowledgement"].append(time.perf_counter() - started)
        heard = max(node.heard(generation + 1) for node in nodes)
        times["report to the last poll's answer"].append(heard - started)
    beats = times["heartbeat that says nothing new"] = []
    for _ in range(rounds):
        started = time.perf_counter()
        nodes[0].beat(first=False)
        beats.append(time.perf_counter() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--database", default="", help="default: an SQLite file in a temporary directory")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as directory:
        process, address, secret = serve(Path(directory), arguments.database)
        try:
            times = measure([Node(address, secret, name) for name in NODES], arguments.rounds)
        finally:
            process.terminate()
            process.wait(10)
    rows = []
    for name, values in times.items():
        ordered = sorted(values)
        p99 = ordered[int(len(ordered) * 0.99) - 1]
        rows.append({"name": name, "median_ms": statistics.median(values) * 1e3, "p99_ms": p99 * 1e3})
        print(f"{name:<36} median {rows[-1]['median_ms']:7.2f} ms   99th percentile {rows[-1]['p99_ms']:7.2f} ms")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rounds": arguments.rounds, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
