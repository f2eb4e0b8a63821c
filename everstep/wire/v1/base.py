"""What every message of version 1 shares, and what every report about a job does."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from everstep.ids import JobId, TraceId

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
ShortText = Annotated[str, msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message: immutable and by keyword only. A field that this release does not know is passed over, so that two
    releases understand each other whichever is upgraded first (docs/decisions/0046)."""


class Request(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody asks for. A field that we do not know is refused: half of what was asked for is something else."""


class OperatorRequest(Request, frozen=True, kw_only=True):
    """What a person orders. ``reason``: why; it stands in the audit log beside the name, as one line without control
    characters, which would forge lines there or steer a terminal."""

    reason: Annotated[
        str, msgspec.Meta(min_length=1, max_length=1024, extra_json_schema={"pattern": r"[^\s\x00-\x1f\x7f-\x9f]"})
    ]

    def __post_init__(self) -> None:
        line = " ".join(_CONTROL.sub(" ", self.reason).split())
        if not line:
            raise ValueError("the reason is blank: it stands in the log for ever, so say why")
        if line != self.reason:
            msgspec.structs.force_setattr(self, "reason", line)


class Report(Message, frozen=True, kw_only=True):
    """Base of what a node reports about a job. ``at`` is the node's wall clock at the observation."""

    job: JobId
    at: float
    trace: TraceId = ""
