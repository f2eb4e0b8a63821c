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
from everstep.wire.framing import SPOKEN
from everstep.wire.v1.agent import (
    MOST_FINDINGS,
    NO_HOST,
    Domain,
    Gpu,
    Heartbeat,
    HeartbeatAnswer,
    Host,
    Numbered,
    Register,
    Registered,
)
from everstep.wire.v1.directives import Directive
from everstep.wire.v1.training import FindingCleared, FindingRaised, RankProgress

SHORTEST_INTERVAL_S = 0.05
LONGEST_INTERVAL_S = 60.0
"""Bounds on what a controller may set as heartbeat interval: a mistaken 0 must not become a busy loop."""

REMEMBERED_DIRECTIVES = 4096


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a registration says of the node itself; a change of it is registered anew."""

    vault: Address
    boot_id: str = ""
    driver_version: str = ""
    domain: Domain = Domain()
    labels: dict[str, str] = {}
    gpus: tuple[Gpu, ...] = ()
    host: Host = NO_HOST


class Refusal(Enum):
    """What a controller's error asks of the agent."""

    REGISTER = "register"
    """It does not know this node, or this life of it: register and go on."""

    RETRY = "retry"
    """It is away, or in trouble of its own: the same again, later."""

    PERSON = "person"
    """A person must act (token, version, a second agent): say so once, loudly, and retry slowly."""

    MESSAGE = "message"
    """This message will never be taken: leave it out."""


def meaning_of(error: EverstepError, *, registering: bool) -> Refusal:
    """What ``error`` asks of us. A registration refused as stale means that another agent speaks for this node."""
    if isinstance(error, AuthenticationError | PermissionDenied | VersionMismatch):
        return Refusal.PERSON
    if isinstance(error, NotFound | StaleGeneration | Conflict):
        return Refusal.PERSON if registering else Refusal.REGISTER
    if isinstance(error, MalformedMessage):
        return Refusal.PERSON if registering else Refusal.MESSAGE
    return Refusal.RETRY


def advice_for(error: EverstepError, node: str) -> str:
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


class Conversation:
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
        self.returning = False
        """Whether a session was lost, and none has been answered since."""
        self._version = agent_version
        self._seq = 0
        self._registered: NodeFacts | None = None
        self._told: tuple[Finding, ...] | None = None
        self._left_behind_at = 0

    @property
    def registered(self) -> bool:
        return self._registered is not None

    def forget_registration(self) -> None:
        """The controller does not know us (any more): the next word is a registration with the full picture."""
        self._registered = None
        self._told = None

    def session_lost(self) -> None:
        """Who answers next may have begun meanwhile, with nothing but records: the next beat tells all findings, so
        that it need not ask for them. A whole fleet comes back at once."""
        self.returning = True
        self._told = None

    def next_message(
        self,
        facts: NodeFacts,
        findings: tuple[Finding, ...],
        ranks: tuple[RankProgress, ...],
        reports_through: int,
        wall: float,
        directives_through: int = 0,
    ) -> Register | Heartbeat:
        """A registration where one is due, else the next beat; findings ride along only when they are news."""
        findings = within_bound(findings)
        if self._registered != facts:
            return Register(
                protocols=SPOKEN,
                node=self.node,
                incarnation=self.incarnation,
                agent_version=self._version,
                vault=facts.vault,
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
            findings=None if findings == self._told else findings,
            ranks=ranks,
            reports_through=reports_through,
            directives_through=directives_through,
        )

    def registration_answered(self, sent: Register, facts: NodeFacts, answer: Registered) -> None:
        """Takes the controller's terms. Raises VersionMismatch where it chose a protocol we do not speak."""
        if answer.protocol not in SPOKEN:
            raise VersionMismatch(f"the controller chose protocol {answer.protocol}, and this agent speaks {SPOKEN}")
        self.interval_s = min(max(answer.heartbeat_interval_s, SHORTEST_INTERVAL_S), LONGEST_INTERVAL_S)
        self.registrations += 1
        self._registered = facts
        self._told = sent.findings
        self.returning = False

    def beat_answered(self, sent: Heartbeat, answer: HeartbeatAnswer) -> None:
        """Notes what the controller has heard; after ``resend`` the next beat tells all findings."""
        self.returning = False
        if answer.resend:
            self._told = None
        elif sent.findings is not None and sent.seq > self._left_behind_at:
            self._told = sent.findings

    def reports_answered(self, sent: tuple[Numbered, ...], findings: tuple[Finding, ...]) -> None:
        """A finding that was raised or cleared may be news no more once it is heard: an earlier life saw it, or the
        controller was away for long. The next beat then tells ``findings``, the picture of now, all the same."""
        stand = {finding.key for finding in findings}
        for body in (report.body for report in sent):
            raised = isinstance(body, FindingRaised) and body.finding.key not in stand
            if raised or (isinstance(body, FindingCleared) and body.key in stand):
                self._told, self._left_behind_at = None, self._seq


def within_bound(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
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
    return (*kept, _left_out(len(findings) - len(kept), len(findings)))


def _left_out(count: int, total: int) -> Finding:
    return Finding(
        kind=FindingKind.AGENT_OVERFLOW,
        subject="findings",
        severity=Severity.WARNING,
        message=f"the agent left out the {count} mildest of {total} findings: a heartbeat carries at most "
        f"{MOST_FINDINGS}. Resolve those that are shown; `everstep_agent_findings` of its /metrics counts all of them",
        mode=Mode.OBSERVE,
        rule="agent-findings-overflow",
        source="the wire's bound on findings",
        value=float(count),
    )


class Inbox:
    """Directives, each handed on once.

    A directive comes again in the next session where its acknowledgement was lost. It is known by number *and*
    content, because a controller whose database was lost counts from the start again.
    """

    def __init__(self) -> None:
        self.through = 0
        """Every directive up to this one was handed on."""
        self._seen: OrderedDict[int, int] = OrderedDict()

    def start_at(self, next_directive: int) -> None:
        """From a registration's answer: the smallest number still to come."""
        self.through = max(0, next_directive - 1)

    def take(self, directives: Iterable[Directive]) -> list[Directive]:
        """What is new among ``directives``, in order of their numbers. Nothing before the last of them is to come."""
        directives = sorted(directives, key=lambda d: d.seq)
        if directives:
            self.through = max(self.through, directives[-1].seq)
        return [d for d in directives if self._is_news(d)]

    def _is_news(self, directive: Directive) -> bool:
        content = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(directive.body))
        if self._seen.get(directive.seq) == content:
            return False
        self._seen[directive.seq] = content
        self._seen.move_to_end(directive.seq)
        while len(self._seen) > REMEMBERED_DIRECTIVES:
            self._seen.popitem(last=False)
        return True
