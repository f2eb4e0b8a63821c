"""An agent's session: one connection for everything, so that a fleet costs its controller one socket a node.

The agent asks ``GET /v1/agents/{node}/session`` with ``Connection: Upgrade``, ``Upgrade: everstep/1`` and its bearer
token. ``101 Switching Protocols`` opens the session; a refusal is an ordinary HTTP answer. From then on both sides send
frames: a 4-byte big-endian length of what follows, one byte of ``Frame``, and a body in JSON.

========================  =====================  ==============================================================
agent                     controller             rule
========================  =====================  ==============================================================
REGISTER ``Register``     REGISTERED             first in each life, and whenever the facts of the node change
HEARTBEAT ``Heartbeat``   HEARTBEAT_ANSWER       answered at once, in order
QUIET_BEAT ``Heartbeat``  (none)                 one that is not answered: it tells of no findings, and what the
                                                 controller has to say comes as PUSH, LET_GO or REFUSED
REPORTS ``Reports``       REPORTS_ANSWER         answered when durable, in order; beats overtake them
ACKNOWLEDGE               (none)                 directives up to a number have been taken over
(none)                    PUSH ``DirectivesAnswer``  directives as they are decided, each once per session
(none)                    DEFLATED_PUSH          one large directive: its number in 8 bytes, its body deflated (zlib)
(none)                    LET_GO                 no body: the session is not held any more; hang up when all is answered
any                       REFUSED ``Refused``    instead of the answer to one frame; the session goes on
========================  =====================  ==============================================================

Directives that waited for the node come before others: in the answer to the session's first beat, or pushed after
REGISTERED where that was the first frame. A session belongs to the life (incarnation) of its first accepted frame; the
newest session of a node takes the place of the one before, which the controller closes.

A beat is quiet where the agent has asked for an answer lately (``ANSWER_EVERY_S``), awaits none, and holds its session:
most of what a beat costs a controller is its answer.

The end of the connection tells the controller at once that the agent is gone, unless it was told not to hold it
(``HeartbeatAnswer.hold``, LET_GO).
"""

from __future__ import annotations

from enum import IntEnum

from everstep.ids import Whole
from everstep.wire.v1.base import Message, ShortText

UPGRADE = "everstep/1"
PREFIX_BYTES = 4
"""Of the length, which counts the kind's byte and the body."""
NUMBER_BYTES = 8
"""Of the directive's number (big-endian) at the front of a DEFLATED_PUSH. What follows is ``Directive.body`` in JSON,
deflated as RFC 1950 has it, so that one deflation serves every node that is sent the same."""
MAX_TO_AGENT_BYTES = 16 << 20
"""Largest frame an agent reads: a generation of 100,000 ranks is some 10 MiB of JSON. A controller reads
``agent.MAX_BODY_BYTES`` and the kind's byte. An inflated push is no longer than this either."""

ANSWER_EVERY_S = 4.0
"""Seconds after which an agent asks for an answer again, so that it learns of a controller that hears no more."""


class Frame(IntEnum):
    """The kind of a frame."""

    REGISTER = 1
    HEARTBEAT = 2
    REPORTS = 3
    ACKNOWLEDGE = 4
    QUIET_BEAT = 5
    REGISTERED = 17
    HEARTBEAT_ANSWER = 18
    REPORTS_ANSWER = 19
    PUSH = 20
    REFUSED = 21
    DEFLATED_PUSH = 22
    LET_GO = 23


class Acknowledge(Message, frozen=True, kw_only=True):
    """The agent has taken over every directive up to and including ``through``."""

    through: Whole


class Refused(Message, frozen=True, kw_only=True):
    """A frame of kind ``of`` is refused; ``code`` of everstep.errors. ``retry_after_s``: when it may be sent again."""

    of: int
    code: str
    message: ShortText
    retry_after_s: float | None = None


def encode_frame(kind: Frame, body: bytes) -> bytes:
    """One frame."""
    return (len(body) + 1).to_bytes(PREFIX_BYTES, "big") + bytes((kind,)) + body
