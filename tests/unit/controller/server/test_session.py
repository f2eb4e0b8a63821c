"""Agents' sessions, over real sockets against a controller in this process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from everstep_controller.core.state import NodeRuntime
from everstep_controller.server import session as sessions
from everstep_controller.server.connections import (
    MAX_SESSIONS_OF_NODE,
    USUAL_SESSIONS_OF_NODE,
    DescriptorBudget,
)
from everstep_controller.server.session import MAX_HEAD_BYTES, ConnectionRouter

from everstep.bearer_tokens import TokenRole
from everstep.vocabulary import NodeState
from everstep.wire.v1.agent import (
    MAX_BODY_BYTES,
    UPGRADE,
    FrameKind,
    FrameRefused,
    HeartbeatAnswer,
    Registered,
    ReportsAnswer,
    encode_frame,
)
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.training import RankProgress
from tests.support.controllers import OPERATOR, InProcess, bearer, joined, registration
from tests.support.sessions import AgentSession, Line, Served, served, upgrade


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Served]:
    with served(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as server:
        yield server


@pytest.fixture
def dial(controller: Served) -> Iterator[Callable[..., AgentSession]]:
    """Opens sessions, closed at the end."""
    opened: list[AgentSession] = []

    def open_session(node: str = "n1", incarnation: int = 1) -> AgentSession:
        opened.append(AgentSession(controller.address, node, incarnation))
        return opened[-1]

    yield open_session
    for session in opened:
        session.close()


Dial = Callable[..., AgentSession]


def live(controller: Served, node: str = "n1") -> NodeRuntime:
    return controller.controller.loop.state.node_runtime[node]


def ready(dial: Dial, node: str = "n1", incarnation: int = 1) -> AgentSession:
    """A session of a node that has registered and shown its picture."""
    session = dial(node, incarnation)
    session.register()
    session.beat(findings=())
    return session


# --- the handshake -----------------------------------------------------------------------------------------------


def test_session_refusal_is_an_http_problem(controller: Served) -> None:
    for headers, wanted, status, code in (
        ({}, UPGRADE, 401, "unauthenticated"),
        ({"Authorization": "Bearer agent:n1:0000"}, UPGRADE, 401, "unauthenticated"),
        (bearer(TokenRole.AGENT, "n2"), UPGRADE, 403, "forbidden"),
        (bearer(TokenRole.VIEWER, "vera"), UPGRADE, 403, "forbidden"),
        (OPERATOR, UPGRADE, 403, "forbidden"),
        (bearer(TokenRole.AGENT, "n1"), "everstep/9", 426, "protocol_version"),
        ({}, "everstep/9", 401, "unauthenticated"),
    ):
        line = Line(controller.address)
        line.send(upgrade("n1", headers, wanted))
        said, head = line.head()
        length = next(int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.startswith(b"content-length"))
        problem = msgspec.json.decode(line.take(length))
        assert (said, problem["status"], problem["code"]) == (status, status, code)
        assert b"application/problem+json" in head
        assert line.ended()
        line.close()


def test_standby_refuses_session_and_names_leader(controller: Served) -> None:
    controller.leads, controller.leader = False, "http://127.0.0.1:7070"
    line = Line(controller.address)
    line.send(upgrade("n1", bearer(TokenRole.AGENT, "n1")))
    status, head = line.head()
    headers = dict(header.split(b": ", 1) for header in head.split(b"\r\n") if b": " in header)
    problem = msgspec.json.decode(line.take(int(headers[b"content-length"])))
    assert (status, problem["code"], problem["role"]) == (503, "unavailable", "standby")
    assert problem["leader"] == headers[b"everstep-leader"].decode() == controller.leader
    assert headers[b"retry-after"] == b"1"
    assert line.ended()
    line.close()


def test_session_upgrade_may_be_fragmented_or_carry_a_frame(controller: Served) -> None:
    line = Line(controller.address)
    asked = upgrade("n1", bearer(TokenRole.AGENT, "n1"))
    line.send(asked[:7])
    line.send(asked[7:60])
    line.send(asked[60:] + encode_frame(FrameKind.ACKNOWLEDGE, b"not json"))
    assert line.head()[0] == 101
    length = int.from_bytes(line.take(4), "big")
    assert line.take(1)[0] == FrameKind.REFUSED
    assert msgspec.json.decode(line.take(length - 1), type=FrameRefused).code == "malformed"
    line.close()


def test_session_upgrade_with_large_head_is_refused(controller: Served) -> None:
    """It comes in one read, whole, and with a token that is good: what is too large is uvicorn's to refuse."""
    made: list[MagicMock] = []

    def make_http() -> MagicMock:
        made.append(MagicMock(spec=asyncio.Protocol))
        return made[-1]

    front = ConnectionRouter(controller, DescriptorBudget(10), set(), make_http)
    transport = MagicMock(spec=asyncio.Transport)
    asked = upgrade("n1", {**bearer(TokenRole.AGENT, "n1"), "X-Long": "x" * MAX_HEAD_BYTES})

    async def receive() -> None:
        front.connection_made(transport)
        front.data_received(asked)

    controller.run(receive())
    (http,) = made
    http.data_received.assert_called_once_with(asked)
    transport.write.assert_not_called()


