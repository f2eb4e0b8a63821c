"""``agent.sock`` over real unix sockets, with real processes that the tests stop and kill."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from everstep.host.robust_mutex import is_supported
from everstep.ids import Version
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.directives import KillRank, NewGeneration, VersionNotice
from everstep.wire.v1.local import (
    MAX_FRAME_BYTES,
    ConnectionRole,
    FromAgent,
    Goodbye,
    Hello,
    RankExited,
    RankHeartbeat,
    Welcome,
    WrongProduct,
)
from everstep.wire.v1.training import (
    FindingRaised,
    GenerationSpec,
    JobSpec,
    LauncherJoined,
    RankLost,
    RankUnresponsive,
    RestoreRule,
)
from everstep_agent.jobs.local_processes import LocalJob, ProcessEnd
from everstep_agent.jobs.registry import JobRegistry
from everstep_agent.jobs.socket import REFUSAL_REASONS, AgentSocketServer

T = TypeVar("T")
DEADLINE_S = 60.0
needs_futex = pytest.mark.skipif(not is_supported(), reason="no futex call is known for this machine")


def spec(number: int, secret: str = "s" * 16) -> GenerationSpec:
    return GenerationSpec(
        job="j",
        number=number,
        reason="formed",  # type: ignore[arg-type]
        sentence="",
        trace="",
        seats=("n1",),
        store="127.0.0.1:1",
        store_node="n1",
        restore=RestoreRule(),
        holders=(),
        replica_nodes={},
        secret=secret,
        spec=JobSpec(job="j", nproc_per_node=2),
        issued_at=0.0,
    )


class Agent:
    """The part of an agent that serves its node, over a real socket, with its reports."""

    def __init__(self, run_dir: Path, max_connections: int = 16, exit_grace_s: float = 0.003) -> None:
        self.reports: list[Any] = []
        self.path = run_dir / "agent.sock"
        self.jobs = JobRegistry(
            "n1", SYSTEM_CLOCK, self, exit_grace_s=exit_grace_s, stopped_after_s=0.3, unresponsive_after_s=60.0
        )
        welcome = Welcome(protocol=1, node="n1", vault_socket="/v", rank_heartbeat_interval_s=0.02)
        self.server = AgentSocketServer(self.path, welcome, self.jobs, max_connections)
        self.children: list[subprocess.Popen[str]] = []
        self.clients: list[Client] = []

    def report(self, report: Any) -> None:
        self.reports.append(report)

    def report_finding(self, raised: FindingRaised) -> None:
        self.reports.append(raised)

    def configure_vault_job(self, job: LocalJob) -> None:
        pass

    def delete_from_vault(self, job: str) -> None:
        pass

    def drop_seals(self, job: str, before_generation: int) -> None:
        pass

    def keep_wrong_product(self, product: WrongProduct) -> None:
        self.reports.append(product)

    def new_trace_id(self) -> str:
        return "t"

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def until(self, condition: Callable[[], T]) -> T:
        """Return the first true result of ``condition``. Raises TimeoutError after the deadline."""
        async with asyncio.timeout(DEADLINE_S):
            while not (found := condition()):
                await asyncio.sleep(0.002)
            return found

    async def one(self, kind: type[T]) -> T:
        return (await self.until(lambda: [r for r in self.reports if isinstance(r, kind)]))[0]

    async def rank(self, local_rank: int, *last_word: str) -> subprocess.Popen[str]:
        """Connect a rank's process that sends heartbeats in generation 1."""
        arguments = [str(self.path), "j", str(local_rank), "1", str(local_rank), *last_word]
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.support.agents.rank_peer", *arguments], stdout=subprocess.PIPE, text=True
        )
        self.children.append(child)
        assert child.stdout is not None
        assert (await asyncio.to_thread(child.stdout.readline)).strip() == "ready"
        return child

    async def connect(self) -> Client:
        reader, writer = await asyncio.open_unix_connection(str(self.path))
        self.clients.append(Client(reader, writer))
        return self.clients[-1]

    async def launcher(self) -> Client:
        client = await self.connect()
        await client.send(Hello(protocols=(1,), role=ConnectionRole.LAUNCHER, job="j", pid=os.getpid()))
        offer = LauncherJoined(job="j", at=0.0, spec=JobSpec(job="j"), launcher=5, store="127.0.0.1:1")
        await client.send(offer)
        await client.receive(Welcome)
        await self.one(LauncherJoined)
        return client


