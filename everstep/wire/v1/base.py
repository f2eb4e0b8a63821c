"""What every message of version 1 shares, and what every report about a job does."""

from __future__ import annotations

from typing import Annotated

import msgspec

from everstep.ids import JobId, TraceId

ShortText = Annotated[str, msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A message: immutable, by keyword only, and refused when it has a field we do not know."""


class Report(Message, frozen=True, kw_only=True):
    """Base of what a node reports about a job. ``at`` is the node's wall clock at the observation."""

    job: JobId
    at: float
    trace: TraceId = ""
