"""Rules for an agent's next message and for the controller's answers, as pure functions."""

from __future__ import annotations

import msgspec
import pytest

from everstep.errors import (
    AuthenticationError,
    Conflict,
    EverstepError,
    MalformedMessage,
    NotFound,
    PermissionDenied,
    ProtocolError,
    RateLimited,
    StaleGeneration,
    TooLarge,
    Unavailable,
    VersionMismatch,
)
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1.agent import (
    MAX_FINDINGS,
    FrameKind,
    FrameRefused,
    Heartbeat,
    HeartbeatAnswer,
    NumberedReport,
    Register,
    Registered,
)
from everstep.wire.v1.directives import Directive, StopJob
from everstep.wire.v1.training import FindingCleared, FindingRaised
from everstep_agent.uplink.connection import (
    MAX_RETRY_AFTER_S,
    error_from_frame,
    error_from_response,
    retry_after_s,
)
from everstep_agent.uplink.heartbeat import (
    MAX_REMEMBERED_DIRECTIVES,
    DirectiveInbox,
    HeartbeatProtocol,
    NodeDescription,
    RefusalAction,
    operator_advice,
    refusal_action,
)

FACTS = NodeDescription(vault="127.0.0.1:7702", boot_id="b1")


def a_finding(subject: str = "0000:1b:00", severity: Severity = Severity.CRITICAL) -> Finding:
    return Finding(kind=FindingKind.GPU_XID, subject=subject, severity=severity, message="XID 79", xid=79)


def answer(**changes: object) -> Registered:
    fields = {"protocol": 1, "heartbeat_interval_s": 1.0, "next_directive": 1, "controller": "c", "server_at": 0.0}
    return Registered(**{**fields, **changes})  # type: ignore[arg-type]


class Agent:
    """The heartbeat protocol of an agent, with default arguments."""

    def __init__(self) -> None:
        self.protocol = HeartbeatProtocol("n1", 7, "0.1.0")

    def next(self, *findings: Finding, facts: NodeDescription = FACTS) -> Register | Heartbeat:
        return self.protocol.next_message(facts, findings, (), 100.0)

    def register(self, *findings: Finding, facts: NodeDescription = FACTS) -> None:
        message = self.next(*findings, facts=facts)
        assert isinstance(message, Register)
        self.protocol.handle_registered(message, facts, answer())

    def beat(self, *findings: Finding) -> Heartbeat:
        message = self.next(*findings)
        assert isinstance(message, Heartbeat)
        return message


def test_first_message_is_a_registration_with_all_findings() -> None:
    message = Agent().next(a_finding())
    assert isinstance(message, Register)
    assert (message.node, message.incarnation, message.vault) == ("n1", 7, "127.0.0.1:7702")
    assert message.findings == (a_finding(),)
    assert 1 in message.protocols


def test_heartbeat_carries_findings_only_when_changed() -> None:
    agent = Agent()
    agent.register(a_finding())
    assert agent.beat(a_finding()).findings is None
    cleared = agent.beat()
    assert cleared.findings == ()
    agent.protocol.handle_heartbeat_answer(cleared, HeartbeatAnswer(server_at=0.0))
    assert agent.beat().findings is None


def test_resend_is_answered_with_all_findings() -> None:
    agent = Agent()
    agent.register(a_finding())
    agent.protocol.handle_heartbeat_answer(agent.beat(a_finding()), HeartbeatAnswer(server_at=0.0, resend=True))
    assert agent.beat(a_finding()).findings == (a_finding(),)


def test_lost_session_sends_all_findings_once_more() -> None:
    agent = Agent()
    agent.register(a_finding())
    assert agent.beat(a_finding()).findings is None
    agent.protocol.handle_session_lost()
    shown = agent.beat(a_finding())
    assert shown.findings == (a_finding(),)
    assert agent.protocol.is_reconnecting
    agent.protocol.handle_heartbeat_answer(shown, HeartbeatAnswer(server_at=0.0))
    assert agent.beat(a_finding()).findings is None
    assert not agent.protocol.is_reconnecting


@pytest.mark.parametrize(
    ("stands", "word", "told_again"),
    [
        ((), FindingRaised(finding=a_finding()), True),
        ((a_finding(),), FindingRaised(finding=a_finding()), False),
        ((a_finding(),), FindingCleared(key=a_finding().key), True),
        ((), FindingCleared(key=a_finding().key), False),
    ],
)
def test_all_findings_follow_only_an_outdated_report(
    stands: tuple[Finding, ...], word: FindingRaised | FindingCleared, told_again: bool
) -> None:
    agent = Agent()
    agent.register(*stands)
    agent.protocol.handle_reports_answer((NumberedReport(number=1, body=word),), stands)
    shown = agent.beat(*stands)
    assert shown.findings == (stands if told_again else None)
    agent.protocol.handle_heartbeat_answer(shown, HeartbeatAnswer(server_at=0.0))
    assert agent.beat(*stands).findings is None


@pytest.mark.parametrize(("asked", "taken"), [(0.0, 0.05), (-1.0, 0.05), (0.5, 0.5), (1e9, 60.0)])
def test_heartbeat_interval_of_the_controller_is_clamped(asked: float, taken: float) -> None:
    agent = Agent()
    message = agent.next()
    assert isinstance(message, Register)
    agent.protocol.handle_registered(message, FACTS, answer(heartbeat_interval_s=asked))
    assert agent.protocol.interval_s == taken


