"""Messages of a session and their times, on a manual clock: frames in, frames out."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.clock import ManualClock
from everstep.errors import EverstepError, PermissionDenied, ProtocolError, Unavailable
from everstep.vocabulary import Finding
from everstep.wire.v1.agent import (
    ANSWER_INTERVAL_S,
    Acknowledge,
    FrameKind,
    FrameRefused,
    GpuGauges,
    Heartbeat,
    HeartbeatAnswer,
    LeadershipProof,
    Register,
    Registered,
    Reports,
    ReportsAnswer,
)
from everstep.wire.v1.directives import Directive
from everstep.wire.v1.training import FindingRaised, RankProgress
from everstep_agent.uplink.connection import AnswerTimeout
from everstep_agent.uplink.heartbeat import HeartbeatProtocol, NodeDescription
from everstep_agent.uplink.session import MAX_REFUSED_BEATS, MIN_RETRY_S, ControllerSession, UplinkState
from everstep_agent.uplink.spool import Spool
from tests.support.agents.uplinks import lost
from tests.support.fleet.findings import xid

KINDS: dict[FrameKind, Any] = {
    FrameKind.REGISTER: Register,
    FrameKind.HEARTBEAT: Heartbeat,
    FrameKind.ONE_WAY_HEARTBEAT: Heartbeat,
    FrameKind.REPORTS: Reports,
    FrameKind.ACKNOWLEDGE: Acknowledge,
}
PATIENCE_S = 5.0


class Agent:
    """An agent's session on a manual clock, and its messages."""

    def __init__(self, *, has_others: bool = False, uniform: float = 0.5, state: UplinkState | None = None) -> None:
        self.clock = ManualClock()
        spool = Spool(None, max_reports=5000, max_bytes=8 << 20, batch_window_s=0.02)
        self.state = state or UplinkState(heartbeat_protocol=HeartbeatProtocol("n1", 7, "0.1.0"), spool=spool)
        self.directives: list[Directive] = []
        self.registrations = 0
        self.vault = "127.0.0.1:1"
        self.gauges: tuple[GpuGauges, ...] = ()
        self._frames: list[tuple[FrameKind, bytes]] = []
        self.session = ControllerSession(
            self.state,
            self,
            self.clock,
            lambda kind, body: self._frames.append((kind, body)),
            url="http://c:1",
            uniform=lambda: uniform,
            spread_beat=True,
            answer_timeout_s=PATIENCE_S,
            has_other_controllers=has_others,
        )

    def describe_node(self) -> NodeDescription:
        return NodeDescription(vault=self.vault)

    def findings(self) -> tuple[Finding, ...]:
        return ()

    def rank_progress(self) -> tuple[RankProgress, ...]:
        return ()

    def gpu_gauges(self) -> tuple[GpuGauges, ...]:
        return self.gauges

    def is_busy(self) -> bool:
        return True

    def on_new_controller(self, known_jobs: Collection[str]) -> None:
        self.registrations += 1

    def on_directives(self, directives: list[Directive]) -> None:
        self.directives += directives

    def on_server_time(self, server_at: float, received_at: float, round_trip_s: float) -> None:
        pass

    def take_sent(self) -> list[Any]:
        """Send what is due, and return the new messages."""
        self.session.send_due()
        frames, self._frames = self._frames, []
        self.kinds = [kind for kind, _ in frames]
        return [msgspec.json.decode(body, type=KINDS[kind]) for kind, body in frames]

    def receive(self, kind: FrameKind, message: Any) -> list[Any]:
        """Receive a message, and return what the session then sends."""
        self.session.handle_frame(kind, msgspec.json.encode(message))
        return self.take_sent()

    def wait(self) -> float:
        """Return the seconds until the session wants to send."""
        return self.session.send_due() - self.clock.monotonic()

    def report(self, rank: int) -> None:
        self.state.spool.add(lost(rank), self.clock.monotonic())

    def register(self, **changes: Any) -> None:
        (register,) = self.take_sent()
        assert isinstance(register, Register)
        fields = {"protocol": 1, "heartbeat_interval_s": 1.0, "next_directive": 1, "controller": "c", "server_at": 0.0}
        self.receive(FrameKind.REGISTERED, Registered(**{**fields, **changes}))

    def receive_answer(self, **changes: Any) -> list[Any]:
        return self.receive(FrameKind.HEARTBEAT_ANSWER, HeartbeatAnswer(server_at=0.0, **changes))

    def receive_refusal(self, of: FrameKind, code: str, after_s: float | None = None) -> list[Any]:
        return self.receive(
            FrameKind.REFUSED, FrameRefused(frame_kind=of, code=code, message="no", retry_after_s=after_s)
        )

    def next_asking_beat(self) -> Heartbeat:
        """Return the next beat that wants an answer."""
        beat = self.next_beat()
        while FrameKind.HEARTBEAT not in self.kinds:
            beat = self.next_beat()
        return beat

    def next_beat(self) -> Heartbeat:
        """Return the next beat, at the time when it is due."""
        self.clock.advance(max(0.0, self.session.next_beat_at - self.clock.monotonic()))
        (beat,) = (message for message in self.take_sent() if isinstance(message, Heartbeat))
        assert isinstance(beat, Heartbeat)
        return beat


