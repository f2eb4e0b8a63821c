"""Define the terms of findings, verdicts and states.

A *finding* is a fact from a sensor, probe or audit. A *verdict* is the controller's judgement of findings.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from itertools import chain
from typing import Annotated

import msgspec

from everstep.ids import LongText, NodeId, SafeInt, ShortText, TraceId


class FindingKind(StrEnum):
    """Kind of a finding. The prefix names the sensor's domain."""

    GPU_LOST = "gpu.lost"
    GPU_XID = "gpu.xid"
    GPU_RECOVERY_ACTION = "gpu.recovery_action"
    GPU_ECC_UNCORRECTABLE = "gpu.ecc_uncorrectable"
    GPU_ECC_CORRECTABLE = "gpu.ecc_correctable"
    GPU_ROW_REMAP_PENDING = "gpu.row_remap_pending"
    GPU_ROW_REMAP_FAILURE = "gpu.row_remap_failure"
    GPU_RETIRED_PAGES = "gpu.retired_pages"
    GPU_TEMPERATURE = "gpu.temperature"
    GPU_THROTTLED = "gpu.throttled"
    GPU_SETTING = "gpu.setting"
    GPU_MEMORY_LEFT = "gpu.memory_left"
    GPU_PCIE_REPLAY = "gpu.pcie_replay"
    GPU_PCIE_LINK = "gpu.pcie_link"
    GPU_NVLINK = "gpu.nvlink"
    NETWORK_PORT_DOWN = "network.port_down"
    NETWORK_ERRORS = "network.errors"
    NETWORK_SLOW_LINK = "network.slow_link"
    HOST_MEMORY = "host.memory"
    HOST_DISK = "host.disk"
    HOST_CLOCK_SKEW = "host.clock_skew"
    HOST_STUCK_PROCESSES = "host.stuck_processes"
    HOST_KERNEL = "host.kernel"
    HOST_SERVICE = "host.service"
    SENSOR_HUNG = "sensor.hung"
    SENSOR_FAILED = "sensor.failed"
    SENSOR_STALE = "sensor.stale"
    NODE_FLAPPING = "node.flapping"
    NODE_CHANGED = "node.changed"
    NODE_NOTICE = "node.notice"
    RANK_FLAPPING = "rank.flapping"
    RANK_STRAGGLER = "rank.straggler"
    RANK_LOSS = "rank.loss"
    VAULT_LOST = "vault.lost"
    SLOT_CORRUPT = "vault.slot_corrupt"
    TRANSFER_CORRUPT = "vault.transfer_corrupt"
    STORAGE_CORRUPT = "vault.storage_corrupt"
    COPIES_MISSING = "vault.copies_missing"
    MEMORY_LOW = "vault.memory_low"
    NO_CHECKPOINT = "vault.no_checkpoint"
    DIGEST_MISMATCH = "sdc.digest_mismatch"
    AUDIT_MISMATCH = "sdc.audit_mismatch"
    PROBE_FAILED = "probe.failed"
    COMPUTE_WRONG = "probe.compute_wrong"
    MEMORY_WRONG = "probe.memory_wrong"
    AGENT_SPOOL_OVERFLOW = "agent.spool_overflow"


class Severity(StrEnum):
    """Severity of a finding for the node's fitness to compute, mildest first."""

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def gravity(self) -> int:
        """Its place in this order."""
        return _GRAVITY[self]


_GRAVITY = {severity: gravity for gravity, severity in enumerate(Severity)}


class Action(StrEnum):
    """Remediation of a fault, weakest first. ``Action.strongest`` compares by this order."""

    NONE = "none"
    RESTART_RANK = "restart_rank"
    RESET_GPU = "reset_gpu"
    REBOOT_NODE = "reboot_node"
    DRAIN = "drain"
    REPAIR = "repair"

    @staticmethod
    def strongest(*actions: Action) -> Action:
        return max(actions, key=_STRENGTH.__getitem__, default=Action.NONE)


_STRENGTH = {action: strength for strength, action in enumerate(Action)}


class Mode(StrEnum):
    """Autonomy of a policy rule, weakest first. ``Mode.weakest`` compares by this order."""

    OBSERVE = "observe"
    RECOMMEND = "recommend"
    ENFORCE = "enforce"

    @staticmethod
    def weakest(*modes: Mode) -> Mode:
        return next((mode for mode in Mode if mode in modes), Mode.ENFORCE)


class AuditKind(StrEnum):
    """Kind of an audit: which part of the work of training it checks for silent corruption.

    MATMUL: products of linear layers. GRADIENT_NORM: a rank's gradients beside those of other ranks. GRADIENT_BUFFER: a
    rank's gradients from the backward pass until they were sent. COLLECTIVE: gradients before and after they are added.
    PEER_REPLAY: a block's passes on another rank. UPDATE: a part of the optimizer's update. STATE: parameters and
    moments between updates. CHECKPOINT: the copies of a version.
    """

    MATMUL = "matmul"
    GRADIENT_NORM = "gradient_norm"
    GRADIENT_BUFFER = "gradient_buffer"
    COLLECTIVE = "collective"
    PEER_REPLAY = "peer_replay"
    UPDATE = "update"
    STATE = "state"
    CHECKPOINT = "checkpoint"


