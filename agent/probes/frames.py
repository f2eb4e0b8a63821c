"""What the supervisor and its probe process say to one another."""

from __future__ import annotations

from everstep.ids import NodeId
from everstep.wire.v1.base import Message
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished

MAX_FRAME_BYTES = 1 << 20


class Ask(Message, frozen=True, kw_only=True, tag=True):
    """To the child: take part as ``node``; be done by ``deadline`` (this machine's monotonic clock)."""

    probe: RunProbe
    node: NodeId
    deadline: float


class Ready(Message, frozen=True, kw_only=True, tag=True):
    """From the child, once: torch is loaded."""


class Stage(Message, frozen=True, kw_only=True, tag=True):
    """From the child: what it is about to do, for whoever has to explain its silence."""

    doing: str


FromChild = Ready | Stage | ProbeFinished
