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
    """Write ``sources`` of ``version`` to a folder under ``url``, where ``keep`` checkpoints stay (0: all)."""

    url: str
    version: Version
    sources: tuple[SlotSource, ...]
    manifests: dict[int, bytes]
    keep: int = 0


class SpillResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """This order's bytes, and whether the folder is complete; if so, the ``removed`` and ``remaining`` ones."""

    folder: str
    bytes: int
    is_complete: bool
    removed: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()


class SpillFailure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A failed order: a code of everstep.errors, and a message."""

    code: str
    message: str
