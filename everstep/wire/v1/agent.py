"""Define an agent's session with the controller: its frames and their messages."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Annotated

import msgspec

from everstep.ids import Address, Incarnation, NodeId, NonNegativeInt, SafeInt, ShortText, full_match
from everstep.vocabulary import Finding
from everstep.wire.v1.base import Message
from everstep.wire.v1.directives import Directive
from everstep.wire.v1.training import AnyReport, RankProgress

# ---- session: one connection for everything, so that a fleet costs its controller one socket per node
#
# docs/reference/protocol.md describes the session, its frames, and who sends and answers each of them. Directives that
# waited for the node come first: in the answer to the session's first heartbeat, or pushed after REGISTERED if that was
# the first frame. A session belongs to the life (incarnation) of its first accepted frame. A node's newest session
# replaces the previous one, which the controller closes.
#
# A heartbeat is one-way if the agent has recently asked for an answer (``ANSWER_INTERVAL_S``), awaits none, and keeps
# its session open: the answer is most of a heartbeat's cost for the controller.

UPGRADE = "everstep/1"
PREFIX_BYTES = 4
"""Size of the length, which counts the kind's byte and the body."""
DIRECTIVE_NUMBER_BYTES = 8
"""Size of the directive's number (big-endian) at the front of a DEFLATED_PUSH. ``Directive.body`` in JSON follows,
deflated as in RFC 1950, so that one deflation serves every node with the same directive."""
MAX_AGENT_FRAME_BYTES = 16 << 20
"""Largest frame an agent reads: a generation of 100,000 ranks is about 10 MiB of JSON. A controller reads
``MAX_BODY_BYTES`` and the kind's byte. An inflated push is no longer than this either."""

ANSWER_INTERVAL_S = 4.0
"""Seconds after which an agent asks for an answer again, to notice a controller that no longer receives."""

GAUGE_INTERVAL_S = 10.0
"""Least seconds between two heartbeats with GPU gauges. A random share of the same length is added to each pause, so
that a fleet that started at once does not send them at once."""
MAX_GAUGED_GPUS = 64
"""Most GPUs of a node whose gauges a heartbeat carries; an agent leaves out the others."""


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
    """The agent has accepted every directive up to and including ``through``."""

    through: NonNegativeInt


class FrameRefused(Message, frozen=True, kw_only=True):
    """A frame of kind ``frame_kind`` is refused; ``code`` of everstep.errors. ``retry_after_s``: when it may be sent
    again."""

    frame_kind: int
    code: str
    message: ShortText
    retry_after_s: float | None = None


def encode_frame(kind: FrameKind, body: bytes) -> bytes:
    """Return one frame."""
    return (len(body) + 1).to_bytes(PREFIX_BYTES, "big") + bytes((kind,)) + body


MAX_HARDWARE_TEXT = 128
"""Longest text that hardware reports about itself; an agent cuts longer ones."""

LABEL_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}"

HardwareText = Annotated[str, msgspec.Meta(max_length=MAX_HARDWARE_TEXT)]
"""Text that hardware reports about itself."""

MAX_BODY_BYTES = 1 << 20
"""Largest request body that the controller reads."""

MAX_FINDINGS = 256
"""Most findings in a message, and most that the controller keeps of a node. They take about 100 KiB."""

Findings = Annotated[tuple[Finding, ...], msgspec.Meta(max_length=MAX_FINDINGS)]
"""All current findings of a node. An agent with more sends the gravest, and a finding that counts the rest."""


def _intern_fields(message: Message, *names: str) -> None:
    """Intern the fields, so that equal text of many nodes is one string: a controller may hold a million GPUs of one
    model."""
    for name in names:
        msgspec.structs.force_setattr(message, name, sys.intern(getattr(message, name)))


class Gpu(Message, frozen=True, kw_only=True, gc=False):
    """One GPU as NVML names it; unknown fields are empty.

    Attributes:
        part_number: Part number of its board.
        vbios: Version of its firmware.
        inforom: Version of its InfoROM's image.
    """

    index: SafeInt
    uuid: ShortText
    name: ShortText
    pci_bus_id: ShortText
    memory_bytes: SafeInt
    serial: ShortText = ""
    part_number: HardwareText = ""
    vbios: HardwareText = ""
    inforom: HardwareText = ""

    def __post_init__(self) -> None:
        _intern_fields(self, "name", "pci_bus_id", "part_number", "vbios", "inforom")


class Host(Message, frozen=True, kw_only=True, gc=False):
    """The machine around the GPUs as its firmware names it (DMI), and the kernel's release. Serial numbers are readable
    by root only: empty if the agent runs as another user."""

    vendor: HardwareText = ""
    product: HardwareText = ""
    serial: HardwareText = ""
    chassis_serial: HardwareText = ""
    kernel: HardwareText = ""

    def __post_init__(self) -> None:
        _intern_fields(self, "vendor", "product", "kernel")


UNKNOWN_HOST = Host()
"""A host of which nothing is known; this very object is left out of messages."""


class NetworkAdapter(Message, frozen=True, kw_only=True, gc=False):
    """A kind of RDMA adapter that a node trains or stores over: the id of its board, and its firmware's version."""

    board: HardwareText
    firmware: HardwareText

    def __post_init__(self) -> None:
        _intern_fields(self, "board", "firmware")


class GpuModes(Message, frozen=True, kw_only=True, gc=False):
    """Modes of a node's GPUs: ``on`` or ``off``; ``off, on`` if the GPUs differ; empty if unknown."""

    ecc: HardwareText = ""
    mig: HardwareText = ""
    persistence: HardwareText = ""

    def __post_init__(self) -> None:
        _intern_fields(self, "ecc", "mig", "persistence")


