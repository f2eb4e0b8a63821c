"""Messages between a vault and its checkpoint writer, on the writer's standard input and output."""

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
    """Write ``sources`` of ``version`` to a folder under ``url``.

    Attributes:
        manifests: The sealed manifests of all ranks.
        keep: The number of newest checkpoints kept under ``url`` once this one is complete; 0 removes none.
    """

    url: str
    version: Version
    sources: tuple[SlotSource, ...]
    manifests: dict[int, bytes]
    keep: int = 0


class SpillResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of an order.

    Attributes:
        bytes: The bytes of this order's files.
        is_complete: Whether the checkpoint is complete now.
        removed: The removed folders.
        remaining: The folders of the remaining complete checkpoints, if pruning ran.
    """

    folder: str
    bytes: int
    is_complete: bool
    removed: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()


class SpillFailure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A failed order: a code of everstep.errors, and a message."""

    code: str
    message: str
