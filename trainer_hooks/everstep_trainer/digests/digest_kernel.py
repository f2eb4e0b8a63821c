"""Compute the weighted sum of a tensor's bytes on a GPU in one Triton kernel, which reads each byte once.

A program sums a tile: some columns over some rows. It multiplies both halves of each word with the key of its row, a
scalar, and the sums with the weights of the columns, which it loads once.

Triton is no dependency of Everstep: importing this module fails where it is missing.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from everstep_trainer.digests.digest_weights import ROW_BYTES, WORD_BYTES, column_weights, row_keys

TILE_COLUMNS = 2048
TILE_ROWS = 16
WARPS = 8
_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def add_bytes(total: torch.Tensor, flat: torch.Tensor, start: int) -> None:
    """Add the weighted sum of contiguous bytes, which begin at byte ``start``, to ``total``, an int64 beside them.

    The bytes are read as the widest elements that their address and ``start`` allow.
    """
    if not flat.numel():
        return
    bits = flat.data_ptr() | int(flat.storage_offset()) | start | WORD_BYTES
    width = bits & -bits
    whole = flat.numel() // width * width
    device = torch.cuda.device(flat.device) if flat.is_cuda else nullcontext()
    with device:
        if whole:
            _launch(total, flat[:whole].view(_ELEMENTS[width]), start // width)
        if whole < flat.numel():
            _launch(total, flat[whole:], start + whole)


def _launch(total: torch.Tensor, elements: torch.Tensor, first: int) -> None:
    width = elements.element_size()
    row_elements = ROW_BYTES // width
    row, before = divmod(first, row_elements)
    end = before + elements.numel()
    rows = -(-end // row_elements)
    keys = row_keys(row, rows, elements.device)
    grid = (-(-min(end, row_elements) // TILE_COLUMNS), -(-rows // TILE_ROWS))
    _add_tile[grid](
        total,
        elements,
        column_weights(elements.device),
        keys,
        before,
        end,
        rows,
        row_elements=row_elements,
        width=width,
        columns=TILE_COLUMNS,
        tile_rows=TILE_ROWS,
        num_warps=WARPS,
    )


@triton.jit(do_not_specialize=["before", "end", "rows"])
def _add_tile(  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    total,
    elements,
    weights,
    keys,
    before,
    end,
    rows,
    row_elements: tl.constexpr,
    width: tl.constexpr,
    columns: tl.constexpr,
    tile_rows: tl.constexpr,
):
    """Add the sum of one tile. The elements have the places ``before`` to ``end`` of ``rows`` rows."""
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    first_row = tl.program_id(1).to(tl.int64) * tile_rows
    low = tl.zeros((columns,), dtype=tl.int64)
    high = tl.zeros((columns,), dtype=tl.int64)  # the high halves of words; narrower elements are all in ``low``
    for row in range(first_row, tl.minimum(first_row + tile_rows, rows)):
        place = row * row_elements + column
        some = tl.load(elements + (place - before), mask=(place >= before) & (place < end), other=0).to(tl.int64)
        key = tl.load(keys + row)
        if width == 8:
            high += ((some >> 32) & 0xFFFFFFFF) * key
            some = some & 0xFFFFFFFF
        else:
            some = some & ((1 << (8 * width)) - 1)  # without the copies of the sign
        low += some * key
    at = column * width
    both = tl.load(weights + at // 8)
    if width == 8:
        sums = low * (both & 0xFFFFFFFF) + high * ((both >> 32) & 0xFFFFFFFF)
    else:
        half = (both >> (at // 4 % 2 * 32).to(tl.int64)) & 0xFFFFFFFF
        sums = low * (half << (at % 4 * 8).to(tl.int64))
    tl.atomic_add(total, tl.sum(sums, axis=0), sem="relaxed")
