"""A slot's bytes that are wanted, in pieces that are asked for, received and hashed by themselves."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np

from everstep.boxes import Range
from everstep.slots import CHUNK_BYTES
from everstep.wire.v1.local import SlotInfo
from trainer_hooks.rows import Rows

BATCH_BYTES = 2 * CHUNK_BYTES
"""Of a slot in one request: whole chunks, so that each is hashed once where it lies."""
GAP_BYTES = 4 << 10
"""Bytes between two ranges that are cheaper to fetch than another range."""
MOST_RANGES = 1 << 16
"""A quarter of what a vault takes in one request."""


class Batch(msgspec.Struct, frozen=True):
    """Ranges of a slot that are fetched together, none across a chunk's end, and the copies out of where they land one
    after another."""

    slot: SlotInfo
    ranges: tuple[Range, ...]
    rows: Rows
    nbytes: int


def batches_of(slot: SlotInfo, rows: Rows) -> Iterator[Batch]:
    """What to ask for, so that ``rows`` can be copied, whose sources are offsets in the slot's payload."""
    rows = rows.cut(min(BATCH_BYTES, CHUNK_BYTES))
    block = rows.source // BATCH_BYTES
    for first, last in _runs(block[1:] != block[:-1], len(block)):
        for begin in range(first, last, MOST_RANGES):
            yield _batch(slot, Rows(*(column[begin : min(begin + MOST_RANGES, last)] for column in rows)))


def _runs(breaks: np.ndarray, count: int) -> Iterator[tuple[int, int]]:
    """(first, one behind the last) of each run; ``breaks`` says of each member but the first whether it begins one."""
    if count:
        begins = [0, *(np.flatnonzero(breaks) + 1).tolist()]
        yield from zip(begins, [*begins[1:], count], strict=True)


def _batch(slot: SlotInfo, rows: Rows) -> Batch:
    ends = np.maximum.accumulate(rows.source + rows.length)
    chunk = rows.source // CHUNK_BYTES
    apart = (rows.source[1:] > ends[:-1] + GAP_BYTES) | (chunk[1:] != chunk[:-1])
    runs = list(_runs(apart, len(ends)))
    begins = np.array([int(rows.source[first]) for first, _ in runs])
    lengths = np.array([int(ends[last - 1]) for _, last in runs]) - begins
    lands = np.cumsum(lengths) - lengths
    counts = [last - first for first, last in runs]
    landed = rows.source + np.repeat(lands - begins, counts)
    ranges = tuple(zip(begins.tolist(), lengths.tolist(), strict=True))
    return Batch(slot, ranges, Rows(landed, rows.target, rows.length), int(lengths.sum()))