class Client:
    """A connection to the agent made by the test itself."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._decoder: FrameDecoder[FromAgent] = FrameDecoder(FromAgent, MAX_FRAME_BYTES)
        self._heard: list[FromAgent] = []

    async def send(self, message: Any) -> None:
        self.writer.write(encode_frame(message))
        await self.writer.drain()

    async def receive(self, kind: type[T]) -> T:
        """Return the next message, which must be of this kind."""
        async with asyncio.timeout(DEADLINE_S):
            while not self._heard:
                data = await self.reader.read(1 << 16)
                assert data, "the agent closed the connection"
                self._heard += self._decoder.feed(data)
        message = self._heard.pop(0)
        assert isinstance(message, kind), message
        return message

    def end_with(self, message: Any) -> None:
        """Send a last message and shut the connection down, before the agent can read either."""
        self.writer.write(encode_frame(message))
        self.writer.get_extra_info("socket").shutdown(socket.SHUT_RDWR)

    async def wait_until_closed(self) -> bool:
        """Wait for the agent to end the connection, and return True."""
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                while await self.reader.read(1 << 16):
                    pass
        return True


@contextlib.asynccontextmanager
async def agent(run_dir: Path, **settings: Any) -> AsyncIterator[Agent]:
    node = Agent(run_dir, **settings)
    await node.server.start()
    watch = asyncio.create_task(node.server.watch_silence(0.01))
    try:
        yield node
    finally:
        watch.cancel()
        node.server.close()
        for client in node.clients:
            client.writer.close()
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()
        for child in node.children:
            child.kill()
            child.wait()
            assert child.stdout is not None
            child.stdout.close()
        await asyncio.sleep(0.01)


def run_story(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path


def test_only_the_owner_can_open_the_socket(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            assert node.path.stat().st_mode & 0o777 == 0o600
        assert not node.path.exists()

    run_story(story())


def test_socket_left_behind_by_a_killed_agent_is_replaced(run_dir: Path) -> None:
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(run_dir / "agent.sock"))
    left.close()

    async def story() -> None:
        async with agent(run_dir) as node:
            await node.launcher()

    run_story(story())


def test_killed_process_is_a_lost_rank(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            await node.launcher()
            node.jobs.handle_directives([NewGeneration(spec=spec(1))])
            rank = await node.rank(1)
            rank.kill()
            lost = await node.one(RankLost)
            assert (lost.generation, lost.rank, lost.local_rank, lost.has_replacement) == (1, 1, 1, True)
            endings = ("its process ended", "its connection ")
            assert lost.detail.startswith(endings), "the connection may break where the rank had not read everything"

    run_story(story())


def test_goodbye_counts_though_a_later_write_fails(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            node.jobs.handle_directives([NewGeneration(spec=spec(1))])
            client = await node.connect()
            await client.send(Hello(protocols=(1,), role=ConnectionRole.RANK, job="j", pid=os.getpid(), local_rank=0))
            await client.send(RankHeartbeat(generation=1, rank=0, step=1, step_s=0.1))
            await client.receive(Welcome)
            await node.until(node.jobs.is_busy)
            client.end_with(Goodbye(detail="done"))
            node.jobs.handle_directives([NewGeneration(spec=spec(2))])
            await node.until(lambda: not node.jobs.is_busy())
            await asyncio.sleep(0.01)
            assert node.reports == []

    run_story(story())


@needs_futex
def test_death_is_known_though_the_connection_is_open(run_dir: Path) -> None:
    """A child of the rank keeps the socket open, as the kernel does while it frees much memory."""

    async def story() -> None:
        async with agent(run_dir) as node:
            node.jobs.handle_directives([NewGeneration(spec=spec(1))])
            rank = await node.rank(1, "fork")
            assert rank.stdout is not None
            child = int(await asyncio.to_thread(rank.stdout.readline))
            (connection,) = node.server.connections
            await node.until(lambda: connection._watch is not None and connection._watch._thread)
            try:
                rank.kill()
                lost = await node.one(RankLost)
                assert (lost.generation, lost.rank) == (1, 1)
                assert lost.detail.startswith("its process ended")
                assert lost.signal in (signal.SIGKILL, None)
            finally:
                os.kill(child, signal.SIGKILL)
                rank.wait()

    run_story(story())


def test_reaped_process_is_lost_though_its_child_lives(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mutex, the launcher's report is the only sign while a child of the rank keeps the socket open."""
    monkeypatch.setattr("everstep_agent.jobs.socket.open_watch", lambda *_: None)

    async def story() -> None:
        async with agent(run_dir) as node:
            launcher = await node.launcher()
            node.jobs.handle_directives([NewGeneration(spec=spec(1))])
            rank = await node.rank(1, "fork")
            assert rank.stdout is not None
            child = int(await asyncio.to_thread(rank.stdout.readline))
            try:
                rank.kill()
                await asyncio.to_thread(rank.wait)
                await launcher.send(
                    RankExited(local_rank=1, pid=rank.pid, exit_code=None, signal=signal.SIGKILL, has_replacement=True)
                )
                lost = await node.one(RankLost)
                assert (lost.generation, lost.rank, lost.signal) == (1, 1, signal.SIGKILL)
            finally:
                os.kill(child, signal.SIGKILL)

    run_story(story())


