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
from everstep.host.parent_process import die_with_parent
from everstep.layout.object_storage import storage_errors
from everstep.layout.stored_checkpoints import folder_name
from everstep.wire.v1.local import RequestFailed, Spilled
from everstep_agent.spill.order import MAX_ORDER_BYTES, SpillOrder
from everstep_agent.spill.target import open_target
from everstep_agent.spill.writer import CheckpointWriter, SpillSlotReader, prune


def execute(order: SpillOrder) -> Spilled:
    """Execute an order. Raises EverstepError, OSError."""
    folder = folder_name(order.version)
    job = CheckpointWriter(open_target(f"{order.url.rstrip('/')}/{folder}"), order.version, order.manifests)
    written = 0
    for source in order.sources:
        slot = SpillSlotReader(source.path, source.slot, source.rank, order.version)
        written += job.write(source.rank, slot).length
    is_complete = job.complete()
    prunes = is_complete and order.keep
    removed, remaining = prune(open_target(order.url), order.keep, order.version, order.earlier) if prunes else ([], [])
    return Spilled(
        request=0,
        folder=folder,
        bytes=written,
        complete=is_complete,
        removed=tuple(map(folder_name, removed)),
        remaining=tuple(map(folder_name, remaining)),
    )


def _handle_order(data: bytes) -> Spilled | RequestFailed:
    try:
        order = msgspec.msgpack.decode(data, type=SpillOrder)
    except DECODE_ERRORS as error:
        return _failed(MalformedMessage.code, f"the order cannot be read: {error}")
    try:
        return execute(order)
    except EverstepError as error:
        return _failed(error.code, str(error))
    except storage_errors() as error:
        return _failed(Unavailable.code, f"the storage failed: {error}")


def _failed(code: str, message: str) -> RequestFailed:
    return RequestFailed(request=0, code=code, message=message[:4096])


def main() -> int:
    if len(sys.argv) > 1:
        die_with_parent(int(sys.argv[1]), signal.SIGKILL)
    os.nice(10)  # training and its snapshots have priority
    answer = _handle_order(sys.stdin.buffer.read(MAX_ORDER_BYTES))
    print(msgspec.json.encode(answer).decode())
    return 0 if isinstance(answer, Spilled) else 1


if __name__ == "__main__":
    sys.exit(main())
