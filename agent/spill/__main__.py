"""``python -m agent.spill``: writes what an order on standard input asks for, and says on standard output what came of
it. A process of its own, since pickles, checksums and object stores would hold up the vault that starts it.

Ends with 0 when all of the order was done, and with 1 and a sentence on standard error where it could not be: the
vault may ask again, and what was written is not written twice.
"""

from __future__ import annotations

import os
import sys

import msgspec

from agent.spill.retention import folder_of
from agent.spill.slot import SpilledSlot
from agent.spill.target import open_target
from agent.spill.work import Job, prune
from everstep.errors import EverstepError
from everstep.ids import Version

MAX_ORDER_BYTES = 1 << 30


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's slot on this node."""

    rank: int
    path: str
    slot: int


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What to write: ``sources`` of ``version`` to a folder under ``url``. ``manifests`` are those of all ranks, as
    sealed. ``complete``: also write ``.metadata`` if every rank's file is there, and then remove all checkpoints under
    ``url`` but the ``keep`` newest (0: remove none)."""

    url: str
    version: Version
    sources: tuple[Source, ...]
    manifests: dict[int, bytes]
    complete: bool = False
    keep: int = 0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What was done: files and bytes of this order's ranks, whether the checkpoint is whole now, and the folders that
    were removed."""

    folder: str
    ranks: tuple[int, ...]
    bytes: int
    whole: bool
    removed: tuple[str, ...] = ()


def carry_out(order: Order) -> Outcome:
    """Raises EverstepError and OSError."""
    folder = folder_of(order.version)
    job = Job(open_target(f"{order.url.rstrip('/')}/{folder}"), order.version, order.manifests)
    written = 0
    for source in order.sources:
        slot = SpilledSlot(source.path, source.slot, source.rank, order.version)
        written += job.write(source.rank, slot).length
    whole = job.complete() if order.complete else False
    gone = prune(open_target(order.url), order.keep, order.version) if whole and order.keep else []
    return Outcome(
        folder=folder,
        ranks=tuple(source.rank for source in order.sources),
        bytes=written,
        whole=whole,
        removed=tuple(folder_of(version) for version in gone),
    )


def main() -> int:
    os.nice(10)  # training and its snapshots come first
    try:
        order = msgspec.msgpack.decode(sys.stdin.buffer.read(MAX_ORDER_BYTES), type=Order)
        outcome = carry_out(order)
    except (EverstepError, OSError, msgspec.DecodeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.encode(outcome).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
