"""What a job chooses for its snapshots in ``run.track``; the same on all ranks."""

from __future__ import annotations

import msgspec


class Choices(msgspec.Struct, frozen=True, kw_only=True):
    """``overlap``: whether the next step begins while state that no other rank holds is still copied. A rank that is
    lost meanwhile then costs the step. None: where a GPU holds it, since there a copy costs the step next to nothing.
    """

    overlap: bool | None = None
