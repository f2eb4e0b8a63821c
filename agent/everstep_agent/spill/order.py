"""The order of a vault to its checkpoint writer, whose answer is a wire.v1.local.Spilled or RequestFailed."""

from __future__ import annotations

import msgspec

from everstep.ids import Version

MAX_ORDER_BYTES = 1 << 30


class SlotSource(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's slot on this node."""

    rank: int
    path: str
    slot: int


class SpillOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Write ``sources`` of ``version`` to a folder under ``url``, where ``keep`` checkpoints stay (0: all). What
    earlier runs wrote beyond ``earlier`` stays too."""

    url: str
    version: Version
    sources: tuple[SlotSource, ...]
    manifests: dict[int, bytes]
    keep: int = 0
    earlier: Version | None = None
