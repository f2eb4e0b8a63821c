"""What an agent says next to its controller, and what an answer means. No sockets, no clocks.

``Conversation`` decides between registering and beating; ``Inbox`` takes directives that may come twice; ``meaning_of``
says what a refusal asks of us.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

import msgspec
import xxhash

from everstep.errors import (
    AuthenticationError,
    Conflict,
    EverstepError,
    MalformedMessage,
    NotFound,
    PermissionDenied,
    StaleGeneration,
    VersionMismatch,
)
from everstep.ids import Address, Incarnation, NodeId
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.framing import SUPPORTED_VERSIONS
from everstep.wire.v1.agent import (
    MOST_FINDINGS,
    UNKNOWN_HOST,
    Domain,
    Gpu,
    Heartbeat,
    HeartbeatAnswer,
    Host,
    NumberedReport,
    Register,
    Registered,
)
from everstep.wire.v1.directives import Directive
from everstep.wire.v1.training import FindingCleared, FindingRaised, RankProgress

MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 60.0
"""Bounds on what a controller may set as heartbeat interval: a mistaken 0 must not become a busy loop."""

MAX_REMEMBERED_DIRECTIVES = 4096


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a registration says of the node itself; a change of it is registered anew."""

    vault_address: Address
    boot_id: str = ""
    driver_version: str = ""
    domain: Domain = Domain()
    labels: dict[str, str] = {}
    gpus: tuple[Gpu, ...] = ()
    host: Host = UNKNOWN_HOST


class RefusalAction(Enum):
    """What a controller's error asks of the agent."""

    REGISTER = "register"
    """It does not know this node, or this life of it: register and go on."""

    RETRY = "retry"
    """It is away, or in trouble of its own: the same again, later."""

    NEEDS_OPERATOR = "person"
    """A person must act (token, version, a second agent): say so once, loudly, and retry slowly."""

    DROP_MESSAGE = "message"
    """This message will never be taken: leave it out."""


def refusal_action(error: EverstepError, *, is_registering: bool) -> RefusalAction:
    """What ``error`` asks of us. A registration refused as stale means that another agent speaks for this node."""
    if isinstance(error, AuthenticationError | PermissionDenied | VersionMismatch):
        return RefusalAction.NEEDS_OPERATOR
    if isinstance(error, NotFound | StaleGeneration | Conflict):
        return RefusalAction.NEEDS_OPERATOR if is_registering else RefusalAction.REGISTER
    if isinstance(error, MalformedMessage):
        return RefusalAction.NEEDS_OPERATOR if is_registering else RefusalAction.DROP_MESSAGE
    return RefusalAction.RETRY


def operator_advice(error: EverstepError, node: str) -> str:
    """What a person can do about a refusal of kind ``PERSON``."""
    if isinstance(error, AuthenticationError):
        return (
            f"mint a token with `everstep-controller token --role agent --subject {node}` and give it by --token-file"
        )
    if isinstance(error, PermissionDenied):
        return f"the token is not node {node}'s: an agent needs a token of role agent whose subject is its --node"
    if isinstance(error, VersionMismatch):
        return "upgrade the older side: agent and controller share no protocol version"
    if isinstance(error, StaleGeneration | Conflict):
        return f"another agent speaks for {node}: stop one of them, or give this one another --node"
    return "is this address an Everstep controller of this version?"


