"""Define requests to the agent of this machine and its answers, on ``node.sock`` in the agent's run directory.

A process of the agent's user, or of root, sends one request as a line of JSON. The agent sends one answer as a line of
JSON and closes the connection. These messages need no controller.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from everstep.ids import NodeId, ShortText
from everstep.vocabulary import Finding
from everstep.wire.v1.base import Message, Request

NODE_SOCKET = "node.sock"
"""Name of the socket in the run directory."""

HEALTH_FILE = "health"
"""Name of the file in the run directory that tells shell scripts of the node's health."""


class NodeHealth(StrEnum):
    """Whether the node is fit to compute, as its own agent knows.

    HEALTHY: no finding is worse than information. DEGRADED: there are warnings, or critical findings that only
    recommend an action. UNFIT: the policy enforces an action on the node. UNKNOWN: the sensors give no values.
    """

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    UNFIT = "unfit"
    UNKNOWN = "unknown"


class DescribeNode(Request, frozen=True, kw_only=True, tag=True):
    """Ask for the node's health, findings, GPUs and ports. Answer: NodeStatus."""


class MakeLogBundle(Request, frozen=True, kw_only=True, tag=True):
    """Ask for a bundle of logs now. Answer: LogBundleMade."""


class JoinFleet(Request, frozen=True, kw_only=True, tag=True):
    """Connect a standalone agent to controllers. Texts are values of the agent's settings of the same name, "" for
    the agent's present value. Answer: FleetJoined."""

    controllers: Annotated[tuple[ShortText, ...], msgspec.Meta(min_length=1, max_length=16)]
    token_file: ShortText = ""
    join_token_file: ShortText = ""
    ca_file: ShortText = ""
    client_certificate: ShortText = ""
    client_key: ShortText = ""


class SetNvmlPause(Request, frozen=True, kw_only=True, tag=True):
    """Have the agent close NVML for ``seconds``, so that a GPU can be reset or the driver be replaced; 0 ends that.
    Answer: NvmlPauseSet, once NVML is closed."""

    seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)]


LocalRequest = DescribeNode | MakeLogBundle | JoinFleet | SetNvmlPause


class GpuSummary(Message, frozen=True, kw_only=True):
    """The newest values of a GPU. ``error``: why it cannot be read, "" if it can."""

    index: int
    pci_bus_id: ShortText
    name: ShortText = ""
    uuid: ShortText = ""
    error: ShortText = ""
    temperature_c: float | None = None
    power_w: float | None = None
    utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


class PortSummary(Message, frozen=True, kw_only=True):
    """The newest values of a network port. ``role``: compute, storage, management, virtual or out of band."""

    name: ShortText
    kind: ShortText
    role: ShortText
    is_up: bool
    rate_gbps: float | None = None


class NodeStatus(Message, frozen=True, kw_only=True, tag=True):
    """The state of the node.

    Attributes:
        at: Wall seconds of the answer.
        polled_at: Wall seconds of the sensors' newest values; 0 before the first.
        reason: The gravest finding, as one line; "" for a healthy node.
        controllers: Addresses of the controllers; none for a standalone agent.
        controller_silent_s: Seconds since a controller answered; None if none ever has.
        newest_bundle: Path of the newest bundle of logs; "" if there is none.
    """

    node: NodeId
    version: ShortText
    at: float
    polled_at: float
    health: NodeHealth
    reason: ShortText = ""
    driver_version: ShortText = ""
    findings: tuple[Finding, ...] = ()
    gpus: tuple[GpuSummary, ...] = ()
    ports: tuple[PortSummary, ...] = ()
    controllers: tuple[ShortText, ...] = ()
    controller_silent_s: float | None = None
    newest_bundle: ShortText = ""


class LogBundleMade(Message, frozen=True, kw_only=True, tag=True):
    """A bundle was written."""

    path: ShortText
    size_bytes: int


class FleetJoined(Message, frozen=True, kw_only=True, tag=True):
    """The agent connects to the controllers from now on. ``sentence``: what to do for its next start."""

    sentence: ShortText


class NvmlPauseSet(Message, frozen=True, kw_only=True, tag=True):
    """NVML is closed until the time ``until`` (wall seconds); 0: it is opened again."""

    until: float


class LocalRefusal(Message, frozen=True, kw_only=True, tag=True):
    """The request was not carried out. ``message``: why, and what to do."""

    message: ShortText


LocalAnswer = NodeStatus | LogBundleMade | FleetJoined | NvmlPauseSet | LocalRefusal