class AuditRole(StrEnum):
    """A rank's part in an audit.

    OWNER: its work is checked. PEER: it did the work again. ARBITER: a third rank, which did it again after the first
    two differed.
    """

    OWNER = "owner"
    PEER = "peer"
    ARBITER = "arbiter"


class ProbeKind(StrEnum):
    """Kind of a probe.

    ALL_REDUCE: sums between nodes, with their latency and bandwidth. COMPUTE: products on one node whose right result
    is known. MEMORY: patterns written to a node's memories and read back, with their bandwidth.
    """

    ALL_REDUCE = "all_reduce"
    COMPUTE = "compute"
    MEMORY = "memory"


class NodeState(StrEnum):
    """State of a node in the fleet."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    LOST = "lost"
    QUARANTINED = "quarantined"
    PROBATION = "probation"
    HELD = "held"
    REPAIR = "repair"


class JobState(StrEnum):
    """State of a job."""

    FORMING = "forming"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    FAILED = "failed"


class RankActivity(StrEnum):
    """What a rank without progress does."""

    MOVING = "moving"
    """It has made progress again."""
    COLLECTIVE = "collective"
    """Its main thread waits for other ranks in a collective."""
    WORKING = "working"
    """It uses a processor, does I/O, has children that do, is debugged, or is in a declared section."""
    STILL = "still"
    """It is in no collective, and nothing of it moves."""
    BUSY_LOOP = "busy_loop"
    """It runs one loop without a call, in which no variable changes."""
    STOPPED = "stopped"
    """Its process is stopped by a signal, or ends."""


class GenerationReason(StrEnum):
    """Why a generation replaced the one before it."""

    FORMED = "formed"
    RANK_LOST = "rank_lost"
    RANK_HUNG = "rank_hung"
    NODE_LOST = "node_lost"
    NODE_EVICTED = "node_evicted"
    CORRUPTION = "corruption"
    COLLECTIVE_FAILED = "collective_failed"
    STORE_LOST = "store_lost"
    GROWTH = "growth"
    STRAGGLER = "straggler"
    PLACEMENT = "placement"
    PRIORITY = "priority"
    OPERATOR = "operator"


FindingSubject = Annotated[str, msgspec.Meta(max_length=2048)]
"""Shorter than a finding's key, of which it is a part."""


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A fact about a node, with the data to check it.

    ``key`` identifies the finding on its node (kind and subject): a second report with the same key updates the first.

    Attributes:
        value: Measured value, in the unit that ``message`` names.
        threshold: Threshold, in the same unit.
        rule: Id of the policy rule that turned the sample into a finding.
        source: Where the rule's number comes from.
        since: Wall seconds.
    """

    kind: FindingKind
    subject: FindingSubject
    severity: Severity
    message: LongText
    action: Action = Action.NONE
    mode: Mode = Mode.ENFORCE
    rule: ShortText = ""
    source: ShortText = ""
    value: float | None = None
    threshold: float | None = None
    xid: SafeInt | None = None
    since: float = 0.0
    trace: TraceId = ""
    evidence: dict[ShortText, LongText] = {}

    @property
    def key(self) -> str:
        suffix = f"/{self.xid}" if self.xid is not None else ""
        return f"{self.kind}/{self.subject}{suffix}"


def gravest_by_key(findings: Iterable[Finding]) -> dict[str, Finding]:
    """Return one finding for each key: the gravest, and of equals the first."""
    found: dict[str, Finding] = {}
    for finding in findings:
        other = found.setdefault(finding.key, finding)
        if finding.severity.gravity > other.severity.gravity:
            found[finding.key] = finding
    return found


class Decision(StrEnum):
    """Decision of a verdict.

    RESTART: a rank's process is ended, and another takes its place; the node stays.
    CORRELATED: so many nodes show the finding that software, driver or network is suspected; no node leaves.
    """

    EVICT = "evict"
    DEFER_EVICTION = "defer_eviction"
    CORRELATED = "correlated"
    RESTART = "restart"
    RECOMMEND = "recommend"
    QUARANTINE = "quarantine"
    READMIT = "readmit"
    REPAIR = "repair"
    NO_ACTION = "no_action"


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """A judgement: the decision, the sentence that explains it, and the findings it rests on."""

    id: str
    node: NodeId
    decision: Decision
    sentence: str
    action: Action
    evidence: tuple[Finding, ...]
    at: float
    trace: TraceId


RECOVERY_STAGES = {
    "regroup": ("start", "abort", "teardown", "wait", "rendezvous"),
    "restore": ("build", "restore", "plan"),
    "first_step": ("compile", "first_step"),
}
"""Stages of a recovery after the directives, with their phases (``Resumed.phases_s``), all in sequence."""
RECOVERY_PHASES = tuple(chain.from_iterable(RECOVERY_STAGES.values()))
"""All phases in sequence. The web page has the same list (``web/job.js``), and a test compares them."""
