"""What operators read of a job's checkpoints as they are now: ``GET /v1/jobs/{job}/checkpoints``."""

from __future__ import annotations

from typing import Literal

from everstep.ids import JobId, Version
from everstep.wire.v1.base import Message, ShortText


class KeptVersion(Message, frozen=True, kw_only=True):
    """A version in one of the places where it is kept.

    ``place``: slots in ``memory``, slots with ``parity``, or ``storage``. ``state``: whole there, or on its ``way``.
    ``restorable``: the job could go back to it now; ``sentence`` says why, or why not. ``at``: since when it is there,
    or on its way. ``url``: the folder on storage, which any program loads by torch.distributed.checkpoint.
    """

    version: Version
    place: Literal["memory", "parity", "storage"]
    state: Literal["whole", "way"]
    restorable: bool
    sentence: ShortText
    at: float
    verified: bool = False
    bytes: int = 0
    url: str = ""


class JobCheckpoints(Message, frozen=True, kw_only=True):
    """All that a job could go back to, in the order in which it would: what stands first and is restorable is taken.

    ``spills_lost``: versions that were to be written to storage, and never got there; ``trouble``: why the last one
    did not, or the last one's parity was not made, empty where the newest was.
    """

    job: JobId
    sentence: ShortText
    versions: tuple[KeptVersion, ...] = ()
    spills_lost: int = 0
    trouble: ShortText = ""
