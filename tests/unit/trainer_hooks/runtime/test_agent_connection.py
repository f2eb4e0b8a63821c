"""The rank's connection to the agent: it never blocks training, and it reconnects to a restarted agent."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from everstep.clock import Backoff
from everstep.errors import Unavailable, VersionMismatch
from everstep.host.robust_mutex import FutexWord, is_held, is_supported, make_memory
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.framing import FrameDecoder, encode_frame
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.local import (
    MAX_FRAME_BYTES,
    ConnectionRole,
    FromAgent,
    Hello,
    RankHeartbeat,
    ToAgent,
    Welcome,
)
from everstep.wire.v1.training import RankFinished
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.agent_connection import AgentConnection, FrameOutbox
from everstep_trainer.runtime.directives import DirectiveListener
from tests.support.agents.fake_agent import FakeAgent, Peer, fake_agent
from tests.support.fleet.generations import JOB, generation

SETTINGS = HookSettings(reconnect=Backoff(floor_s=0.005, ceiling_s=0.02))
HELLO = Hello(protocols=(1,), role=ConnectionRole.RANK, job=JOB, pid=os.getpid(), local_rank=0)


class Listener:
    """Append messages to a list, and count the heartbeats."""

    def __init__(self) -> None:
        self.messages: list[FromAgent] = []
        self.changed = threading.Condition()
        self.ticks = 0
        self.silent = False

    def handle_message(self, message: FromAgent) -> None:
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()

    def make_tick(self) -> RankHeartbeat | None:
        if self.silent:
            return None
        self.ticks += 1
        return RankHeartbeat(generation=1, rank=0, step=self.ticks, step_s=0.0)

    def is_aborting(self) -> bool:
        return False

    def may_tick_rarely(self) -> bool:
        return False

    def wait_for(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.messages) >= count, 60)


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[FakeAgent]:
    with fake_agent(tmp_path / "agent.sock") as agent:
        yield agent


@pytest.fixture
def connection(agent: FakeAgent, listener: Listener) -> Iterator[AgentConnection]:
    connection = make_connection(agent.path, listener)
    connection.start(10)
    yield connection
    connection.close("test")


def make_connection(path: Path, listener: Listener) -> AgentConnection:
    return AgentConnection(str(path), HELLO, cast(DirectiveListener, listener), SETTINGS, SYSTEM_CLOCK, lambda: 0.5)


def finished(step: int) -> RankFinished:
    return RankFinished(job=JOB, at=0.0, generation=1, rank=0, step=step)


def test_connection_ticks_at_interval_and_gets_directives(
    agent: FakeAgent, connection: AgentConnection, listener: Listener
) -> None:
    agent.wait_for_message(RankHeartbeat, lambda t: t.step > 3)
    agent.peers[0].send(NewGeneration(spec=generation(1)))
    listener.wait_for(1)
    assert listener.messages == [NewGeneration(spec=generation(1))]


def test_reconnection_sends_hello_and_standing_messages(agent: FakeAgent, connection: AgentConnection) -> None:
    connection.send_persistent(finished(7))
    agent.wait_for_message(RankFinished)
    agent.stop()
    connection.send(finished(8))
    agent.start()
    agent.wait_for_message(RankFinished, lambda m: m.step == 7)
    agent.wait_for_message(RankFinished, lambda m: m.step == 8)
    assert agent.peers[0].hello == HELLO


@pytest.mark.skipif(not is_supported(), reason="no futex call is known for this machine")
def test_mutex_is_held_for_each_connection_and_released(agent: FakeAgent, listener: Listener) -> None:
    words = []

    def greet(peer: Peer) -> None:
        memory = make_memory()
        socket.send_fds(peer.connection, [encode_frame(agent.welcome())], [memory])
        words.append(FutexWord(memory))

    agent.greet = greet
    connection = make_connection(agent.path, listener)
    connection.start(10)
    agent.wait_until(lambda: is_held(words[0].read()), "the mutex is held")
    agent.stop()
    agent.start()
    agent.wait_until(lambda: len(words) == 2 and is_held(words[1].read()), "the new agent's mutex is held")
    assert words[0].read() == 0
    connection.close("over")
    assert words[1].read() == 0, "an orderly end gives nothing up"
    for word in words:
        word.close()


def test_descriptor_that_is_no_memory_is_dropped(agent: FakeAgent, listener: Listener) -> None:
    def greet(peer: Peer) -> None:
        reading, writing = os.pipe()
        socket.send_fds(peer.connection, [encode_frame(agent.welcome())], [reading, writing])
        os.close(reading)
        os.close(writing)

    agent.greet = greet
    connection = make_connection(agent.path, listener)
    connection.start(10)
    agent.wait_for_message(RankHeartbeat)
    assert connection._mutex is None
    connection.close("over")


def test_missing_agent_is_refused_with_advice(tmp_path: Path, listener: Listener) -> None:
    connection = make_connection(tmp_path / "missing.sock", listener)
    with pytest.raises(Unavailable, match="is everstep-agent running"):
        connection.start(0.05)
    connection.close("test")


def test_an_agent_of_another_protocol_is_refused(agent: FakeAgent, listener: Listener) -> None:
    agent.greet = lambda peer: peer.send(Welcome(protocol=9, node="n1", vault_socket="", rank_heartbeat_interval_s=0.1))
    connection = make_connection(agent.path, listener)
    with pytest.raises(VersionMismatch):
        connection.start(10)
    connection.close("test")


def test_garbage_from_the_agent_causes_a_reconnection(
    agent: FakeAgent, connection: AgentConnection, listener: Listener
) -> None:
    agent.wait_for_message(RankHeartbeat)
    agent.peers[0].connection.sendall(b"\xff\xff\xff\xff garbage")
    agent.wait_until(lambda: (len(agent.peers) > 1 and agent.peers[1].messages) or None, "a second connection")


def test_agent_not_reading_does_not_block_the_sender(tmp_path: Path, listener: Listener) -> None:
    listener.silent = True
    path = tmp_path / "agent.sock"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(1)
        connection = make_connection(path, listener)
        starting = threading.Thread(target=connection.start, args=(10,))
        starting.start()
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(
                encode_frame(Welcome(protocol=1, node="n1", vault_socket="", rank_heartbeat_interval_s=0.1))
            )
            starting.join(60)
            for step in range(SETTINGS.outbox_frames):
                connection.send(RankFinished(job=JOB, at=0.0, trace="x" * 64, generation=1, rank=0, step=step))
            received = read_all(accepted, SETTINGS.outbox_frames)
            assert [m.step for m in received] == list(range(SETTINGS.outbox_frames))
            connection.close("test")


def read_all(connection: socket.socket, count: int) -> list[RankFinished]:
    decoder: FrameDecoder[ToAgent] = FrameDecoder(ToAgent, MAX_FRAME_BYTES)
    messages: list[RankFinished] = []
    deadline = time.perf_counter() + 60
    while len(messages) < count and time.perf_counter() < deadline:
        messages += [m for m in decoder.feed(connection.recv(1 << 16)) if isinstance(m, RankFinished)]
    return messages


def test_a_full_outbox_drops_the_oldest_but_never_half_a_frame() -> None:
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
