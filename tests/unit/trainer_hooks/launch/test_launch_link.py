from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest
from everstep_trainer.launch.agent_link import Directive, LauncherLink

from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.local import ConnectionRole, Goodbye, Hello, LauncherLost, RankExited
from everstep.wire.v1.training import JobSpec, LauncherJoined
from tests.support.fake_agent import FakeAgent, Peer, fake_agent

STOP = StopJob(job="j", ok=True, reason="done")


def joined() -> LauncherJoined:
    return LauncherJoined(job="j", at=0.0, spec=JobSpec(job="j"), launcher=1, store="127.0.0.1:1")


def exited(pid: int) -> RankExited:
    return RankExited(local_rank=0, pid=pid, exit_code=None, signal=9, has_replacement=True)


def linked(path: Path, act: Callable[[LauncherLink, asyncio.Queue[Directive]], Coroutine[None, None, None]]) -> None:
    """Runs a link to ``path`` while ``act`` does something with it."""

    async def play() -> None:
        heard: asyncio.Queue[Directive] = asyncio.Queue()
        link = LauncherLink(str(path), "j", joined, heard.put_nowait)
        line = asyncio.create_task(link.run())
        try:
            await asyncio.wait_for(act(link, heard), 30)
        finally:
            line.cancel()
            await asyncio.wait([line])

    asyncio.run(play())


async def connected(link: LauncherLink) -> None:
    while not link.connected:
        await asyncio.sleep(0.005)


def test_launcher_sends_hello_join_and_queued_reports(tmp_path: Path) -> None:
    with fake_agent(tmp_path / "agent.sock", node="n7") as agent:

        async def act(link: LauncherLink, heard: asyncio.Queue[Directive]) -> None:
            link.report(exited(1))
            await connected(link)
            link.report(exited(2))
            peer = await asyncio.to_thread(lambda: agent.wait_until(lambda: said(agent, 3), "three messages"))
            assert peer.hello is not None
            assert (peer.hello.role, peer.hello.job, peer.hello.local_rank) == (ConnectionRole.LAUNCHER, "j", None)
            assert peer.messages == [joined(), exited(1), exited(2)]
            assert link.node == "n7"

        linked(tmp_path / "agent.sock", act)


def said(agent: FakeAgent, count: int) -> Peer | None:
    return next((peer for peer in agent.peers if len(peer.messages) >= count), None)


def test_directives_following_the_welcome_are_passed_on(tmp_path: Path) -> None:
    with fake_agent(tmp_path / "agent.sock") as agent:

        def greet(peer: Peer) -> None:
            peer.say(agent.welcome())
            peer.say(LauncherLost())
            peer.say(STOP)

        agent.greet = greet

        async def act(link: LauncherLink, heard: asyncio.Queue[Directive]) -> None:
            assert await heard.get() == STOP

        linked(tmp_path / "agent.sock", act)


def test_missing_agent_is_retried_until_available(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path / "agent.sock")

    async def act(link: LauncherLink, heard: asyncio.Queue[Directive]) -> None:
        await asyncio.sleep(0)
        assert not link.connected
        agent.start()
        await connected(link)

    try:
        linked(tmp_path / "agent.sock", act)
    finally:
        agent.stop()


def test_agent_without_a_welcome_is_named_and_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with fake_agent(tmp_path / "agent.sock") as agent:
        greetings = 0

        def greet(peer: Peer) -> None:
            nonlocal greetings
            greetings += 1
            peer.say(STOP if greetings < 6 else agent.welcome())

        agent.greet = greet

        async def act(link: LauncherLink, heard: asyncio.Queue[Directive]) -> None:
            await connected(link)
            assert heard.empty()

        with caplog.at_level(logging.WARNING):
            linked(tmp_path / "agent.sock", act)
        warnings = [record.getMessage() for record in caplog.records if "instead of Welcome" in record.getMessage()]
        assert len(warnings) == 1  # once for each reason, not for each try


def test_goodbye_is_the_last_message(tmp_path: Path) -> None:
    with fake_agent(tmp_path / "agent.sock") as agent:

        async def act(link: LauncherLink, heard: asyncio.Queue[Directive]) -> None:
            await connected(link)
            await link.leave("the job is over")
            assert not link.connected

        linked(tmp_path / "agent.sock", act)
        goodbye = agent.heard(Goodbye)
        assert goodbye.detail == "the job is over"
        peer = agent.wait_until(lambda: next((p for p in agent.peers if p.closed), None), "the end of the line")
        assert isinstance(peer.hello, Hello)
        assert peer.messages[-1] == goodbye


def test_an_agent_of_another_user_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("everstep_trainer.launch.agent_link._CREDENTIALS", Strangers())
    with fake_agent(tmp_path / "agent.sock") as agent, caplog.at_level(logging.WARNING):

        async def act(link: LauncherLink, heard: asyncio.Queue[Directive]) -> None:
            while "are trusted" not in caplog.text:
                await asyncio.sleep(0.005)
            assert not link.connected

        linked(tmp_path / "agent.sock", act)
        assert not any(peer.messages for peer in agent.peers)


class Strangers:
    """Peer credentials that always name somebody else."""

    size = 12

    def unpack(self, _: bytes) -> tuple[int, int, int]:
        return 1, 4_000_000, 4_000_000