UNKNOWN_MODES = GpuModes()
"""Modes of which nothing is known; this very object is left out of messages."""

MAX_ADAPTER_KINDS = 16
"""Most kinds of adapters in a registration. Adapters with the same board and firmware are one kind."""


class Domain(Message, frozen=True, kw_only=True, gc=False):
    """Failure domains of a node; nodes with equal strings fail together."""

    rack: ShortText = ""
    switch: ShortText = ""
    power: ShortText = ""

    def __post_init__(self) -> None:
        _intern_fields(self, "rack", "switch", "power")


Labels = Annotated[
    dict[Annotated[str, full_match(LABEL_PATTERN)], Annotated[str, msgspec.Meta(max_length=63)]],
    msgspec.Meta(max_length=32),
]
"""A site's own labels for a node (``pool=a``, ``owner=vision``), by which people find it."""


class Register(Message, frozen=True, kw_only=True):
    """An agent's first message in each of its lives. ``takes_nvml_pause``: it takes the directive ``PauseNvml``."""

    protocols: tuple[SafeInt, ...]
    node: NodeId
    incarnation: Incarnation
    agent_version: HardwareText
    vault: Address
    boot_id: HardwareText = ""
    driver_version: HardwareText = ""
    domain: Domain = Domain()
    labels: Labels = {}
    gpus: tuple[Gpu, ...] = ()
    host: Host = UNKNOWN_HOST
    findings: Findings = ()
    sent_at: float = 0.0
    takes_nvml_pause: bool = False
    adapters: Annotated[tuple[NetworkAdapter, ...], msgspec.Meta(max_length=MAX_ADAPTER_KINDS)] = ()
    gpu_modes: GpuModes = UNKNOWN_MODES


class Registered(Message, frozen=True, kw_only=True):
    """The controller's answer to Register.

    Attributes:
        protocol: The protocol to use.
        heartbeat_interval_s: Seconds between heartbeats.
        next_directive: The smallest sequence number that the node may be sent; older ones are void for this life.
        keep_open: As in ``HeartbeatAnswer``.
    """

    protocol: int
    heartbeat_interval_s: float
    next_directive: int
    controller: str
    server_at: float
    keep_open: bool = True


class GpuGauges(Message, frozen=True, kw_only=True, array_like=True, gc=False):
    """A GPU's newest gauges, for people. No decision depends on them. None: the device does not offer the value, or it
    could not be read.

    Attributes:
        index: As in ``Gpu``.
        is_lost: NVML reports the GPU as gone.
        utilization: Share of the time that a kernel was running, 0 to 1.
        throttled_by: NVML's reasons for which the GPU is slower than it could be.
        ecc_corrected: Corrected memory errors since the driver was loaded; ``ecc_uncorrected`` likewise.
    """

    index: SafeInt
    is_lost: bool = False
    temperature_c: SafeInt | None = None
    memory_temperature_c: SafeInt | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    utilization: float | None = None
    memory_used_bytes: SafeInt | None = None
    sm_clock_mhz: SafeInt | None = None
    memory_clock_mhz: SafeInt | None = None
    throttled_by: Annotated[tuple[HardwareText, ...], msgspec.Meta(max_length=8)] = ()
    ecc_corrected: SafeInt | None = None
    ecc_uncorrected: SafeInt | None = None


class LeadershipProof(Message, frozen=True, kw_only=True):
    """Proof that a controller has led in ``epoch``, from its ``/readyz``. Only a holder of the fleet's secret can make
    the ``proof`` (``everstep.bearer_tokens.epoch_proof``), so its carrier need not be trusted."""

    epoch: NonNegativeInt
    proof: ShortText


class Heartbeat(Message, frozen=True, kw_only=True):
    """An agent's heartbeat, once a second.

    Attributes:
        findings: All current findings; only when they changed since the last answered heartbeat.
        directives_through: Number of the last accepted directive (0: none in this life). Acknowledges directives for an
            agent without a session, or one that hangs up between heartbeats.
        leadership_proof: Another controller's proof, if the last answer asked for it.
        gpu_gauges: Of all GPUs, if they have changed (see ``GAUGE_INTERVAL_S``). The controller keeps the newest in
            memory.
    """

    incarnation: Incarnation
    seq: SafeInt
    sent_at: float
    findings: Findings | None = None
    ranks: tuple[RankProgress, ...] = ()
    directives_through: NonNegativeInt = 0
    leadership_proof: LeadershipProof | None = None
    gpu_gauges: Annotated[tuple[GpuGauges, ...], msgspec.Meta(max_length=MAX_GAUGED_GPUS)] = ()


class HeartbeatAnswer(Message, frozen=True, kw_only=True):
    """The controller's answer to a heartbeat.

    Attributes:
        resend: The controller has no state of this node (it restarted). Send all findings, and the offers of launchers
            whose ranks the heartbeat did not list.
        directives: Every directive that the node has not acknowledged, outside a session and in a session's first
            answer; later ones are pushed.
        keep_open: Whether to keep the session open. Otherwise the node hangs up once it awaits no answer, reconnects
            for its next heartbeat or an urgent report, and acknowledges directives in it; only deadlines judge its
            silence then. Every answer repeats the flag.
        unconfirmed_epoch: The epoch in which this controller leads, if it cannot reach the database and so cannot know
            whether another leads in a higher one; the agent then asks the controllers it knows. 0: confirmed.
    """

    server_at: float
    resend: bool = False
    directives: tuple[Directive, ...] = ()
    keep_open: bool = True
    unconfirmed_epoch: NonNegativeInt = 0


class NumberedReport(Message, frozen=True, kw_only=True):
    """A report with its number in this agent's life; the controller drops numbers it has already processed."""

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
    """The directives after ``after``; empty if the wait ended without any."""

    directives: tuple[Directive, ...] = ()