@pytest.fixture
def agent() -> Agent:
    made = Agent()
    made.register()
    return made


def numbers(message: Any) -> list[int]:
    assert isinstance(message, Reports), message
    return [report.number for report in message.reports]


def test_reports_follow_the_registration_at_once() -> None:
    agent = Agent()
    agent.report(0)
    (register,) = agent.take_sent()
    assert isinstance(register, Register)
    sent = agent.receive(
        FrameKind.REGISTERED,
        Registered(protocol=1, heartbeat_interval_s=1.0, next_directive=1, controller="c", server_at=0.0),
    )
    assert [numbers(message) for message in sent] == [[1]]
    assert agent.registrations == 1


def test_registered_agent_opens_with_a_beat_and_urgent_reports(agent: Agent) -> None:
    agent.report(0)
    following = Agent(state=agent.state)
    beat, reports = following.take_sent()
    assert isinstance(beat, Heartbeat)
    assert numbers(reports) == [1]


def test_reports_wait_while_a_node_change_is_registered(
    agent: Agent,
) -> None:
    found = LeadershipProof(epoch=9, proof="p")
    agent.vault, agent.session.succession = "127.0.0.1:2", found
    agent.session.next_beat_at = agent.clock.monotonic()
    agent.report(0)
    (register,) = agent.take_sent()
    assert isinstance(register, Register)
    again = Registered(protocol=1, heartbeat_interval_s=1.0, next_directive=5, controller="c", server_at=0.0)
    assert [numbers(message) for message in agent.receive(FrameKind.REGISTERED, again)] == [[1]]
    beat = agent.next_beat()
    assert (beat.leadership_proof, beat.directives_through) == (found, 4)
    assert agent.next_beat().leadership_proof is None


def test_first_beats_of_a_fleet_are_spread_over_the_interval() -> None:
    for uniform in (0.125, 0.25, 0.75):
        agent = Agent(uniform=uniform)
        agent.register()
        assert agent.session.next_beat_at - agent.clock.monotonic() == pytest.approx(uniform)


def test_beats_are_sent_on_time_without_answers(agent: Agent) -> None:
    assert [agent.next_beat().seq for _ in range(3)] == [1, 2, 3]
    assert agent.wait() == pytest.approx(1.0)


def test_controller_owing_an_answer_too_long_is_given_up(agent: Agent) -> None:
    agent.next_asking_beat()
    for _ in range(4):
        agent.next_beat()
    agent.clock.advance(PATIENCE_S - 4.0)
    with pytest.raises(AnswerTimeout, match="no answer within 5 s"):
        agent.session.send_due()


def test_uneventful_beats_ask_for_an_answer_only_periodically() -> None:
    agent = Agent(uniform=0.25)
    agent.register()
    kinds = []
    for _ in range(12):
        agent.next_beat()
        (kind,) = agent.kinds
        kinds.append(kind)
        if kind is FrameKind.HEARTBEAT:
            agent.receive_answer()
    every = round(ANSWER_INTERVAL_S)
    asked = [place for place, kind in enumerate(kinds) if kind is FrameKind.HEARTBEAT]
    assert asked == [0, *range(1, 12, every)]
    assert agent.state.outcomes["heartbeat", "quiet"] == 12 - len(asked)


