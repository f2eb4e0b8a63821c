from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.local import ConnectionRole, Goodbye, Hello, LauncherLost, RankExited
from everstep.wire.v1.training import JobSpec, LauncherJoined
from everstep_trainer.launch.services.launcher_connection import Directive, LauncherConnection
from tests.support.agents.fake_agent import FakeAgent, Peer, fake_agent

STOP = StopJob(job="j", ok=True, reason="done")


def joined() -> LauncherJoined:
    return LauncherJoined(job="j", at=0.0, spec=JobSpec(job="j"), launcher=1, store="127.0.0.1:1")


def exited(pid: int) -> RankExited:
    return RankExited(local_rank=0, pid=pid, exit_code=None, signal=9, has_replacement=True)


def with_connection(
    path: Path, act: Callable[[LauncherConnection, asyncio.Queue[Directive]], Coroutine[None, None, None]]
) -> None:
    """Run a connection to ``path`` while ``act`` uses it."""

    async def play() -> None:
        received: asyncio.Queue[Directive] = asyncio.Queue()
        connection = LauncherConnection(str(path), "j", joined, received.put_nowait)
        line = asyncio.create_task(connection.run())
        try:
            await asyncio.wait_for(act(connection, received), 30)
        finally:
            line.cancel()
            await asyncio.wait([line])

    asyncio.run(play())


async def connected(connection: LauncherConnection) -> None:
    while not connection.connected:
        await asyncio.sleep(0.005)


def test_launcher_sends_hello_join_and_queued_reports(tmp_path: Path) -> None:
    with fake_agent(tmp_path / "agent.sock", node="n7") as agent:

        async def act(connection: LauncherConnection, received: asyncio.Queue[Directive]) -> None:
            connection.report(exited(1))
            await connected(connection)
            connection.report(exited(2))
            peer = await asyncio.to_thread(lambda: agent.wait_until(lambda: peer_with(agent, 3), "three messages"))
            assert peer.hello is not None
            assert (peer.hello.role, peer.hello.job, peer.hello.local_rank) == (ConnectionRole.LAUNCHER, "j", None)
            assert peer.messages == [joined(), exited(1), exited(2)]
            assert connection.node == "n7"

        with_connection(tmp_path / "agent.sock", act)


def peer_with(agent: FakeAgent, count: int) -> Peer | None:
    return next((peer for peer in agent.peers if len(peer.messages) >= count), None)


def test_directives_following_the_welcome_are_passed_on(tmp_path: Path) -> None:
    with fake_agent(tmp_path / "agent.sock") as agent:

        def greet(peer: Peer) -> None:
            peer.send(agent.welcome())
            peer.send(LauncherLost())
            peer.send(STOP)

        agent.greet = greet

        async def act(connection: LauncherConnection, received: asyncio.Queue[Directive]) -> None:
            assert await received.get() == STOP

        with_connection(tmp_path / "agent.sock", act)


def test_agent_without_a_welcome_is_named_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fake_agent(tmp_path / "agent.sock") as agent:
        greetings = 0

        def greet(peer: Peer) -> None:
            nonlocal greetings
            greetings += 1
            peer.send(STOP if greetings < 6 else agent.welcome())

        agent.greet = greet

        async def act(connection: LauncherConnection, received: asyncio.Queue[Directive]) -> None:
            await connected(connection)
            assert received.empty()

        with caplog.at_level(logging.WARNING):
            with_connection(tmp_path / "agent.sock", act)
        warnings = [record.getMessage() for record in caplog.records if "instead of Welcome" in record.getMessage()]
        assert len(warnings) == 1  # once for each reason, and not for each attempt


def test_goodbye_is_the_last_message(tmp_path: Path) -> None:
    with fake_agent(tmp_path / "agent.sock") as agent:

        async def act(connection: LauncherConnection, received: asyncio.Queue[Directive]) -> None:
            await connected(connection)
            await connection.leave("the job is over")
            assert not connection.connected

        with_connection(tmp_path / "agent.sock", act)
        goodbye = agent.wait_for_message(Goodbye)
        assert goodbye.detail == "the job is over"
        peer = agent.wait_until(lambda: next((p for p in agent.peers if p.closed), None), "the connection to close")
        assert isinstance(peer.hello, Hello)
        assert peer.messages[-1] == goodbye


def test_an_agent_of_another_user_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("everstep_trainer.launch.services.launcher_connection._CREDENTIALS", Strangers())
    with fake_agent(tmp_path / "agent.sock") as agent, caplog.at_level(logging.WARNING):

        async def act(connection: LauncherConnection, received: asyncio.Queue[Directive]) -> None:
            while "are trusted" not in caplog.text:
                await asyncio.sleep(0.005)
            assert not connection.connected

        with_connection(tmp_path / "agent.sock", act)
        assert not any(peer.messages for peer in agent.peers)


class Strangers:
    """Peer credentials that always name another user."""

    size = 12

    def unpack(self, _: bytes) -> tuple[int, int, int]:
        return 1, 4_000_000, 4_000_000
