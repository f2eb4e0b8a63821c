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


class Talk:
    """A session, the agent behind it, and its messages."""

    def __init__(self, *, elsewhere: bool = False, uniform: float = 0.5, words: UplinkState | None = None) -> None:
        self.clock = ManualClock()
        spool = Spool(None, max_reports=5000, max_bytes=8 << 20, batch_window_s=0.02)
        self.words = words or UplinkState(heartbeat_protocol=HeartbeatProtocol("n1", 7, "0.1.0"), spool=spool)
        self.directives: list[Directive] = []
        self.registrations = 0
        self.vault = "127.0.0.1:1"
        self.gauges: tuple[GpuGauges, ...] = ()
        self._said: list[tuple[FrameKind, bytes]] = []
        self.session = ControllerSession(
            self.words,
            self,
            self.clock,
            lambda kind, body: self._said.append((kind, body)),
            url="http://c:1",
            uniform=lambda: uniform,
            spread_beat=True,
            answer_timeout_s=PATIENCE_S,
            has_other_controllers=elsewhere,
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

    def says(self) -> list[Any]:
        """Return the new messages."""
        self.session.send_due()
        said, self._said = self._said, []
        self.kinds = [kind for kind, _ in said]
        return [msgspec.json.decode(body, type=KINDS[kind]) for kind, body in said]

    def hears(self, kind: FrameKind, message: Any) -> list[Any]:
        self.session.handle_frame(kind, msgspec.json.encode(message))
        return self.says()

    def wait(self) -> float:
        """Seconds until it wants to speak."""
        return self.session.send_due() - self.clock.monotonic()

    def report(self, rank: int) -> None:
        self.words.spool.add(lost(rank), self.clock.monotonic())

    def registered(self, **changes: Any) -> None:
        (register,) = self.says()
        assert isinstance(register, Register)
        fields = {"protocol": 1, "heartbeat_interval_s": 1.0, "next_directive": 1, "controller": "c", "server_at": 0.0}
        self.hears(FrameKind.REGISTERED, Registered(**{**fields, **changes}))

    def answered(self, **changes: Any) -> list[Any]:
        return self.hears(FrameKind.HEARTBEAT_ANSWER, HeartbeatAnswer(server_at=0.0, **changes))

    def refused(self, of: FrameKind, code: str, after_s: float | None = None) -> list[Any]:
        return self.hears(
            FrameKind.REFUSED, FrameRefused(frame_kind=of, code=code, message="no", retry_after_s=after_s)
        )

    def asks(self) -> Heartbeat:
        """The next beat that wants an answer."""
        beat = self.beat()
        while FrameKind.HEARTBEAT not in self.kinds:
            beat = self.beat()
        return beat

    def beat(self) -> Heartbeat:
        """The next beat, when it is due."""
        self.clock.advance(max(0.0, self.session.next_beat_at - self.clock.monotonic()))
        (beat,) = (message for message in self.says() if isinstance(message, Heartbeat))
        assert isinstance(beat, Heartbeat)
        return beat


@pytest.fixture
def talk() -> Talk:
    made = Talk()
    made.registered()
    return made


def numbers(message: Any) -> list[int]:
    assert isinstance(message, Reports), message
    return [report.number for report in message.reports]


def test_reports_follow_the_registration_at_once() -> None:
    talk = Talk()
    talk.report(0)
    (register,) = talk.says()
    assert isinstance(register, Register)
    sent = talk.hears(
        FrameKind.REGISTERED,
        Registered(protocol=1, heartbeat_interval_s=1.0, next_directive=1, controller="c", server_at=0.0),
    )
    assert [numbers(message) for message in sent] == [[1]]
    assert talk.registrations == 1


def test_registered_agent_opens_with_a_beat_and_urgent_reports(talk: Talk) -> None:
    talk.report(0)
    following = Talk(words=talk.words)
    beat, reports = following.says()
    assert isinstance(beat, Heartbeat)
    assert numbers(reports) == [1]


def test_reports_wait_while_a_node_change_is_registered(
    talk: Talk,
) -> None:
    found = LeadershipProof(epoch=9, proof="p")
    talk.vault, talk.session.succession = "127.0.0.1:2", found
    talk.session.next_beat_at = talk.clock.monotonic()
    talk.report(0)
    (register,) = talk.says()
    assert isinstance(register, Register)
    again = Registered(protocol=1, heartbeat_interval_s=1.0, next_directive=5, controller="c", server_at=0.0)
    assert [numbers(message) for message in talk.hears(FrameKind.REGISTERED, again)] == [[1]]
    beat = talk.beat()
    assert (beat.leadership_proof, beat.directives_through) == (found, 4)
    assert talk.beat().leadership_proof is None


def test_first_beats_of_a_fleet_are_spread_over_the_interval() -> None:
    for uniform in (0.125, 0.25, 0.75):
        talk = Talk(uniform=uniform)
        talk.registered()
        assert talk.session.next_beat_at - talk.clock.monotonic() == pytest.approx(uniform)


def test_beats_are_sent_on_time_without_answers(talk: Talk) -> None:
    assert [talk.beat().seq for _ in range(3)] == [1, 2, 3]
    assert talk.wait() == pytest.approx(1.0)


def test_controller_owing_an_answer_too_long_is_given_up(talk: Talk) -> None:
    talk.asks()
    for _ in range(4):
        talk.beat()
    talk.clock.advance(PATIENCE_S - 4.0)
    with pytest.raises(AnswerTimeout, match="no answer within 5 s"):
        talk.session.send_due()


def test_uneventful_beats_ask_for_an_answer_only_periodically() -> None:
    talk = Talk(uniform=0.25)
    talk.registered()
    kinds = []
    for _ in range(12):
        talk.beat()
        (kind,) = talk.kinds
        kinds.append(kind)
        if kind is FrameKind.HEARTBEAT:
            talk.answered()
    every = round(ANSWER_INTERVAL_S)
    asked = [place for place, kind in enumerate(kinds) if kind is FrameKind.HEARTBEAT]
    assert asked == [0, *range(1, 12, every)]
    assert talk.words.outcomes["heartbeat", "quiet"] == 12 - len(asked)


def test_beats_ask_while_reports_wait_or_session_is_not_held(talk: Talk) -> None:
    for _ in range(3):
        talk.beat()
        assert talk.kinds == [FrameKind.HEARTBEAT]
    for _ in range(3):
        talk.answered()
    talk.report(0)
    talk.says()
    talk.beat()
    assert talk.kinds == [FrameKind.HEARTBEAT]
    talk.answered()
    talk.hears(FrameKind.REPORTS_ANSWER, ReportsAnswer(through=1))
    talk.beat()
    assert talk.kinds == [FrameKind.ONE_WAY_HEARTBEAT]
    talk.session.handle_frame(FrameKind.GO_AWAY, b"")
    talk.beat()
    assert talk.kinds == [FrameKind.HEARTBEAT]


def test_beat_after_a_refused_quiet_beat_asks_for_an_answer(talk: Talk) -> None:
    talk.beat()
    talk.answered()
    talk.beat()
    assert talk.kinds == [FrameKind.ONE_WAY_HEARTBEAT]
    assert talk.refused(FrameKind.ONE_WAY_HEARTBEAT, "unavailable", 0.5) == []
    assert talk.wait() == pytest.approx(0.5)
    talk.beat()
    assert talk.kinds == [FrameKind.HEARTBEAT]
    talk.answered()
    talk.beat()
    assert talk.kinds == [FrameKind.ONE_WAY_HEARTBEAT]
    (register,) = talk.refused(FrameKind.ONE_WAY_HEARTBEAT, "not_found")
    assert isinstance(register, Register)


@pytest.mark.parametrize(("code", "waits_s"), [("unavailable", MIN_RETRY_S), ("rate_limited", 1.0)])
def test_urgent_report_shortens_retry_after_by_refusal_code(talk: Talk, code: str, waits_s: float) -> None:
    talk.report(0)
    talk.says()
    talk.refused(FrameKind.REPORTS, code, 60.0)
    talk.report(1)
    assert talk.says() == []
    talk.clock.advance(waits_s)
    assert [numbers(message) for message in talk.says() if isinstance(message, Reports)] == [[1, 2]]


def test_refusal_crossing_a_registration_causes_no_second(talk: Talk) -> None:
    talk.report(0)
    talk.says()
    talk.beat()
    (register,) = talk.refused(FrameKind.HEARTBEAT, "not_found")
    assert isinstance(register, Register)
    talk.hears(
        FrameKind.REGISTERED,
        Registered(protocol=1, heartbeat_interval_s=1.0, next_directive=1, controller="c", server_at=0.0),
    )
    assert [numbers(message) for message in talk.refused(FrameKind.REPORTS, "not_found")] == [[1]]
    assert talk.registrations == 2


@pytest.mark.parametrize("elsewhere", [True, False])
def test_controller_refusing_several_beats_is_left_for_others(elsewhere: bool) -> None:
    talk = Talk(elsewhere=elsewhere)
    talk.registered()
    first = talk.asks().seq
    talk.refused(FrameKind.HEARTBEAT, "unavailable")
    for number in range(1, MAX_REFUSED_BEATS):
        assert (talk.beat().seq, talk.kinds) == (first + number, [FrameKind.HEARTBEAT])
        if number < MAX_REFUSED_BEATS - 1:
            talk.refused(FrameKind.HEARTBEAT, "unavailable")
    if elsewhere:
        with pytest.raises(Unavailable):
            talk.refused(FrameKind.HEARTBEAT, "unavailable")
    else:
        talk.refused(FrameKind.HEARTBEAT, "unavailable")
        assert talk.beat().seq == first + MAX_REFUSED_BEATS


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
    talk: Talk, of: FrameKind, code: str, kind: type[EverstepError]
) -> None:
    talk.asks()
    with pytest.raises(kind):
        talk.refused(of, code)


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
def test_malformed_frame_ends_the_session(talk: Talk, kind: int, body: bytes) -> None:
    with pytest.raises(ProtocolError):
        talk.session.handle_frame(kind, body)
    assert talk.words.outcomes["session", "protocol_error"] == 1