def test_silent_connection_is_closed(controller: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_controller.server.session.FIRST_REQUEST_S", 0.05)
    line = Line(controller.address)
    assert line.ended()
    line.close()


def test_connections_beyond_the_limit_are_closed(controller: Served) -> None:
    controller.descriptors.limit = 1
    first, second = Line(controller.address), Line(controller.address)
    assert second.ended()
    first.close()
    second.close()


# --- beats and registrations -------------------------------------------------------------------------------------


def test_session_registers_and_accepts_heartbeats(controller: Served, dial: Dial) -> None:
    session = dial()
    registered = session.register()
    assert (registered.protocol, registered.controller, registered.keep_open) == (1, "test", True)
    assert not session.beat(findings=()).resend
    assert not session.beat().resend
    assert controller.controller.loop.state.nodes["n1"].state is NodeState.HEALTHY
    assert controller.controller.outbox.connected_count() == 1
    assert controller.controller.metrics.heartbeats == 2


def test_session_of_unregistered_node_is_refused_and_counted(controller: Served, dial: Dial) -> None:
    session = dial()
    session.say(FrameKind.HEARTBEAT, {"incarnation": 1, "seq": 1, "sent_at": 0.0})
    refused = session.answer(FrameRefused)
    assert (refused.frame_kind, refused.code) == (FrameKind.HEARTBEAT, "not_found")
    counted = {"route": "session", "code": "not_found"}
    registry = controller.controller.metrics.registry
    assert registry.get_sample_value("everstep_controller_requests_failed_total", counted) == 1.0
    assert session.register().protocol == 1


def test_session_continues_after_stale_incarnation_is_refused(dial: Dial) -> None:
    ready(dial, incarnation=2).close()
    session = dial(incarnation=1)
    session.say(FrameKind.HEARTBEAT, {"incarnation": 1, "seq": 1, "sent_at": 0.0})
    assert session.answer(FrameRefused).code == "stale"
    session.incarnation = 2
    assert not session.beat().resend


def test_session_answers_heartbeat_after_pipelined_registration(dial: Dial) -> None:
    session = dial()
    beat = encode_frame(FrameKind.HEARTBEAT, b'{"incarnation":1,"seq":1,"sent_at":0.0,"findings":[]}')
    session.send(encode_frame(FrameKind.REGISTER, msgspec.json.encode(registration("n1", 1))) + beat)
    assert session.answer(Registered).protocol == 1
    assert not session.answer(HeartbeatAnswer).resend


def test_session_serves_one_incarnation_only(dial: Dial) -> None:
    session = ready(dial)
    session.incarnation = 2
    session.say(
        FrameKind.REGISTER, {"protocols": [1], "node": "n1", "incarnation": 2, "agent_version": "x", "vault": "a:1"}
    )
    assert session.answer(FrameRefused).code == "stale"


def test_session_refuses_registration_of_another_node(dial: Dial) -> None:
    session = dial()
    session.say(
        FrameKind.REGISTER, {"protocols": [1], "node": "n2", "incarnation": 1, "agent_version": "x", "vault": "a:1"}
    )
    assert session.answer(FrameRefused).code == "malformed"


def test_session_heartbeat_updates_progress_without_commit(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    session.report(joined("j", 1.0))
    session.directive(NewGeneration)
    before = controller.controller.metrics.registry.get_sample_value("everstep_controller_commit_seconds_count")
    session.beat(ranks=(RankProgress(job="j", generation=1, rank=0, step=41, step_s=0.5),))
    assert controller.controller.loop.state.job_runtime["j"].progress.furthest_step == 41
    after = controller.controller.metrics.registry.get_sample_value("everstep_controller_commit_seconds_count")
    assert before == after


def test_session_with_revoked_credential_receives_no_push(
    controller: Served, dial: Dial, monkeypatch: pytest.MonkeyPatch
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


def test_session_answers_heartbeats_in_order(dial: Dial) -> None:
    session = dial()
    session.register()
    for seq, findings in ((1, []), (2, None), (3, [])):
        beat = {"incarnation": 1, "seq": seq, "sent_at": 0.0} | ({} if findings is None else {"findings": findings})
        session.say(FrameKind.HEARTBEAT, beat)
    answers = [session.answer(HeartbeatAnswer) for _ in range(3)]
    assert [answer.resend for answer in answers] == [False, False, False]


def test_session_accepts_quiet_heartbeat_without_answer(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    session.report(joined("j", 1.0))
    session.directive(NewGeneration)
    before = controller.controller.metrics.heartbeats
    session.quiet_beat(ranks=(RankProgress(job="j", generation=1, rank=0, step=7, step_s=0.5),))
    assert not session.beat().resend
    assert controller.controller.metrics.heartbeats == before + 2
    assert controller.controller.loop.state.job_runtime["j"].progress.furthest_step == 7


def test_session_refuses_quiet_heartbeat_of_unknown_node(dial: Dial) -> None:
    session = dial()
    session.quiet_beat()
    refused = session.answer(FrameRefused)
    assert (refused.frame_kind, refused.code) == (FrameKind.ONE_WAY_HEARTBEAT, "not_found")
    session.register()
    session.close()
    following = dial()
    following.quiet_beat()
    assert not following.beat(findings=()).resend


def test_session_quiet_heartbeat_triggers_pending_push(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    session.report(joined("j", 1.0))
    session.close()
    following = dial()
    following.quiet_beat(findings=())
    assert following.directive(NewGeneration).spec.job == "j"
    following.quiet_beat(findings=())
    following.quiet_beat()
    assert not following.beat().resend


def test_session_pushes_after_upgrade_answer(controller: Served, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep_controller.runtime.push.DEFLATE_MIN_BYTES", 1)
    session = ready(dial)
    session.report(joined("j", 1.0))
    line = Line(controller.address)
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
        session.say(FrameKind.HEARTBEAT, {"incarnation": 1, "seq": seq, "sent_at": 0.0, "findings": []})
    for _ in range(3 * sessions.MAX_PARKED):
        assert not session.answer(HeartbeatAnswer).resend


# --- reports and directives --------------------------------------------------------------------------------------


def test_session_answers_reports_when_durable(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    assert session.report(joined("j", 1.0), joined("k", 1.0)).through == 2
    loaded = controller.run(controller.controller.store.take_over())
    assert set(loaded.jobs) == {"j", "k"}
    assert loaded.acknowledged_reports == {("n1", 1): 2}


def test_session_answers_reports_in_order(dial: Dial) -> None:
    session = ready(dial)
    for number in range(5):
        session.say_reports(joined(f"j{number}", 1.0))
    assert [session.answer(ReportsAnswer).through for _ in range(5)] == [1, 2, 3, 4, 5]


def test_session_repeats_directive_until_acknowledged(controller: Served, dial: Dial) -> None:
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


def test_session_pushes_backlog_after_registration(dial: Dial) -> None:
    session = ready(dial)
    session.report(joined("j", 1.0))
    session.directive(NewGeneration)
    session.close()
    again = dial()
    again.register()
    assert again.directive(NewGeneration).spec.number == 1


def test_session_heartbeat_acknowledges_directives(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    session.report(joined("j", 1.0))
    session.directive(NewGeneration)
    newest = controller.controller.outbox.next_seq("n1") - 1
    session.beat(directives_through=newest)
    assert controller.controller.outbox.pending_count("n1") == 0


def test_session_deflates_large_generation_once_for_all_nodes(
    controller: Served, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep_controller.runtime.push.DEFLATE_MIN_BYTES", 64)
    pair = [ready(dial, node) for node in ("n1", "n2")]
    for session in pair:
        session.report(joined("j", 1.0, nodes=2))
    for session in pair:
        assert [m.node for m in session.directive(NewGeneration).spec.roster] == ["n1", "n2"]
    (first,), (second,) = (controller.controller.outbox.pending(node) for node in ("n1", "n2"))
    assert first.body is second.body


# --- ends --------------------------------------------------------------------------------------------------------


def test_session_end_is_reported_to_the_core(controller: Served, dial: Dial) -> None:
    ready(dial).close()
    controller.until(lambda: live(controller).disconnected_at is not None)
    assert controller.controller.outbox.connected_count() == 0


def test_second_session_replaces_first_without_disconnect(controller: Served, dial: Dial) -> None:
    first, second = ready(dial), dial()
    assert not second.beat().resend
    assert first.ended()
    second.report(joined("j", 1.0))
    assert second.directive(NewGeneration).spec.number == 1
    assert live(controller).disconnected_at is None
    assert controller.controller.outbox.connected_count() == 1


def test_server_stop_closes_sessions_without_disconnect(controller: Served, dial: Dial) -> None:
    known, silent = ready(dial), dial("n2")
    controller.hang_up()
    assert known.ended()
    assert silent.ended()
    assert not controller.controller.outbox.has_receiver("n1")
    assert live(controller).disconnected_at is None


def test_new_incarnation_ends_previous_session(dial: Dial) -> None:
    first, second = ready(dial), dial(incarnation=2)
    assert second.register().protocol == 1
    assert first.ended()


def test_session_without_heartbeat_reports_no_disconnect(controller: Served, dial: Dial) -> None:
    ready(dial)
    stranger = dial()
    stranger.report(joined("j", 1.0))
    stranger.close()
    controller.until(lambda: controller.descriptors.open == 1)
    assert live(controller).disconnected_at is None


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


# --- frames that do not come -------------------------------------------------------------------------------------

A_MEGABYTE = (1 << 20).to_bytes(4, "big") + bytes((FrameKind.HEARTBEAT,))


def last_look(controller: Served, node: str = "n1") -> None:
    """As if a minute had passed in which no frame came."""

    def look() -> None:
        (session,) = controller.descriptors._of_node[node]
        session._check_owed_frame(session._frames, sessions.OWED_LOOKS)

    controller.on_loop(look)


@pytest.mark.parametrize("more", [b"", b"\0", A_MEGABYTE], ids=["silent", "a byte", "a head"])
def test_session_without_a_first_frame_is_closed(
    controller: Served, dial: Dial, monkeypatch: pytest.MonkeyPatch, more: bytes
) -> None:
    monkeypatch.setattr(sessions, "LOOK_S", 0.02)
    session = dial()
    session.send(more)
    refused = session.answer(FrameRefused)
    assert (refused.frame_kind, refused.code) == (0, "unavailable")
    assert "no whole frame came within" in refused.message
    assert session.ended()
    controller.until(lambda: not controller.descriptors.open)


def test_unfinished_frame_ends_session_without_disconnect(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    session.send(A_MEGABYTE + b" " * 1000)
    controller.until(lambda: controller.descriptors._of_node["n1"][0]._buffer is not None)
    last_look(controller)
    assert session.answer(FrameRefused).frame_kind == 0
    assert session.ended()
    controller.until(lambda: not controller.descriptors.open)
    assert not controller.controller.outbox.has_receiver("n1")
    assert live(controller).disconnected_at is None
    assert not dial().beat().resend


def test_session_between_heartbeats_is_not_silent(controller: Served, dial: Dial) -> None:
    quiet = ready(dial)
    last_look(controller)
    assert quiet.beat().keep_open


def test_session_that_waits_for_its_answer_is_not_silent(
    controller: Served, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A registration takes as long as the database."""
    late: asyncio.Future[int] = controller.on_loop(asyncio.Future)
    monkeypatch.setattr(controller.controller.agent_service, "register", lambda node, register: late)
    session = dial()
    session.say(FrameKind.REGISTER, registration("n1"))
    controller.until(lambda: controller.descriptors._of_node["n1"][0]._beats_busy)
    last_look(controller)
    controller.on_loop(lambda: late.set_result(1))
    assert session.answer(Registered).next_directive == 1


# --- many sessions of one node -----------------------------------------------------------------------------------


def test_sessions_of_one_node_are_bounded(controller: Served, dial: Dial) -> None:
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


def test_newest_session_wins_after_many_broken_ones(controller: Served, dial: Dial) -> None:
    """As after a network fault, in which the controller saw no connection end."""
    ready(dial)
    for _ in range(2 * MAX_SESSIONS_OF_NODE):
        dial()
    newest = dial()
    assert not newest.beat().resend
    newest.report(joined("j", 1.0))
    assert newest.directive(NewGeneration).spec.number == 1
    assert live(controller).disconnected_at is None


def test_many_nodes_may_connect_at_once(controller: Served, dial: Dial) -> None:
    fleet = [dial(f"n{number}") for number in range(40)]
    for session in fleet:
        session.register()
    assert controller.descriptors.open == 40


def shrink_buffers(controller: Served, session: AgentSession) -> None:
    """Make both ends hold little, or the kernel takes megabytes before the controller sees that nobody reads."""
    session.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

    def shrink() -> None:
        receiver: Any = controller.controller.outbox._receivers[session.node]
        connection: socket.socket = receiver._transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)

    controller.on_loop(shrink)


def test_session_with_unread_pushes_is_cut_and_counted(
    controller: Served, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_UNREAD_BYTES", 1 << 16)
    monkeypatch.setattr("everstep_controller.runtime.push.DEFLATE_MIN_BYTES", 1 << 30)
    session = ready(dial)
    shrink_buffers(controller, session)
    session.report(joined("j", 1.0))
    outbox, metrics = controller.controller.outbox, controller.controller.metrics

    def push() -> bool:
        (one,) = outbox.pending("n1")[:1]
        receiver = outbox._receivers.get("n1")
        if receiver is not None:
            receiver.push([one] * 1000)
        return metrics.registry.get_sample_value("everstep_controller_agent_sessions_cut_total") == 1.0

    controller.until(push)
    controller.until(lambda: not outbox.has_receiver("n1"))


def test_session_with_unread_refusals_is_cut_and_counted(
    controller: Served, dial: Dial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frame of six bytes is refused with two hundred."""
    monkeypatch.setattr(sessions, "MAX_UNREAD_BYTES", 1 << 16)
    session, metrics = ready(dial), controller.controller.metrics
    shrink_buffers(controller, session)
    session.sock.setblocking(False)  # the controller's loop runs below, and must read what is sent

    unsent = bytearray()

    def talk() -> bool:
        unsent.extend(b"" if unsent else encode_frame(FrameKind.HEARTBEAT, b"{") * 1000)
        with suppress(OSError):
            del unsent[: session.sock.send(unsent)]
        return metrics.registry.get_sample_value("everstep_controller_agent_sessions_cut_total") == 1.0

    controller.until(talk)


def test_stalled_session_is_cut_after_timeout(controller: Served, dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "STALLED_S", 0.05)
    session = ready(dial)
    session.report(joined("j", 1.0))
    outbox, metrics = controller.controller.outbox, controller.controller.metrics
    pending = controller.on_loop(lambda: outbox.pending("n1"))
    controller.on_loop(lambda: outbox._receivers["n1"].push(list(pending) * 20_000))
    controller.until(lambda: metrics.registry.get_sample_value("everstep_controller_agent_sessions_cut_total") == 1.0)


# --- few file descriptors ----------------------------------------------------------------------------------------


def scarce(controller: Served, *, exhausted: bool = False) -> None:
    """As if the process had hardly a file descriptor, or none, to spare."""
    controller.descriptors.scarce_from = controller.descriptors.crowded_from = 0
    controller.descriptors.exhausted_from = 0 if exhausted else 1000


def test_scarce_descriptors_release_session_on_quiet_heartbeat(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    scarce(controller)
    session.quiet_beat()
    assert session.next_frame() == (FrameKind.GO_AWAY, None)
    session.quiet_beat()
    assert not session.beat().keep_open


def test_scarce_descriptors_release_idle_session_without_loss(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    scarce(controller)
    assert not session.beat().keep_open
    session.close()
    controller.until(lambda: not controller.controller.outbox.has_receiver("n1"))
    assert live(controller).disconnected_at is None
    assert not dial().beat().keep_open


def test_scarce_descriptors_keep_session_of_waiting_job(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    session.report(joined("j", 1.0))
    scarce(controller)
    assert session.beat().keep_open
    scarce(controller, exhausted=True)
    assert not session.beat().keep_open


def test_scarce_descriptors_release_idle_session_on_connect(controller: Served, dial: Dial) -> None:
    idle = ready(dial)
    scarce(controller)
    with closing(Line(controller.address)):
        assert idle.next_frame() == (FrameKind.GO_AWAY, None)
        controller.until(lambda: not controller.descriptors._sessions)  # who was asked once is not asked again
    idle.close()
    controller.until(lambda: not controller.controller.outbox.has_receiver("n1"))
    assert live(controller).disconnected_at is None


def test_steady_fleet_keeps_sessions_with_scarce_descriptors(controller: Served, dial: Dial) -> None:
    idle = ready(dial)
    scarce(controller)
    controller.descriptors.crowded_from = 1000
    with closing(Line(controller.address)) as other:
        other.send(upgrade("n2", bearer(TokenRole.AGENT, "n2")))
        assert other.head()[0] == 101
        assert not idle.beat().keep_open  # no other frame came before its answer


def test_scarce_descriptors_close_surplus_sessions_first(controller: Served, dial: Dial) -> None:
    idle = ready(dial)
    silent = [dial("n2") for _ in range(USUAL_SESSIONS_OF_NODE + 2)]
    scarce(controller)
    with closing(Line(controller.address)):
        for session in silent[:2]:
            assert session.answer(FrameRefused).code == "rate_limited"
        assert not idle.beat().keep_open  # no other frame came before its answer
        assert not any(session.broken() for session in silent[2:])


@pytest.mark.slow
def test_scarce_descriptors_keep_sessions_with_pending_work(controller: Served, dial: Dial) -> None:
    wanted = ready(dial)
    wanted.report(joined("j", 1.0))
    wanted.next_frame()  # the generation
    scarce(controller)
    with closing(Line(controller.address)) as other:
        other.send(upgrade("n2", bearer(TokenRole.AGENT, "n2")))
        assert other.head()[0] == 101
        with closing(Line(controller.address)):
            assert wanted.beat().keep_open  # no other frame came before its answer


def test_ended_session_is_removed_from_descriptor_candidates(controller: Served, dial: Dial) -> None:
    ready(dial).close()
    controller.until(lambda: not controller.controller.outbox.has_receiver("n1"))
    controller.until(lambda: not controller.descriptors._sessions)


def test_directives_wait_for_heartbeat_of_released_agent(controller: Served, dial: Dial) -> None:
    session = ready(dial)
    scarce(controller)
    assert not session.beat().keep_open
    session.close()
    controller.until(lambda: not controller.controller.outbox.has_receiver("n1"))
    urgent = dial()
    assert urgent.report(joined("j", 1.0)).through == 1
    urgent.close()
    (directive,) = dial().beat().directives
    assert isinstance(directive.body, NewGeneration)


# --- logs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [sessions.AgentSession, sessions.ConnectionRouter])
def test_protocol_shows_nothing_of_the_controller(protocol: type[asyncio.Protocol]) -> None:
    """Event loops log a protocol that fails by its repr, and these two hold the fleet's state and the settings."""
    assert protocol.__repr__ is object.__repr__
