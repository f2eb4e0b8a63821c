"""Protocol state of an agent: the next message, and the meaning of answers. No sockets, no clocks.

``HeartbeatProtocol`` decides between registering and beating; ``DirectiveInbox`` drops repeated directives;
``refusal_action`` classifies refusals.
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
from everstep.wire.v1 import agent
from everstep.wire.v1.directives import Directive
from everstep.wire.v1.training import FindingCleared, FindingRaised, RankProgress

MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 60.0
"""Limits on the heartbeat interval a controller may set: a mistaken 0 must not become a busy loop."""

MAX_REMEMBERED_DIRECTIVES = 4096


class NodeDescription(msgspec.Struct, frozen=True, kw_only=True):
    """A registration's facts about the node; a change makes the agent register again."""

    vault: Address
    boot_id: str = ""
    driver_version: str = ""
    domain: agent.Domain = agent.Domain()
    labels: dict[str, str] = {}
    gpus: tuple[agent.Gpu, ...] = ()
    host: agent.Host = agent.UNKNOWN_HOST
    takes_nvml_pause: bool = False
    adapters: tuple[agent.NetworkAdapter, ...] = ()
    gpu_modes: agent.GpuModes = agent.UNKNOWN_MODES


class RefusalAction(Enum):
    """The agent's response to a controller's error."""

    REGISTER = "register"  # the controller does not know this run of the agent: register and continue
    RETRY = "retry"  # the controller is away, or in trouble of its own: send the same again later
    NEEDS_OPERATOR = "person"  # token, version, a second agent: log it once as an error, and retry slowly
    DROP_MESSAGE = "message"  # it will never be accepted


def refusal_action(error: EverstepError, *, is_registering: bool) -> RefusalAction:
    """Return the response to ``error``. A registration refused as stale means that another agent uses this node's
    name."""
    if isinstance(error, AuthenticationError | PermissionDenied | VersionMismatch):
        return RefusalAction.NEEDS_OPERATOR
    if isinstance(error, NotFound | StaleGeneration | Conflict):
        return RefusalAction.NEEDS_OPERATOR if is_registering else RefusalAction.REGISTER
    if isinstance(error, MalformedMessage):
        return RefusalAction.NEEDS_OPERATOR if is_registering else RefusalAction.DROP_MESSAGE
    return RefusalAction.RETRY


def operator_advice(error: EverstepError, node: str) -> str:
    """Return advice for the operator on a refusal of kind ``NEEDS_OPERATOR``."""
    if isinstance(error, AuthenticationError):
        command = f"everstep-controller token --role agent --subject {node}"
        return f"mint a token with `{command}` and give it by --token-file"
    if isinstance(error, PermissionDenied):
        return f"the token is not node {node}'s: an agent needs a token of role agent whose subject is its --node"
    if isinstance(error, VersionMismatch):
        return "upgrade the older side: agent and controller share no protocol version"
    if isinstance(error, StaleGeneration | Conflict):
        return f"another agent runs as node {node}: stop one of them, or give this one another --node"
    return "check that this address is an Everstep controller of this version"