def test_unknown_protocol_is_refused() -> None:
    agent = Agent()
    message = agent.next()
    assert isinstance(message, Register)
    with pytest.raises(VersionMismatch, match="chose protocol 9"):
        agent.protocol.handle_registered(message, FACTS, answer(protocol=9))
    assert not agent.protocol.is_registered


def test_heartbeat_over_the_finding_limit_keeps_the_worst() -> None:
    mild = [a_finding(f"g{i}", Severity.INFO) for i in range(MAX_FINDINGS)]
    message = Agent().next(*mild, a_finding("last"))
    assert isinstance(message, Register)
    assert len(message.findings) == MAX_FINDINGS
    assert message.findings[0].subject == "last"


def test_heartbeat_over_the_finding_limit_counts_the_missing() -> None:
    graves = [a_finding(f"g{i}") for i in range(MAX_FINDINGS + 10)]
    message = Agent().next(*graves)
    assert isinstance(message, Register)
    *kept, overflow = message.findings
    assert kept == graves[: MAX_FINDINGS - 1]
    assert (overflow.kind, overflow.subject, overflow.value) == (FindingKind.AGENT_SPOOL_OVERFLOW, "findings", 11.0)
    assert "11 mildest of 266 findings" in overflow.message
    assert msgspec.json.decode(msgspec.json.encode(message), type=Register) == message


@pytest.mark.parametrize(
    ("error", "meaning", "at_registration"),
    [
        (NotFound("who?"), RefusalAction.REGISTER, RefusalAction.NEEDS_OPERATOR),
        (StaleGeneration("old life"), RefusalAction.REGISTER, RefusalAction.NEEDS_OPERATOR),
        (Unavailable("away"), RefusalAction.RETRY, RefusalAction.RETRY),
        (ProtocolError("what?"), RefusalAction.RETRY, RefusalAction.RETRY),
        (AuthenticationError("token"), RefusalAction.NEEDS_OPERATOR, RefusalAction.NEEDS_OPERATOR),
        (PermissionDenied("not yours"), RefusalAction.NEEDS_OPERATOR, RefusalAction.NEEDS_OPERATOR),
        (VersionMismatch("9"), RefusalAction.NEEDS_OPERATOR, RefusalAction.NEEDS_OPERATOR),
        (MalformedMessage("shape"), RefusalAction.DROP_MESSAGE, RefusalAction.NEEDS_OPERATOR),
        (TooLarge("2 MiB"), RefusalAction.DROP_MESSAGE, RefusalAction.NEEDS_OPERATOR),
    ],
)
def test_each_refusal_maps_to_an_action_and_advice(
    error: EverstepError, meaning: RefusalAction, at_registration: RefusalAction
) -> None:
    assert refusal_action(error, is_registering=False) is meaning
    assert refusal_action(error, is_registering=True) is at_registration
    assert operator_advice(error, "n1")


def stop(job: str) -> StopJob:
    return StopJob(job=job, ok=True, reason="done")


def test_repeated_directive_is_handed_on_once() -> None:
    inbox = DirectiveInbox()
    directive = Directive(seq=3, body=stop("a"))
    assert inbox.filter_new([directive]) == [directive]
    assert inbox.filter_new([directive]) == []
    assert inbox.received_through == 3


def test_reused_directive_number_is_remembered_with_new_body() -> None:
    inbox = DirectiveInbox()
    inbox.filter_new(Directive(seq=seq, body=stop("a")) for seq in range(1, MAX_REMEMBERED_DIRECTIVES + 1))
    inbox.start_at(1)
    again = Directive(seq=1, body=stop("b"))
    assert inbox.filter_new([again, Directive(seq=MAX_REMEMBERED_DIRECTIVES + 1, body=stop("a"))])[0] == again
    assert inbox.filter_new([again]) == []


URL = "http://c:1"
PROBLEM = b'{"type":"urn:everstep:error:conflict","title":"Conflict","status":409,"code":"conflict","detail":"why"}'


def test_refusal_is_parsed() -> None:
    error = error_from_response(409, PROBLEM, "", URL)
    assert isinstance(error, Conflict)
    assert str(error) == "http://c:1: why (409)"


@pytest.mark.parametrize("body", [b"", b"<html>", b"\xff\xfe", b"[]", b'{"code":7}', b'{"x":' + b"[" * 100_000])
@pytest.mark.parametrize(
    ("status", "kind"), [(401, AuthenticationError), (404, NotFound), (409, StaleGeneration), (400, ProtocolError)]
)
def test_unknown_refusal_body_is_classified_by_status(body: bytes, status: int, kind: type[EverstepError]) -> None:
    assert type(error_from_response(status, body, "", URL)) is kind


def test_frame_refusal_is_classified_by_its_code() -> None:
    limited = error_from_frame(
        FrameRefused(frame_kind=FrameKind.REPORTS, code="rate_limited", message="slower", retry_after_s=1e9), URL
    )
    assert isinstance(limited, RateLimited)
    assert retry_after_s(limited, is_busy=False) == MAX_RETRY_AFTER_S
    assert type(error_from_frame(FrameRefused(frame_kind=2, code="unavailable", message="m"), URL)) is Unavailable
    assert type(error_from_frame(FrameRefused(frame_kind=2, code="from_the_future", message="m"), URL)) is ProtocolError