def test_oversized_deflated_push_is_refused(talk: Talk) -> None:
    import zlib

    bomb = (7).to_bytes(8, "big") + zlib.compress(b" " * (17 << 20))
    with pytest.raises(ProtocolError, match="more than 16777216 bytes"):
        talk.session.handle_frame(FrameKind.DEFLATED_PUSH, bomb)


@pytest.mark.promise("stale-findings")
@pytest.mark.parametrize("refused", [False, True])
def test_outdated_finding_of_an_earlier_agent_is_corrected(tmp_path: Path, refused: bool) -> None:
    file = tmp_path / "spool"
    earlier = Spool(file, max_reports=64, max_bytes=1 << 20, batch_window_s=0.02)
    earlier.add(FindingRaised(finding=xid()), 0.0)
    earlier.close()
    spool = Spool(file, max_reports=64, max_bytes=1 << 20, batch_window_s=0.02)
    talk = Talk(words=UplinkState(heartbeat_protocol=HeartbeatProtocol("n1", 8, "0.1.0"), spool=spool))
    talk.registered()
    assert talk.asks().findings is None
    if refused:
        talk.refused(FrameKind.REPORTS, "unavailable")  # it decides all the same
    else:
        talk.hears(FrameKind.REPORTS_ANSWER, ReportsAnswer(through=1))
    spool.close()
    assert talk.beat().findings == ()


def gauged(talk: Talk, count: int) -> list[tuple[Heartbeat, FrameKind]]:
    """Return the next heartbeats that carry gauges, and their kinds; every question is answered."""
    found = []
    for _ in range(count):
        beat, kind = talk.beat(), talk.kinds[0]
        if kind is FrameKind.HEARTBEAT:
            talk.answered()
        if beat.gpu_gauges:
            found.append((beat, kind))
    return found


def test_gauges_go_with_few_beats_and_ask_for_nothing(talk: Talk) -> None:
    talk.gauges = (GpuGauges(index=0, temperature_c=60),)
    ((beat, _),) = gauged(talk, 30)
    assert (beat.gpu_gauges, beat.findings) == (talk.gauges, None)
    talk.gauges = (GpuGauges(index=0, temperature_c=90),)
    assert [heartbeat.gpu_gauges for heartbeat, _ in gauged(talk, 30)] == [talk.gauges]


def test_gauges_are_sent_again_after_resend(talk: Talk) -> None:
    talk.gauges = (GpuGauges(index=0, temperature_c=60),)
    assert len(gauged(talk, 30)) == 1
    talk.asks()
    talk.answered(resend=True)
    talk.answered()
    assert len(gauged(talk, 12)) == 1
