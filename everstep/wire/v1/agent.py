"""An agent's session with the controller: its frames and their messages."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Annotated

import msgspec

from everstep.ids import Address, Incarnation, NodeId, NonNegativeInt, SafeInt, full_match
from everstep.vocabulary import Finding
from everstep.wire.v1.base import Message, ShortText
from everstep.wire.v1.directives import Directive
from everstep.wire.v1.training import AnyReport, RankProgress

# ---- session
# An agent's session: one connection for everything, so that a fleet costs its controller one socket a node.
#
# The agent asks ``GET /v1/agents/{node}/session`` with ``Connection: Upgrade``, ``Upgrade: everstep/1`` and its bearer
# token. ``101 Switching Protocols`` opens the session; a refusal is an ordinary HTTP answer. From then on both sides
# send
# frames: a 4-byte big-endian length of what follows, one byte of ``Frame``, and a body in JSON.
#
# ========================  =====================  ==============================================================
# agent                     controller             rule
# ========================  =====================  ==============================================================
# REGISTER ``Register``     REGISTERED             first in each life, and whenever the facts of the node change
# HEARTBEAT ``Heartbeat``   HEARTBEAT_ANSWER       answered at once, in order
# ONE_WAY_HEARTBEAT ``Heartbeat`` (none)            one that is not answered: it tells of no findings, and what the
# controller has to say comes as PUSH, GO_AWAY or REFUSED
# REPORTS ``Reports``       REPORTS_ANSWER         answered when durable, in order; beats overtake them
# ACKNOWLEDGE               (none)                 directives up to a number have been taken over
# (none)                    PUSH ``DirectivesAnswer``  directives as they are decided, each once per session
# (none)                    DEFLATED_PUSH          one large directive: its number in 8 bytes, its body deflated (zlib)
# (none)                    GO_AWAY                no body: the session is not held any more; hang up when all is
# answered
# any                       REFUSED ``FrameRefused``    instead of the answer to one frame; the session goes on
# ========================  =====================  ==============================================================
#
# Directives that waited for the node come before others: in the answer to the session's first beat, or pushed after
# REGISTERED where that was the first frame. A session belongs to the life (incarnation) of its first accepted frame;
# the
# newest session of a node takes the place of the one before, which the controller closes.
#
# A beat is quiet where the agent has asked for an answer lately (``ANSWER_EVERY_S``), awaits none, and holds its
# session:
# most of what a beat costs a controller is its answer.
#
# The end of the connection tells the controller at once that the agent is gone, unless it was told not to hold it
# (``HeartbeatAnswer.keep_open``, GO_AWAY).

UPGRADE = "everstep/1"
PREFIX_BYTES = 4
"""Of the length, which counts the kind's byte and the body."""
DIRECTIVE_NUMBER_BYTES = 8
"""Of the directive's number (big-endian) at the front of a DEFLATED_PUSH. What follows is ``Directive.body`` in JSON,
deflated as RFC 1950 has it, so that one deflation serves every node that is sent the same."""
MAX_AGENT_FRAME_BYTES = 16 << 20
"""Largest frame an agent reads: a generation of 100,000 ranks is some 10 MiB of JSON. A controller reads
``agent.MAX_BODY_BYTES`` and the kind's byte. An inflated push is no longer than this either."""

ANSWER_INTERVAL_S = 4.0
"""Seconds after which an agent asks for an answer again, so that it learns of a controller that hears no more."""


class FrameKind(IntEnum):
    """The kind of a frame."""

    REGISTER = 1
    HEARTBEAT = 2
    REPORTS = 3
    ACKNOWLEDGE = 4
    ONE_WAY_HEARTBEAT = 5
    REGISTERED = 17
    HEARTBEAT_ANSWER = 18
    REPORTS_ANSWER = 19
    PUSH = 20
    REFUSED = 21
    DEFLATED_PUSH = 22
    GO_AWAY = 23


class Acknowledge(Message, frozen=True, kw_only=True):
    """The agent has taken over every directive up to and including ``through``."""

    through: NonNegativeInt


class FrameRefused(Message, frozen=True, kw_only=True):
    """A frame of kind ``of`` is refused; ``code`` of everstep.errors. ``retry_after_s``: when it may be sent again."""

    frame_kind: int
    code: str
    message: ShortText
    retry_after_s: float | None = None


def encode_frame(kind: FrameKind, body: bytes) -> bytes:
    """One frame."""
    return (len(body) + 1).to_bytes(PREFIX_BYTES, "big") + bytes((kind,)) + body


MAX_HARDWARE_TEXT = 128
"""Characters of a word that hardware says of itself; an agent cuts longer ones."""

LABEL_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}"

HardwareText = Annotated[str, msgspec.Meta(max_length=MAX_HARDWARE_TEXT)]
"""What hardware says of itself."""

MAX_BODY_BYTES = 1 << 20
"""Largest request body the controller reads."""

MOST_FINDINGS = 256
"""Most findings that a message may carry, and most that the controller keeps of a node. They take about 100 KiB."""

Findings = Annotated[tuple[Finding, ...], msgspec.Meta(max_length=MOST_FINDINGS)]
"""All findings that stand on a node. An agent that has more sends the gravest, and a finding that counts the rest."""


def _intern_fields(message: Message, *names: str) -> None:
    """Lets equal words of many nodes be one string: a controller holds a million GPUs of one model."""
    for name in names:
        msgspec.structs.force_setattr(message, name, sys.intern(getattr(message, name)))


