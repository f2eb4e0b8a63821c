"""Agents' sessions, over real sockets against a controller in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock

import msgspec
import pytest

from everstep.bearer_tokens import TokenRole
from everstep.wire.v1.agent import (
    MAX_BODY_BYTES,
    UPGRADE,
    FrameKind,
    FrameRefused,
    HeartbeatAnswer,
    Registered,
    encode_frame,
)
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.training import RankProgress
from everstep_controller.core.state import NodeRuntime
from everstep_controller.server import session as sessions
from everstep_controller.server.connections import (
    MAX_SESSIONS_OF_NODE,
    USUAL_SESSIONS_OF_NODE,
    DescriptorBudget,
)
from everstep_controller.server.session import MAX_HEAD_BYTES, ConnectionRouter, ControllerApp
from tests.support.fleet.controllers import OPERATOR, InProcess, bearer, joined, registration
from tests.support.fleet.session_client import AgentSession, Connection, ServedController, served, upgrade


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[ServedController]:
    with served(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as server:
        yield server


@pytest.fixture
def dial(controller: ServedController) -> Iterator[Callable[..., AgentSession]]:
    """Open sessions, and close them at the end of the test."""
    opened: list[AgentSession] = []

    def open_session(node: str = "n1", incarnation: int = 1) -> AgentSession:
        opened.append(AgentSession(controller.address, node, incarnation))
        return opened[-1]

    yield open_session
    for session in opened:
        session.close()


Dial = Callable[..., AgentSession]


def live(controller: ServedController, node: str = "n1") -> NodeRuntime:
    return controller.controller.loop.state.node_runtime[node]


def ready(dial: Dial, node: str = "n1", incarnation: int = 1) -> AgentSession:
    """Open the session of a node that has registered and sent a first heartbeat."""
    session = dial(node, incarnation)
    session.register()
    session.beat(findings=())
    return session


def test_session_refusal_is_an_http_problem(controller: ServedController) -> None:
    for headers, wanted, status, code in (
        ({}, UPGRADE, 401, "unauthenticated"),
        ({"Authorization": "Bearer agent:n1:0000"}, UPGRADE, 401, "unauthenticated"),
        (bearer(TokenRole.AGENT, "n2"), UPGRADE, 403, "forbidden"),
        (bearer(TokenRole.VIEWER, "vera"), UPGRADE, 403, "forbidden"),
        (OPERATOR, UPGRADE, 403, "forbidden"),
        (bearer(TokenRole.AGENT, "n1"), "everstep/9", 426, "protocol_version"),
        ({}, "everstep/9", 401, "unauthenticated"),
    ):
        line = Connection(controller.address)
        line.send(upgrade("n1", headers, wanted))
        status_line, head = line.head()
        length = next(int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.startswith(b"content-length"))
        problem = msgspec.json.decode(line.take(length))
        assert (status_line, problem["status"], problem["code"]) == (status, status, code)
        assert b"application/problem+json" in head
        assert line.ended()
        line.close()


def test_standby_refuses_session_and_names_leader(controller: ServedController) -> None:
    controller.leads, controller.leader = False, "http://127.0.0.1:7070"
    line = Connection(controller.address)
    line.send(upgrade("n1", bearer(TokenRole.AGENT, "n1")))
    status, head = line.head()
    headers = dict(header.split(b": ", 1) for header in head.split(b"\r\n") if b": " in header)
    problem = msgspec.json.decode(line.take(int(headers[b"content-length"])))
    assert (status, problem["code"], problem["role"]) == (503, "unavailable", "standby")
    assert problem["leader"] == headers[b"everstep-leader"].decode() == controller.leader
    assert headers[b"retry-after"] == b"1"
    assert line.ended()
    line.close()


def test_session_upgrade_with_large_head_is_refused(controller: ServedController) -> None:
    """uvicorn refuses a head that is too large, even if it arrives in one read and carries a valid token."""
    made: list[MagicMock] = []

    def make_http() -> MagicMock:
        made.append(MagicMock(spec=asyncio.Protocol))
        return made[-1]

    front = ConnectionRouter(cast(ControllerApp, controller), DescriptorBudget(10), set(), make_http)
    transport = MagicMock(spec=asyncio.Transport)
    asked = upgrade("n1", {**bearer(TokenRole.AGENT, "n1"), "X-Long": "x" * MAX_HEAD_BYTES})

    async def receive() -> None:
        front.connection_made(transport)
        front.data_received(asked)

    controller.run(receive())
    (http,) = made
    http.data_received.assert_called_once_with(asked)
    transport.write.assert_not_called()


def test_connections_beyond_the_limit_are_closed(controller: ServedController) -> None:
    controller.descriptors.limit = 1
    first, second = Connection(controller.address), Connection(controller.address)
    assert second.ended()
    first.close()
    second.close()


def test_session_serves_one_incarnation_only(dial: Dial) -> None:
    session = ready(dial)
    session.incarnation = 2
    session.send_frame(
        FrameKind.REGISTER, {"protocols": [1], "node": "n1", "incarnation": 2, "agent_version": "x", "vault": "a:1"}
    )
    assert session.answer(FrameRefused).code == "stale"


def test_session_refuses_registration_of_another_node(dial: Dial) -> None:
    session = dial()
    session.send_frame(
        FrameKind.REGISTER, {"protocols": [1], "node": "n2", "incarnation": 1, "agent_version": "x", "vault": "a:1"}
    )
    assert session.answer(FrameRefused).code == "malformed"


def test_session_with_revoked_credential_receives_no_push(
    controller: ServedController, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent, other = ready(dial), ready(dial, "n2")
    silent.report(joined("j", 1.0, nodes=2))
    gate = controller.controller.authenticator
    monkeypatch.setattr(gate, "is_valid", lambda identity: identity.subject != "n1")
    other.report(joined("j", 1.0, nodes=2))
    assert other.directive(NewGeneration).spec.number == 1
    refused = silent.answer(FrameRefused)
    assert (refused.frame_kind, refused.code) == (0, "unauthenticated")
    assert silent.pushed == []
    assert silent.ended()


def test_session_accepts_quiet_heartbeat_without_answer(controller: ServedController, dial: Dial) -> None:
    session = ready(dial)
    session.report(joined("j", 1.0))
    session.directive(NewGeneration)
    before = controller.controller.metrics.heartbeats
    session.one_way_beat(ranks=(RankProgress(job="j", generation=1, rank=0, step=7, step_s=0.5),))
    assert not session.beat().resend
    assert controller.controller.metrics.heartbeats == before + 2
    assert controller.controller.loop.state.job_runtime["j"].progress.furthest_step == 7


def test_session_refuses_quiet_heartbeat_of_unknown_node(dial: Dial) -> None:
    session = dial()
    session.one_way_beat()
    refused = session.answer(FrameRefused)
    assert (refused.frame_kind, refused.code) == (FrameKind.ONE_WAY_HEARTBEAT, "not_found")
    session.register()
    session.close()
    following = dial()
    following.one_way_beat()
    assert not following.beat(findings=()).resend


def test_session_quiet_heartbeat_triggers_pending_push(controller: ServedController, dial: Dial) -> None:
    session = ready(dial)
    session.report(joined("j", 1.0))
    session.close()
    following = dial()
    following.one_way_beat(findings=())
    assert following.directive(NewGeneration).spec.job == "j"
    following.one_way_beat(findings=())
    following.one_way_beat()
    assert not following.beat().resend


def test_session_pushes_after_upgrade_answer(
    controller: ServedController, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_controller.runtime.push.DEFLATE_MIN_BYTES", 1)
    session = ready(dial)
    session.report(joined("j", 1.0))
    line = Connection(controller.address)
    beat = b'{"incarnation":1,"seq":2,"sent_at":0.0}'
    line.send(upgrade("n1", bearer(TokenRole.AGENT, "n1")) + encode_frame(FrameKind.ONE_WAY_HEARTBEAT, beat))
    status, _ = line.head()
    assert status == 101
    length = int.from_bytes(line.take(4), "big")
    assert line.take(length)[0] == FrameKind.DEFLATED_PUSH
    line.close()
    session.close()


def test_session_answers_all_frames_beyond_parking_limit(dial: Dial) -> None:
    session = dial()
    session.register()
    for seq in range(3 * sessions.MAX_PARKED):
        session.send_frame(FrameKind.HEARTBEAT, {"incarnation": 1, "seq": seq, "sent_at": 0.0, "findings": []})
    for _ in range(3 * sessions.MAX_PARKED):
        assert not session.answer(HeartbeatAnswer).resend


def test_session_repeats_directive_until_acknowledged(controller: ServedController, dial: Dial) -> None:
    session = ready(dial)
    session.report(joined("j", 1.0))
    assert session.directive(NewGeneration).spec.number == 1
    assert session.beat().directives == ()
    session.close()
    again = dial()
    (directive,) = again.beat().directives
    assert isinstance(directive.body, NewGeneration)
    again.acknowledge(directive.seq)
    controller.until(lambda: controller.controller.outbox.pending_count("n1") == 0)
    again.close()
    assert dial().beat().directives == ()


def test_second_session_replaces_first_without_disconnect(controller: ServedController, dial: Dial) -> None:
    first, second = ready(dial), dial()
    assert not second.beat().resend
    assert first.ended()
    second.report(joined("j", 1.0))
    assert second.directive(NewGeneration).spec.number == 1
    assert live(controller).disconnected_at is None
    assert controller.controller.outbox.connected_count() == 1


def test_session_ends_on_invalid_frame(dial: Dial) -> None:
    for frame in (
        (0).to_bytes(4, "big") + b"x",
        (MAX_BODY_BYTES + 2).to_bytes(4, "big") + bytes((FrameKind.HEARTBEAT,)),
        encode_frame(FrameKind.REGISTERED, b"{}"),
        encode_frame(FrameKind.REFUSED, b""),
    ):
        session = dial()
        session.send(frame)
        assert session.answer(FrameRefused).frame_kind == 0
        assert session.ended()


def test_session_continues_after_malformed_body(dial: Dial) -> None:
    session = dial()
    for kind in (FrameKind.REGISTER, FrameKind.HEARTBEAT, FrameKind.REPORTS, FrameKind.ACKNOWLEDGE):
        for body in (b"", b"{", b"\xff\xfe", b"[" * 5000, b'{"incarnation":1}', b'{"x":1}'):
            session.send(encode_frame(kind, body))
            refused = session.answer(FrameRefused)
            assert (refused.frame_kind, refused.code) == (kind, "malformed")
    assert isinstance(session.register(), Registered)


def test_session_accepts_frame_byte_by_byte(dial: Dial) -> None:
    session = dial()
    session.register()
    for byte in encode_frame(FrameKind.HEARTBEAT, b'{"incarnation":1,"seq":1,"sent_at":0.0,"findings":[]}'):
        session.send(bytes((byte,)))
    assert not session.answer(HeartbeatAnswer).resend


A_MEGABYTE = (1 << 20).to_bytes(4, "big") + bytes((FrameKind.HEARTBEAT,))


def last_look(controller: ServedController, node: str = "n1") -> None:
    """Run the silence check as if a minute had passed without a frame."""

    def look() -> None:
        (session,) = controller.descriptors._of_node[node]
        session._check_owed_frame(session._frames, sessions.OWED_LOOKS)

    controller.on_loop(look)


@pytest.mark.parametrize("more", [b"", b"\0", A_MEGABYTE], ids=["silent", "a byte", "a head"])
def test_session_without_a_first_frame_is_closed(
    controller: ServedController, dial: Dial, monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    monkeypatch.setattr(sessions, "LOOK_S", 0.02)
    session = dial()
    session.send(more)
    refused = session.answer(FrameRefused)
    assert (refused.frame_kind, refused.code) == (0, "unavailable")
    assert "no whole frame came within" in refused.message
    assert session.ended()
    controller.until(lambda: not controller.descriptors.open)


def test_session_between_heartbeats_is_not_silent(controller: ServedController, dial: Dial) -> None:
    quiet = ready(dial)
    last_look(controller)
    assert quiet.beat().keep_open


def test_session_that_waits_for_its_answer_is_not_silent(
    controller: ServedController, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent may wait for the answer to its registration while the database writes it."""
    late: asyncio.Future[int] = controller.on_loop(asyncio.Future)
    monkeypatch.setattr(controller.controller.agent_service, "register", lambda node, register: late)
    session = dial()
    session.send_frame(FrameKind.REGISTER, registration("n1"))
    controller.until(lambda: controller.descriptors._of_node["n1"][0]._beats_busy)
    last_look(controller)
    controller.on_loop(lambda: late.set_result(1))
    assert session.answer(Registered).next_directive == 1


