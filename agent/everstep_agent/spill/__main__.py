"""Write checkpoints: ``python -m everstep_agent.spill [PARENT]``, from an order on standard input.

This is a process of its own, since pickles, checksums and object stores would block the vault that starts it. It ends
with the process PARENT. The exit status is 0 if the whole order was done, and 1 otherwise; the vault may ask again.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from everstep.errors import DECODE_ERRORS, EverstepError, MalformedMessage, Unavailable
from everstep.layout.object_storage import storage_errors
from everstep.parent_process import die_with_parent
from everstep_agent.spill.order import MAX_ORDER_BYTES, SpillFailure, SpillOrder, SpillResult
from everstep_agent.spill.target import open_target
from everstep_agent.spill.writer import CheckpointWriter, SpillSlotReader, folder_name, prune


def execute(order: SpillOrder) -> SpillResult:
    """Execute an order. Raises EverstepError, OSError."""
    folder = folder_name(order.version)
    job = CheckpointWriter(open_target(f"{order.url.rstrip('/')}/{folder}"), order.version, order.manifests)
    written = 0
    for source in order.sources:
        slot = SpillSlotReader(source.path, source.slot, source.rank, order.version)
        written += job.write(source.rank, slot).length
    is_complete = job.complete()
    prunes = is_complete and order.keep
    removed, remaining = prune(open_target(order.url), order.keep, order.version) if prunes else ([], [])
    return SpillResult(
        folder=folder,
        bytes=written,
        is_complete=is_complete,
        removed=tuple(map(folder_name, removed)),
        remaining=tuple(map(folder_name, remaining)),
    )


def _handle_order(data: bytes) -> SpillResult | SpillFailure:
    try:
        order = msgspec.msgpack.decode(data, type=SpillOrder)
    except DECODE_ERRORS as error:
        return SpillFailure(code=MalformedMessage.code, message=f"the order cannot be read: {error}")
    try:
        return execute(order)
    except EverstepError as error:
        return SpillFailure(code=error.code, message=str(error))
    except storage_errors() as error:
        return SpillFailure(code=Unavailable.code, message=f"the storage failed: {error}")


def main() -> int:
    if len(sys.argv) > 1:
        die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    os.nice(10)  # training and its snapshots have priority
    answer = _handle_order(sys.stdin.buffer.read(MAX_ORDER_BYTES))
    print(msgspec.json.encode(answer).decode())
    return 0 if isinstance(answer, SpillResult) else 1


if __name__ == "__main__":
    sys.exit(main())