def test_beats_ask_while_reports_wait_or_session_is_not_held(agent: Agent) -> None:
    for _ in range(3):
        agent.next_beat()
        assert agent.kinds == [FrameKind.HEARTBEAT]
    for _ in range(3):
        agent.receive_answer()
    agent.report(0)
    agent.take_sent()
    agent.next_beat()
    assert agent.kinds == [FrameKind.HEARTBEAT]
    agent.receive_answer()
    agent.receive(FrameKind.REPORTS_ANSWER, ReportsAnswer(through=1))
    agent.next_beat()
    assert agent.kinds == [FrameKind.ONE_WAY_HEARTBEAT]
    agent.session.handle_frame(FrameKind.GO_AWAY, b"")
    agent.next_beat()
    assert agent.kinds == [FrameKind.HEARTBEAT]


def test_beat_after_a_refused_quiet_beat_asks_for_an_answer(agent: Agent) -> None:
    agent.next_beat()
    agent.receive_answer()
    agent.next_beat()
    assert agent.kinds == [FrameKind.ONE_WAY_HEARTBEAT]
    assert agent.receive_refusal(FrameKind.ONE_WAY_HEARTBEAT, "unavailable", 0.5) == []
    assert agent.wait() == pytest.approx(0.5)
    agent.next_beat()
    assert agent.kinds == [FrameKind.HEARTBEAT]
    agent.receive_answer()
    agent.next_beat()
    assert agent.kinds == [FrameKind.ONE_WAY_HEARTBEAT]
    (register,) = agent.receive_refusal(FrameKind.ONE_WAY_HEARTBEAT, "not_found")
    assert isinstance(register, Register)


@pytest.mark.parametrize(("code", "waits_s"), [("unavailable", MIN_RETRY_S), ("rate_limited", 1.0)])
def test_urgent_report_shortens_retry_after_by_refusal_code(agent: Agent, code: str, waits_s: float) -> None:
    agent.report(0)
    agent.take_sent()
    agent.receive_refusal(FrameKind.REPORTS, code, 60.0)
    agent.report(1)
    assert agent.take_sent() == []
    agent.clock.advance(waits_s)
    assert [numbers(message) for message in agent.take_sent() if isinstance(message, Reports)] == [[1, 2]]


def test_refusal_crossing_a_registration_causes_no_second(agent: Agent) -> None:
    agent.report(0)
    agent.take_sent()
    agent.next_beat()
    (register,) = agent.receive_refusal(FrameKind.HEARTBEAT, "not_found")
    assert isinstance(register, Register)
    agent.receive(
        FrameKind.REGISTERED,
        Registered(protocol=1, heartbeat_interval_s=1.0, next_directive=1, controller="c", server_at=0.0),
    )
    assert [numbers(message) for message in agent.receive_refusal(FrameKind.REPORTS, "not_found")] == [[1]]
    assert agent.registrations == 2


@pytest.mark.parametrize("has_others", [True, False])
def test_controller_refusing_several_beats_is_left_for_others(has_others: bool) -> None:
    agent = Agent(has_others=has_others)
    agent.register()
    first = agent.next_asking_beat().seq
    agent.receive_refusal(FrameKind.HEARTBEAT, "unavailable")
    for number in range(1, MAX_REFUSED_BEATS):
        assert (agent.next_beat().seq, agent.kinds) == (first + number, [FrameKind.HEARTBEAT])
        if number < MAX_REFUSED_BEATS - 1:
            agent.receive_refusal(FrameKind.HEARTBEAT, "unavailable")
    if has_others:
        with pytest.raises(Unavailable):
            agent.receive_refusal(FrameKind.HEARTBEAT, "unavailable")
    else:
        agent.receive_refusal(FrameKind.HEARTBEAT, "unavailable")
        assert agent.next_beat().seq == first + MAX_REFUSED_BEATS