class Gpu(Message, frozen=True, kw_only=True, gc=False):
    """One GPU as NVML names it. ``part_number`` of its board; ``vbios``, ``inforom``: versions of its firmware and of
    its InfoROM's image. What it does not tell is empty."""

    index: SafeInt
    uuid: str
    name: str
    pci_bus_id: str
    memory_bytes: SafeInt
    serial: str = ""
    part_number: HardwareText = ""
    vbios: HardwareText = ""
    inforom: HardwareText = ""

    def __post_init__(self) -> None:
        _intern_fields(self, "name", "pci_bus_id", "part_number", "vbios", "inforom")


class Host(Message, frozen=True, kw_only=True, gc=False):
    """The machine around the GPUs as its firmware names it (DMI), and the kernel's release.

    Serial numbers are readable by root only: empty where the agent runs as somebody else.
    """

    vendor: HardwareText = ""
    product: HardwareText = ""
    serial: HardwareText = ""
    chassis_serial: HardwareText = ""
    kernel: HardwareText = ""

    def __post_init__(self) -> None:
        _intern_fields(self, "vendor", "product", "kernel")


UNKNOWN_HOST = Host()
"""One of which nothing is told; this very object is left out of messages."""


class Domain(Message, frozen=True, kw_only=True, gc=False):
    """Failure domains a node belongs to; equal strings fail together."""

    rack: str = ""
    switch: str = ""
    power: str = ""

    def __post_init__(self) -> None:
        _intern_fields(self, "rack", "switch", "power")


Labels = Annotated[
    dict[Annotated[str, full_match(LABEL_PATTERN)], Annotated[str, msgspec.Meta(max_length=63)]],
    msgspec.Meta(max_length=32),
]
"""A site's own words for a node (``pool=a``, ``owner=vision``), by which people find it."""


class Register(Message, frozen=True, kw_only=True):
    """An agent's first words in each of its lives."""

    protocols: tuple[SafeInt, ...]
    node: NodeId
    incarnation: Incarnation
    agent_version: str
    vault: Address
    boot_id: str = ""
    driver_version: str = ""
    domain: Domain = Domain()
    labels: Labels = {}
    gpus: tuple[Gpu, ...] = ()
    host: Host = UNKNOWN_HOST
    findings: Findings = ()
    sent_at: float = 0.0


class Registered(Message, frozen=True, kw_only=True):
    """The controller's answer: the protocol to speak, how often to beat, and from where directives count.

    ``next_directive`` is the smallest sequence number the node may be sent; older ones are void for this life.
    ``hold``: see ``HeartbeatAnswer``.
    """

    protocol: int
    heartbeat_interval_s: float
    next_directive: int
    controller: str
    server_at: float
    keep_open: bool = True


class LeadershipProof(Message, frozen=True, kw_only=True):
    """That a controller has led by ``epoch``: what ``/readyz`` tells of it. Only who holds the fleet's secret can make
    the ``proof`` (``everstep.bearer_tokens.epoch_proof``); who carries it need not be believed."""

    epoch: NonNegativeInt
    proof: ShortText


class Heartbeat(Message, frozen=True, kw_only=True):
    """Once a second. ``findings`` is the full picture, only when it changed since the last answered beat.

    ``reports_through`` is the last report number sent, so that a gap is noticed. ``directives_through`` is the last
    directive taken over (0: none in this life): the way to acknowledge for who has no session, or hangs up between
    beats. ``leadership_proof``: what another controller said, where the answer to the last beat asked for it.
    """

    incarnation: Incarnation
    seq: SafeInt
    sent_at: float
    findings: Findings | None = None
    ranks: tuple[RankProgress, ...] = ()
    reports_through: NonNegativeInt = 0
    directives_through: NonNegativeInt = 0
    leadership_proof: LeadershipProof | None = None


class HeartbeatAnswer(Message, frozen=True, kw_only=True):
    """``resend``: the controller has no picture of this node (it restarted): send findings in full, and the offers of
    launchers whose ranks the beat did not tell of.

    ``directives``: every one the node has not acknowledged, outside a session and in the first answer of one; later
    in a session they are pushed. ``hold``: whether a session is to stay open. A controller that runs short of file
    descriptors says False to nodes that no job waits for, and to others only when that is not enough. Such a node
    hangs up once it has no answer to wait for, connects again for its next beat (or sooner, with an urgent report),
    and says in that beat what it has taken over. Its hanging up is no sign of trouble; its silence is judged by
    deadlines alone. Every answer says it anew.

    ``unconfirmed_epoch``: the epoch by which this controller leads, where it cannot reach the database and so cannot
    know whether another one leads by a higher one: the agent is to ask the controllers it knows. 0 where it is sure.
    """

    server_at: float
    resend: bool = False
    directives: tuple[Directive, ...] = ()
    keep_open: bool = True
    unconfirmed_epoch: NonNegativeInt = 0


class NumberedReport(Message, frozen=True, kw_only=True):
    """A report with its number in this agent's life; the controller drops numbers it has already taken."""

    number: NonNegativeInt
    body: AnyReport


class Reports(Message, frozen=True, kw_only=True):
    """Reports in order; answered only once they are durable."""

    incarnation: Incarnation
    reports: Annotated[tuple[NumberedReport, ...], msgspec.Meta(max_length=1024)]


class ReportsAnswer(Message, frozen=True, kw_only=True):
    """All reports up to and including ``through`` are durable."""

    through: int


class DirectivesAnswer(Message, frozen=True, kw_only=True):
    """What a node has not seen after ``after``; empty when the wait ended without any."""

    directives: tuple[Directive, ...] = ()
