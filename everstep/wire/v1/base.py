"""Define the bases of all messages, requests and reports of version 1."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from everstep.ids import JobId, TraceId

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message: immutable and by keyword only. Unknown fields are ignored, so that two releases understand each other
    whichever is upgraded first (docs/decisions/0001)."""


class Request(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request. An unknown field is refused, since a request fulfilled in part is another request."""


class OperatorRequest(Request, frozen=True, kw_only=True):
    """A person's order. ``reason``: why; the event log shows it beside the name, as one line without control
    characters, which could forge lines or control a terminal."""

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
    """Base of a node's reports about a job. ``at`` is the node's wall clock at the observation."""

    job: JobId
    at: float
    trace: TraceId = ""