class HeartbeatProtocol:
    """One life of an agent, as its controller hears it.

    Args:
        node, incarnation: whose words these are.
        agent_version: told at registration.
    """

    def __init__(self, node: NodeId, incarnation: Incarnation, agent_version: str) -> None:
        self.node = node
        self.incarnation = incarnation
        self.interval_s = 1.0
        self.registrations = 0
        self.is_reconnecting = False
        """Whether a session was lost, and none has been answered since."""
        self._version = agent_version
        self._seq = 0
        self._registered_facts: NodeFacts | None = None
        self._acknowledged_findings: tuple[Finding, ...] | None = None
        self._stale_through_seq = 0

    @property
    def is_registered(self) -> bool:
        return self._registered_facts is not None

    def forget_registration(self) -> None:
        """The controller does not know us (any more): the next word is a registration with the full picture."""
        self._registered_facts = None
        self._acknowledged_findings = None

    def handle_session_lost(self) -> None:
        """Who answers next may have begun meanwhile, with nothing but records: the next beat tells all findings, so
        that it need not ask for them. A whole fleet comes back at once."""
        self.is_reconnecting = True
        self._acknowledged_findings = None

    def next_message(
        self,
        facts: NodeFacts,
        findings: tuple[Finding, ...],
        ranks: tuple[RankProgress, ...],
        sent_reports_through: int,
        wall: float,
        directives_through: int = 0,
    ) -> Register | Heartbeat:
        """A registration where one is due, else the next beat; findings ride along only when they are news."""
        findings = limit_findings(findings)
        if self._registered_facts != facts:
            return Register(
                protocols=SUPPORTED_VERSIONS,
                node=self.node,
                incarnation=self.incarnation,
                agent_version=self._version,
                vault=facts.vault_address,
                boot_id=facts.boot_id,
                driver_version=facts.driver_version,
                domain=facts.domain,
                labels=facts.labels,
                gpus=facts.gpus,
                host=facts.host,
                findings=findings,
                sent_at=wall,
            )
        self._seq += 1
        return Heartbeat(
            incarnation=self.incarnation,
            seq=self._seq,
            sent_at=wall,
            findings=None if findings == self._acknowledged_findings else findings,
            ranks=ranks,
            reports_through=sent_reports_through,
            directives_through=directives_through,
        )

    def handle_registered(self, sent: Register, facts: NodeFacts, answer: Registered) -> None:
        """Takes the controller's terms. Raises VersionMismatch where it chose a protocol we do not speak."""
        if answer.protocol not in SUPPORTED_VERSIONS:
            raise VersionMismatch(
                f"the controller chose protocol {answer.protocol}, and this agent speaks {SUPPORTED_VERSIONS}"
            )
        self.interval_s = min(max(answer.heartbeat_interval_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self.registrations += 1
        self._registered_facts = facts
        self._acknowledged_findings = sent.findings
        self.is_reconnecting = False

    def handle_heartbeat_answer(self, sent: Heartbeat, answer: HeartbeatAnswer) -> None:
        """Notes what the controller has heard; after ``resend`` the next beat tells all findings."""
        self.is_reconnecting = False
        if answer.resend:
            self._acknowledged_findings = None
        elif sent.findings is not None and sent.seq > self._stale_through_seq:
            self._acknowledged_findings = sent.findings

    def handle_reports_answer(self, sent: tuple[NumberedReport, ...], findings: tuple[Finding, ...]) -> None:
        """A finding that was raised or cleared may be news no more once it is heard: an earlier life saw it, or the
        controller was away for long. The next beat then tells ``findings``, the picture of now, all the same."""
        stand = {finding.key for finding in findings}
        for body in (report.body for report in sent):
            raised = isinstance(body, FindingRaised) and body.finding.key not in stand
            if raised or (isinstance(body, FindingCleared) and body.key in stand):
                self._acknowledged_findings, self._stale_through_seq = None, self._seq


def limit_findings(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return at most MOST_FINDINGS findings, which is what a message may carry.

    Args:
        findings: everything that stands on the node.

    Returns:
        ``findings`` where they fit. Otherwise the gravest of them, and one more that says how many are missing.
    """
    if len(findings) <= MOST_FINDINGS:
        return findings
    order = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)
    kept = sorted(findings, key=lambda f: order.index(f.severity))[: MOST_FINDINGS - 1]
    return (*kept, _omitted_finding(len(findings) - len(kept), len(findings)))


def _omitted_finding(count: int, total: int) -> Finding:
    return Finding(
        kind=FindingKind.AGENT_SPOOL_OVERFLOW,
        subject="findings",
        severity=Severity.WARNING,
        message=f"the agent left out the {count} mildest of {total} findings: a heartbeat carries at most "
        f"{MOST_FINDINGS}. Resolve those that are shown; `everstep_agent_findings` of its /metrics counts all of them",
        mode=Mode.OBSERVE,
        rule="agent-findings-overflow",
        source="the wire's bound on findings",
        value=float(count),
    )


class DirectiveInbox:
    """Directives, each handed on once.

    A directive comes again in the next session where its acknowledgement was lost. It is known by number *and*
    content, because a controller whose database was lost counts from the start again.
    """

    def __init__(self) -> None:
        self.received_through = 0
        """Every directive up to this one was handed on."""
        self._seen_digests: OrderedDict[int, int] = OrderedDict()

    def start_at(self, next_directive: int) -> None:
        """From a registration's answer: the smallest number still to come."""
        self.received_through = max(0, next_directive - 1)

    def filter_new(self, directives: Iterable[Directive]) -> list[Directive]:
        """What is new among ``directives``, in order of their numbers. Nothing before the last of them is to come."""
        directives = sorted(directives, key=lambda d: d.seq)
        if directives:
            self.received_through = max(self.received_through, directives[-1].seq)
        return [d for d in directives if self._is_new(d)]

    def _is_new(self, directive: Directive) -> bool:
        content = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(directive.body))
        if self._seen_digests.get(directive.seq) == content:
            return False
        self._seen_digests[directive.seq] = content
        self._seen_digests.move_to_end(directive.seq)
        while len(self._seen_digests) > MAX_REMEMBERED_DIRECTIVES:
            self._seen_digests.popitem(last=False)
        return True