def test_goodbye_counts_though_the_death_is_known_first(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            node.jobs.handle_directives([NewGeneration(spec=spec(1))])
            client = await node.connect()
            await client.send(Hello(protocols=(1,), role=ConnectionRole.RANK, job="j", pid=os.getpid(), local_rank=0))
            await client.send(RankHeartbeat(generation=1, rank=0, step=1, step_s=0.1))
            await client.receive(Welcome)
            await node.until(node.jobs.is_busy)
            (connection,) = node.server.connections
            client.writer.write(encode_frame(Goodbye(detail="done")))
            connection.handle_death(ProcessEnd(signal=signal.SIGKILL))
            await node.until(lambda: not node.jobs.is_busy())
            await asyncio.sleep(0.01)
            assert node.reports == []

    run_story(story())


def test_launcher_gets_no_memory_for_a_mutex(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            await node.launcher()
            (connection,) = node.server.connections
            assert connection._watch is None

    run_story(story())


@pytest.mark.slow
def test_stopped_process_is_reported_once(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            node.jobs.handle_directives([NewGeneration(spec=spec(1))])
            rank = await node.rank(0)
            rank.send_signal(signal.SIGSTOP)
            report = await node.one(RankUnresponsive)
            assert (report.rank, report.process_state) == (0, "T")
            rank.send_signal(signal.SIGCONT)
            rank.send_signal(signal.SIGSTOP)
            rank.send_signal(signal.SIGCONT)

    run_story(story())


@pytest.mark.slow
def test_kill_order_ends_stopped_process_and_informs_launcher(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            launcher = await node.launcher()
            node.jobs.handle_directives([NewGeneration(spec=spec(1))])
            await launcher.receive(NewGeneration)
            rank = await node.rank(0)
            rank.send_signal(signal.SIGSTOP)
            await node.one(RankUnresponsive)
            body = KillRank(job="j", generation=1, rank=0, local_rank=0, reason="it hangs")
            node.jobs.handle_directives([body])
            assert await asyncio.to_thread(rank.wait, DEADLINE_S) == -signal.SIGKILL
            assert await launcher.receive(KillRank) == body
            assert (await node.one(RankLost)).detail.startswith("killed by order of the controller: it hangs")

    run_story(story())


def test_kill_after_process_exit_is_harmless(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            rank = await node.rank(0)
            (connection,) = node.server.connections
            rank.kill()
            rank.wait()
            connection.kill()

    run_story(story())


def test_slow_reader_blocks_no_peer_and_gets_the_newest(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            client = await node.connect()
            await client.send(Hello(protocols=(1,), role=ConnectionRole.RANK, job="j", pid=os.getpid(), local_rank=0))
            await client.receive(Welcome)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            big = spec(1, secret="s" * 200_000)
            for number in range(1, 60):
                node.jobs.handle_directives([NewGeneration(spec=spec(number, big.secret))])
                notice = VersionNotice(job="j", generation=number, committed=Version(number, 1), candidate=2)
                node.jobs.handle_directives([notice])
            (connection,) = node.server.connections
            assert connection._transport is not None
            assert connection._transport.get_write_buffer_size() < 1 << 20
            client.writer.transport.resume_reading()  # type: ignore[attr-defined]
            newest: dict[type, Any] = {}
            while not (VersionNotice in newest and newest[VersionNotice].committed == Version(59, 1)):
                message: Any = await client.receive(object)
                newest[type(message)] = message
            assert newest[NewGeneration].spec.number == 59

    run_story(story())


@pytest.mark.parametrize(
    ("first", "why"),
    [
        (encode_frame(RankHeartbeat(generation=1, rank=0, step=1, step_s=0.1)), "malformed"),
        (
            encode_frame(Hello(protocols=(9,), role=ConnectionRole.RANK, job="j", pid=1, local_rank=0)),
            "protocol_version",
        ),
        (encode_frame(Hello(protocols=(1,), role=ConnectionRole.RANK, job="j", pid=1)), "malformed"),
        ((1 << 30).to_bytes(4, "big") + b"x", "malformed"),
        (encode_frame({"type": "Nonsense"}), "malformed"),
    ],
    ids=["tick_first", "other_protocol", "no_local_rank", "oversized", "unknown_message"],
)
def test_malformed_input_closes_the_connection_and_counts(run_dir: Path, first: bytes, why: str) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            client = await node.connect()
            client.writer.write(first)
            assert await client.wait_until_closed()
            assert dict(node.server.refused_counts) == dict.fromkeys(REFUSAL_REASONS, 0) | {why: 1}
            await node.launcher()  # others are served on

    run_story(story())


def test_one_connection_too_many_is_turned_away(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir, max_connections=2) as node:
            for _ in range(2):
                await node.connect()
            turned_away = await node.connect()
            assert await turned_away.wait_until_closed()
            assert node.server.refused_counts["forbidden"] == 1

    run_story(story())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_process_is_turned_away() -> None:
    async def story(directory: Path) -> None:
        async with agent(directory) as node:
            directory.chmod(0o755)
            node.path.chmod(0o777)
            stranger = socket.socket(socket.AF_UNIX)
            os.seteuid(65534)
            try:
                stranger.connect(str(node.path))
            finally:
                os.seteuid(0)
            assert await asyncio.to_thread(stranger.recv, 1) == b""
            assert node.server.refused_counts["forbidden"] == 1
            stranger.close()

    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        run_story(story(Path(directory)))


def test_agent_shutdown_reports_no_loss(run_dir: Path) -> None:
    async def story() -> None:
        async with agent(run_dir) as node:
            launcher = await node.launcher()
            node.jobs.handle_directives([NewGeneration(spec=spec(1))])
            await node.rank(0)
            before = list(node.reports)
            node.server.close()
            assert await launcher.wait_until_closed()
            await asyncio.sleep(0.02)
            assert node.reports == before

    run_story(story())