@pytest.mark.parametrize(
    ("of", "code", "kind"),
    [
        (FrameKind.HEARTBEAT, "forbidden", PermissionDenied),
        (FrameKind.ACKNOWLEDGE, "forbidden", PermissionDenied),
        (FrameKind.ONE_WAY_HEARTBEAT, "forbidden", PermissionDenied),
        (FrameKind.REGISTER, "forbidden", ProtocolError),
        (0, "malformed", ProtocolError),
    ],
)
def test_permanent_refusal_or_stray_answer_ends_the_session(
    agent: Agent, of: FrameKind, code: str, kind: type[EverstepError]
) -> None:
    agent.next_asking_beat()
    with pytest.raises(kind):
        agent.receive_refusal(of, code)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FrameKind.HEARTBEAT_ANSWER, b'{"server_at": 1'),
        (FrameKind.PUSH, b"\xff"),
        (FrameKind.DEFLATED_PUSH, b"\x00" * 20),
        (FrameKind.HEARTBEAT_ANSWER, b'{"server_at": 1.0}'),
        (FrameKind.REPORTS_ANSWER, b'{"through": 9}'),
        (FrameKind.REPORTS_ANSWER, b'{"x":' + b"[" * 100_000),
        (99, b"{}"),
    ],
)
def test_malformed_frame_ends_the_session(agent: Agent, kind: int, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        agent.session.handle_frame(kind, body)
    assert agent.state.outcomes["session", "protocol_error"] == 1


def test_oversized_deflated_push_is_refused(agent: Agent) -> None:
    import zlib

    bomb = (7).to_bytes(8, "big") + zlib.compress(b" " * (17 << 20))
    with pytest.raises(ProtocolError, match="more than 16777216 bytes"):
        agent.session.handle_frame(FrameKind.DEFLATED_PUSH, bomb)


@pytest.mark.promise("stale-findings")
@pytest.mark.parametrize("refused", [False, True])
def test_outdated_finding_of_an_earlier_agent_is_corrected(tmp_path: Path, refused: bool) -> None:
    file = tmp_path / "spool"
    earlier = Spool(file, max_reports=64, max_bytes=1 << 20, batch_window_s=0.02)
    earlier.add(FindingRaised(finding=xid()), 0.0)
    earlier.close()
    spool = Spool(file, max_reports=64, max_bytes=1 << 20, batch_window_s=0.02)
    agent = Agent(state=UplinkState(heartbeat_protocol=HeartbeatProtocol("n1", 8, "0.1.0"), spool=spool))
    agent.register()
    assert agent.next_asking_beat().findings is None
    if refused:
        agent.receive_refusal(FrameKind.REPORTS, "unavailable")  # it decides all the same
    else:
        agent.receive(FrameKind.REPORTS_ANSWER, ReportsAnswer(through=1))
    spool.close()
    assert agent.next_beat().findings == ()


def beats_with_gauges(agent: Agent, count: int) -> list[tuple[Heartbeat, FrameKind]]:
    """Return the next heartbeats that carry gauges, and their kinds, with an answer to each beat that asks for one."""
    found = []
    for _ in range(count):
        beat, kind = agent.next_beat(), agent.kinds[0]
        if kind is FrameKind.HEARTBEAT:
            agent.receive_answer()
        if beat.gpu_gauges:
            found.append((beat, kind))
    return found


def test_gauges_go_with_few_beats_and_ask_for_nothing(agent: Agent) -> None:
    agent.gauges = (GpuGauges(index=0, temperature_c=60),)
    ((beat, _),) = beats_with_gauges(agent, 30)
    assert (beat.gpu_gauges, beat.findings) == (agent.gauges, None)
    agent.gauges = (GpuGauges(index=0, temperature_c=90),)
    assert [heartbeat.gpu_gauges for heartbeat, _ in beats_with_gauges(agent, 30)] == [agent.gauges]


def test_gauges_are_sent_again_after_resend(agent: Agent) -> None:
    agent.gauges = (GpuGauges(index=0, temperature_c=60),)
    assert len(beats_with_gauges(agent, 30)) == 1
    agent.next_asking_beat()
    agent.receive_answer(resend=True)
    agent.receive_answer()
    assert len(beats_with_gauges(agent, 12)) == 1
