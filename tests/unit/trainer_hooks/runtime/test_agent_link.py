"""The line to the agent never holds up training, and survives the agent."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.link import FrameOutbox, RankLink

from everstep.clock import Backoff
from everstep.errors import Unavailable, VersionMismatch
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.local import (
    MAX_FRAME_BYTES,
    ConnectionRole,
    FromAgent,
    Goodbye,
    Hello,
    RankHeartbeat,
    ToAgent,
    Welcome,
)
from everstep.wire.v1.training import RankFinished
from tests.support.fake_agent import FakeAgent, fake_agent
from tests.support.generations import JOB, generation

SETTINGS = HookSettings(reconnect=Backoff(floor_s=0.005, ceiling_s=0.02))
HELLO = Hello(protocols=(1,), role=ConnectionRole.RANK, job=JOB, pid=os.getpid(), local_rank=0)


class Listener:
    """Hears into a list; ticks count up."""

    def __init__(self) -> None:
        self.heard: list[FromAgent] = []
        self.changed = threading.Condition()
        self.ticks = 0
        self.silent = False

    def handle_message(self, message: FromAgent) -> None:
        with self.changed:
            self.heard.append(message)
            self.changed.notify_all()

    def make_tick(self) -> RankHeartbeat | None:
        if self.silent:
            return None
        self.ticks += 1
        return RankHeartbeat(generation=1, rank=0, step=self.ticks, step_s=0.0)

    def is_aborting(self) -> bool:
        return False

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.heard) >= count, 60)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with fake_agent(tmp_path / "agent.sock") as agent:
        yield agent


@pytest.fixture
def link(agent: FakeAgent, listener: Listener) -> Iterator[RankLink]:
    link = make_link(agent.path, listener)
    link.start(10)
    yield link
    link.close("test")


def make_link(path: Path, listener: Listener) -> RankLink:
    return RankLink(str(path), HELLO, listener, SETTINGS, SYSTEM_CLOCK, lambda: 0.5)


def finished(step: int) -> RankFinished:
    return RankFinished(job=JOB, at=0.0, generation=1, rank=0, step=step)


def test_link_sends_hello_and_returns_the_welcome(agent, listener):
    link = make_link(agent.path, listener)
    assert link.start(10) == agent.welcome()
    assert agent.peers[0].hello == HELLO
    link.close("over")
    assert agent.heard(Goodbye) == Goodbye(detail="over")


def test_link_ticks_at_the_agent_interval_and_gets_directives(agent, link, listener):
    agent.heard(RankHeartbeat, lambda t: t.step > 3)
    agent.peers[0].say(NewGeneration(spec=generation(1)))
    listener.wait_for(1)
    assert listener.heard == [NewGeneration(spec=generation(1))]


def test_reconnected_link_sends_hello_and_standing_messages(agent, link):
    link.send_persistent(finished(7))
    agent.heard(RankFinished)
    agent.stop()
    link.send(finished(8))
    agent.start()
    agent.heard(RankFinished, lambda m: m.step == 7)
    agent.heard(RankFinished, lambda m: m.step == 8)
    assert agent.peers[0].hello == HELLO


def test_withdrawn_message_is_not_repeated(agent, link):
    link.send_persistent(finished(7))
    agent.heard(RankFinished)
    link.send_persistent(None)
    agent.stop()
    agent.start()
    agent.heard(RankHeartbeat)
    assert not [m for p in agent.peers for m in p.messages if isinstance(m, RankFinished)]


def test_missing_agent_is_refused_with_advice(tmp_path, listener):
    link = make_link(tmp_path / "nobody.sock", listener)
    with pytest.raises(Unavailable, match="is everstep-agent running"):
        link.start(0.05)
    link.close("test")


def test_an_agent_of_another_protocol_is_refused(agent, listener):
    agent.greet = lambda peer: peer.say(Welcome(protocol=9, node="n1", vault_socket="", rank_heartbeat_interval_s=0.1))
    link = make_link(agent.path, listener)
    with pytest.raises(VersionMismatch):
        link.start(10)
    link.close("test")


def test_garbage_from_the_agent_reconnects_the_link(agent, link, listener):
    agent.heard(RankHeartbeat)
    agent.peers[0].connection.sendall(b"\xff\xff\xff\xff garbage")
    agent.wait_until(lambda: (len(agent.peers) > 1 and agent.peers[1].messages) or None, "a second connection")


def test_agent_not_reading_does_not_block_the_sender(tmp_path, listener):
    listener.silent = True
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        link = make_link(path, listener)
        starting = threading.Thread(target=link.start, args=(10,))
        starting.start()
        connection, _ = server.accept()
        with connection:
            connection.sendall(
                encode_frame(Welcome(protocol=1, node="n1", vault_socket="", rank_heartbeat_interval_s=0.1))
            )
            starting.join(60)
            for step in range(SETTINGS.outbox_frames):
                link.send(RankFinished(job=JOB, at=0.0, trace="x" * 64, generation=1, rank=0, step=step))
            received = read_all(connection, SETTINGS.outbox_frames)
            assert [m.step for m in received] == list(range(SETTINGS.outbox_frames))
            link.close("test")


def read_all(connection: socket.socket, count: int) -> list[RankFinished]:
    decoder: FrameDecoder[ToAgent] = FrameDecoder(ToAgent, MAX_FRAME_BYTES)
    messages: list[RankFinished] = []
    deadline = time.perf_counter() + 60
    while len(messages) < count and time.perf_counter() < deadline:
        messages += [m for m in decoder.feed(connection.recv(1 << 16)) if isinstance(m, RankFinished)]
    return messages


def test_a_full_outbox_drops_the_oldest_but_never_half_a_frame():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        outbox = FrameOutbox(max_frames=3)
        frames = [bytes([n]) * 100_000 for n in range(6)]
        outbox.put(frames[0])
        outbox.flush(ours)
        for frame in frames[1:]:
            outbox.put(frame)
        received = bytearray()
        while outbox or received[-1:] != frames[5][:1] or len(received) < 300_000:
            outbox.flush(ours)
            received += theirs.recv(1 << 20)
        assert received == frames[0] + frames[4] + frames[5]


def test_a_new_connection_starts_over_with_a_half_sent_frame():
    outbox = FrameOutbox(max_frames=10)
    first, other = socket.socketpair()
    with first, other:
        first.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        outbox.put(b"a" * 50_000)
        outbox.flush(first)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        outbox.put_first([b"hello"])
        received = bytearray()
        while outbox or len(received) < 50_005:
            outbox.flush(ours)
            received += theirs.recv(1 << 20)
        assert received == b"hello" + b"a" * 50_000
