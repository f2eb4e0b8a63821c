"""``python -m everstep_agent.spill [PARENT]``: writes what an order on standard input asks for, and says on standard
output what
came of it. A process of its own, since pickles, checksums and object stores would hold up the vault that starts it.

Ends with 0 when all of the order was done, and with 1 where it could not be: the vault may ask again, and what was
written is not written twice. With its parent's process id it ends when that does.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from everstep.errors import UNREADABLE, EverstepError, MalformedMessage, Unavailable
from everstep.layout.object_storage import storage_errors
from everstep.parent_process import die_with_parent
from everstep_agent.spill.order import MAX_ORDER_BYTES, Order, Outcome, Refusal
from everstep_agent.spill.target import open_target
from everstep_agent.spill.writer import Job, SpilledSlot, folder_of, prune


def carry_out(order: Order) -> Outcome:
    """Raises EverstepError and OSError."""
    folder = folder_of(order.version)
    job = Job(open_target(f"{order.url.rstrip('/')}/{folder}"), order.version, order.manifests)
    written = 0
    for source in order.sources:
        slot = SpilledSlot(source.path, source.slot, source.rank, order.version)
        written += job.write(source.rank, slot).length
    whole = job.complete() if order.complete else False
    gone, left = prune(open_target(order.url), order.keep, order.version) if whole and order.keep else ([], [])
    return Outcome(
        folder=folder,
        ranks=tuple(source.rank for source in order.sources),
        bytes=written,
        whole=whole,
        removed=tuple(folder_of(version) for version in gone),
        left=tuple(folder_of(version) for version in left),
    )


def _answer(data: bytes) -> Outcome | Refusal:
    try:
        order = msgspec.msgpack.decode(data, type=Order)
    except UNREADABLE as error:
        return Refusal(code=MalformedMessage.code, message=f"the order cannot be read: {error}")
    try:
        return carry_out(order)
    except EverstepError as error:
        return Refusal(code=error.code, message=str(error))
    except storage_errors() as error:
        return Refusal(code=Unavailable.code, message=f"the storage failed: {error}")


def main() -> int:
    if len(sys.argv) > 1:
        die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    os.nice(10)  # training and its snapshots come first
    answer = _answer(sys.stdin.buffer.read(MAX_ORDER_BYTES))
    print(msgspec.json.encode(answer).decode())
    return 0 if isinstance(answer, Outcome) else 1


if __name__ == "__main__":
    sys.exit(main())
