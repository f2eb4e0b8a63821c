"""What every message of version 1 shares, and what every report about a job does."""

from __future__ import annotations

from typing import Annotated

import msgspec

from everstep.ids import JobId, TraceId

ShortText = Annotated[str, msgspec.Meta(max_length=4096)]


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message: immutable and by keyword only. A field that this release does not know is passed over, so that two
    releases understand each other whichever is upgraded first (docs/decisions/0046)."""


class Request(Message, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What somebody asks for. A field that we do not know is refused: half of what was asked for is something else."""


class Report(Message, frozen=True, kw_only=True):
    """Base of what a node reports about a job. ``at`` is the node's wall clock at the observation."""

    job: JobId
    at: float
    trace: TraceId = ""