def test_sessions_of_one_node_are_bounded(controller: ServedController, dial: Dial) -> None:
    used, other = ready(dial), ready(dial, "n2")
    silent = [dial() for _ in range(MAX_SESSIONS_OF_NODE + 3)]
    for session in silent[:4]:
        refused = session.answer(FrameRefused)
        assert (refused.frame_kind, refused.code) == (0, "rate_limited")
        assert "node n1 has 9 sessions at once" in refused.message
        assert session.ended()
    controller.until(lambda: controller.descriptors.open == 1 + MAX_SESSIONS_OF_NODE)
    assert used.beat().keep_open
    assert other.beat().keep_open
    assert live(controller).disconnected_at is None


def shrink_buffers(controller: ServedController, session: AgentSession) -> None:
    """Shrink the socket buffers of both ends, so that a peer that does not read is noticed after a few frames."""
    session.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def shrink() -> None:
        receiver: Any = controller.controller.outbox._receivers[session.node]
        connection: socket.socket = receiver._transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    controller.on_loop(shrink)


def test_session_with_unread_pushes_is_cut_and_counted(
    controller: ServedController, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_UNREAD_BYTES", 1 << 16)
    monkeypatch.setattr("everstep_controller.runtime.push.DEFLATE_MIN_BYTES", 1 << 30)
    session = ready(dial)
    shrink_buffers(controller, session)
    session.report(joined("j", 1.0))
    outbox, metrics = controller.controller.outbox, controller.controller.metrics

    def push() -> bool:
        (directive,) = outbox.pending("n1")[:1]
        receiver = outbox._receivers.get("n1")
        if receiver is not None:
            receiver.push([directive] * 1000)
        return metrics.registry.get_sample_value("everstep_controller_agent_sessions_cut_total") == 1.0

    controller.until(push)
    controller.until(lambda: not outbox.has_receiver("n1"))


def test_stalled_session_is_cut_after_timeout(
    controller: ServedController, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "STALLED_S", 0.05)
    session = ready(dial)
    session.report(joined("j", 1.0))
    outbox, metrics = controller.controller.outbox, controller.controller.metrics
    pending = controller.on_loop(lambda: outbox.pending("n1"))
    controller.on_loop(lambda: outbox._receivers["n1"].push(list(pending) * 20_000))
    controller.until(lambda: metrics.registry.get_sample_value("everstep_controller_agent_sessions_cut_total") == 1.0)


def scarce(controller: ServedController, *, exhausted: bool = False) -> None:
    """Make the process appear short of file descriptors, or out of them if `exhausted`."""
    controller.descriptors.scarce_from = controller.descriptors.crowded_from = 0
    controller.descriptors.exhausted_from = 0 if exhausted else 1000


def test_scarce_descriptors_release_session_on_quiet_heartbeat(controller: ServedController, dial: Dial) -> None:
    session = ready(dial)
    scarce(controller)
    session.one_way_beat()
    assert session.next_frame() == (FrameKind.GO_AWAY, None)
    session.one_way_beat()
    assert not session.beat().keep_open


def test_scarce_descriptors_release_idle_session_without_loss(controller: ServedController, dial: Dial) -> None:
    session = ready(dial)
    scarce(controller)
    assert not session.beat().keep_open
    session.close()
    controller.until(lambda: not controller.controller.outbox.has_receiver("n1"))
    assert live(controller).disconnected_at is None
    assert not dial().beat().keep_open


def test_scarce_descriptors_release_idle_session_on_connect(controller: ServedController, dial: Dial) -> None:
    idle = ready(dial)
    scarce(controller)
    with closing(Connection(controller.address)):
        assert idle.next_frame() == (FrameKind.GO_AWAY, None)
        controller.until(lambda: not controller.descriptors._sessions)  # asked once, the session leaves the candidates
    idle.close()
    controller.until(lambda: not controller.controller.outbox.has_receiver("n1"))
    assert live(controller).disconnected_at is None


def test_scarce_descriptors_close_surplus_sessions_first(controller: ServedController, dial: Dial) -> None:
    idle = ready(dial)
    silent = [dial("n2") for _ in range(USUAL_SESSIONS_OF_NODE + 2)]
    scarce(controller)
    with closing(Connection(controller.address)):
        for session in silent[:2]:
            assert session.answer(FrameRefused).code == "rate_limited"
        assert not idle.beat().keep_open  # no other frame came before its answer
        assert not any(session.broken() for session in silent[2:])


@pytest.mark.slow
def test_scarce_descriptors_keep_sessions_with_pending_work(controller: ServedController, dial: Dial) -> None:
    wanted = ready(dial)
    wanted.report(joined("j", 1.0))
    wanted.next_frame()  # the generation
    scarce(controller)
    with closing(Connection(controller.address)) as other:
        other.send(upgrade("n2", bearer(TokenRole.AGENT, "n2")))
        assert other.head()[0] == 101
        with closing(Connection(controller.address)):
            assert wanted.beat().keep_open  # no other frame came before its answer


@pytest.mark.parametrize("protocol", [sessions.AgentSession, sessions.ConnectionRouter])
def test_protocol_shows_nothing_of_the_controller(protocol: type[asyncio.Protocol]) -> None:
    """Event loops log a failed protocol by its repr; these two hold the state of the fleet and the settings."""
    assert protocol.__repr__ is object.__repr__