class HeartbeatProtocol:
    """One run of an agent, as seen by its controller; ``node`` and ``incarnation`` identify the run."""

    def __init__(self, node: NodeId, incarnation: Incarnation, agent_version: str) -> None:
        self.node = node
        self.incarnation = incarnation
        self.interval_s = 1.0
        self.registrations = 0
        self.is_reconnecting = False
        """Whether a session was lost, and none has been answered since."""
        self._version = agent_version
        self._seq = 0
        self._registered_description: NodeDescription | None = None
        self._acknowledged_findings: tuple[Finding, ...] | None = None
        self._stale_through_seq = 0

    @property
    def is_registered(self) -> bool:
        return self._registered_description is not None

    def forget_registration(self) -> None:
        """Forget the registration: the next message registers again, with all findings."""
        self._registered_description = None
        self._acknowledged_findings = None

    def handle_session_lost(self) -> None:
        """Send all findings with the next beat: the next controller may have only its records."""
        self.is_reconnecting = True
        self._acknowledged_findings = None

    def next_message(
        self,
        node_description: NodeDescription,
        findings: tuple[Finding, ...],
        ranks: tuple[RankProgress, ...],
        wall: float,
        directives_through: int = 0,
    ) -> agent.Register | agent.Heartbeat:
        """Return a registration if one is due, else the next beat, with findings only if they changed."""
        findings = limit_findings(findings)
        if self._registered_description != node_description:
            return agent.Register(
                protocols=SUPPORTED_VERSIONS,
                node=self.node,
                incarnation=self.incarnation,
                agent_version=self._version,
                findings=findings,
                sent_at=wall,
                **msgspec.structs.asdict(node_description),
            )
        self._seq += 1
        return agent.Heartbeat(
            incarnation=self.incarnation,
            seq=self._seq,
            sent_at=wall,
            findings=None if findings == self._acknowledged_findings else findings,
            ranks=ranks,
            directives_through=directives_through,
        )

    def handle_registered(
        self, sent: agent.Register, node_description: NodeDescription, answer: agent.Registered
    ) -> None:
        """Accept the controller's terms. Raises VersionMismatch if it chose an unsupported protocol."""
        if answer.protocol not in SUPPORTED_VERSIONS:
            raise VersionMismatch(
                f"the controller chose protocol {answer.protocol}; this agent supports {SUPPORTED_VERSIONS}"
            )
        self.interval_s = min(max(answer.heartbeat_interval_s, MIN_INTERVAL_S), MAX_INTERVAL_S)
        self.registrations += 1
        self._registered_description = node_description
        self._acknowledged_findings = sent.findings
        self.is_reconnecting = False

    def handle_heartbeat_answer(self, sent: agent.Heartbeat, answer: agent.HeartbeatAnswer) -> None:
        """Note the acknowledged findings; after ``resend`` the next beat carries all of them."""
        self.is_reconnecting = False
        if answer.resend:
            self._acknowledged_findings = None
        elif sent.findings is not None and sent.seq > self._stale_through_seq:
            self._acknowledged_findings = sent.findings

    def handle_reports_answer(self, sent: tuple[agent.NumberedReport, ...], findings: tuple[Finding, ...]) -> None:
        """Resend all findings if an acknowledged report no longer matches the present ``findings``.

        A raised or cleared finding may be outdated when the controller receives it: an earlier run saw it, or the
        controller was away for long.
        """
        active = {finding.key for finding in findings}
        for body in (report.body for report in sent):
            raised = isinstance(body, FindingRaised) and body.finding.key not in active
            if raised or (isinstance(body, FindingCleared) and body.key in active):
                self._acknowledged_findings, self._stale_through_seq = None, self._seq


def limit_findings(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return ``findings`` if they fit a message; otherwise the gravest, and one with the number of omitted ones."""
    if len(findings) <= agent.MAX_FINDINGS:
        return findings
    gravest = sorted(findings, key=lambda finding: -finding.severity.gravity)[: agent.MAX_FINDINGS - 1]
    count = len(findings) - len(gravest)
    omitted = Finding(
        kind=FindingKind.AGENT_SPOOL_OVERFLOW,
        subject="findings",
        severity=Severity.WARNING,
        message=f"the agent left out the {count} mildest of {len(findings)} findings: a heartbeat carries at most "
        f"{agent.MAX_FINDINGS}. Resolve the others first; `everstep_agent_findings` of its /metrics counts all",
        mode=Mode.OBSERVE,
        rule="agent-findings-overflow",
        source="the limit of findings in a heartbeat",
        value=float(count),
    )
    return (*gravest, omitted)


class DirectiveInbox:
    """Directives, each passed on once. A directive comes again in the next session if its acknowledgement was lost. It
    is identified by number *and* content, because a controller whose database was lost counts from the start again."""

    def __init__(self) -> None:
        self.received_through = 0
        """Every directive up to this number was passed on."""
        self._seen_digests: OrderedDict[int, int] = OrderedDict()

    def start_at(self, next_directive: int) -> None:
        """Take the smallest number still to come from a registration's answer."""
        self.received_through = max(0, next_directive - 1)

    def filter_new(self, directives: Iterable[Directive]) -> list[Directive]:
        """Return the new ones among ``directives``, in order of their numbers. None before the last of them is to
        come."""
        directives = sorted(directives, key=lambda d: d.seq)
        if directives:
            self.received_through = max(self.received_through, directives[-1].seq)
        return [directive for directive in directives if self._is_new(directive)]

    def _is_new(self, directive: Directive) -> bool:
        content = xxhash.xxh3_64_intdigest(msgspec.msgpack.encode(directive.body))
        if self._seen_digests.get(directive.seq) == content:
            return False
        self._seen_digests[directive.seq] = content
        self._seen_digests.move_to_end(directive.seq)
        while len(self._seen_digests) > MAX_REMEMBERED_DIRECTIVES:
            self._seen_digests.popitem(last=False)
        return True
