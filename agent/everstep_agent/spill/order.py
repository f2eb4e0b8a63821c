"""What a vault asks its writer of checkpoints for, and what it hears: on the writer's standard input and output."""

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
    """What to write: ``sources`` of ``version`` to a folder under ``url``. ``manifests`` are those of all ranks, as
    sealed. ``complete``: also write ``.metadata`` if every rank's file is there, and then remove all checkpoints under
    ``url`` but the ``keep`` newest (0: remove none)."""

    url: str
    version: Version
    sources: tuple[SlotSource, ...]
    manifests: dict[int, bytes]
    complete: bool = False
    keep: int = 0


class SpillResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What was done: files and bytes of this order's ranks, whether the checkpoint is whole now, and the folders that
    were removed, and of whole ones that are left where any may be removed."""

    folder: str
    ranks: tuple[int, ...]
    bytes: int
    is_complete: bool
    removed: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()


class SpillError(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Why it could not be done: a code of everstep.errors, and a sentence."""

    code: str
    message: str
