"""Placements on a mesh as boxes. Pure, and the only place that knows what torch's placements mean.

FSDP2 over tensor parallelism cuts what tensor parallelism left it, so the mesh dimension on the left cuts after the one
on its right; torch writes that as ``_StridedShard``. Applied in the order in which the cuts were made each rank has one
box. Where a ``_StridedShard`` cannot be read so, a rank has a part of each of ``split_factor`` pieces.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.boxes import Box, Extent, chunk

Run = tuple[int, int]
"""(start, length) along one dimension."""


def boxes_of(
    shape: Extent, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[tuple[Extent, Box]]:
    """What the rank at ``coordinate`` holds of a tensor of this global shape.

    Each box with the offset at which it begins in the local tensor; a box without volume where the rank holds nothing.
    Raises TypeError for placements other than Shard, _StridedShard and Replicate.
    """
    unknown = [p for p in placements if not isinstance(p, Shard | _StridedShard | Replicate)]
    if unknown:
        raise TypeError(f"is placed as {unknown[0]}; only Shard and Replicate have a box to store")
    dims = [_runs(n, _cuts(dim, mesh_shape, coordinate, placements)) for dim, n in enumerate(shape)]
    found = []
    for runs in itertools.product(*(_with_local_offsets(runs) for runs in dims)):
        box = Box(tuple(start for _, (start, _) in runs), tuple(length for _, (_, length) in runs))
        found.append((tuple(at for at, _ in runs), box))
    return found


class _Cut:
    """One mesh dimension's cut of a tensor's dimension: part ``index`` of ``count``, of each of ``pieces`` pieces."""

    def __init__(self, index: int, count: int, pieces: int) -> None:
        self.index = index
        self.count = count
        self.pieces = pieces


def _cuts(
    dim: int, mesh_shape: Sequence[int], coordinate: Sequence[int], placements: Sequence[Placement]
) -> list[_Cut]:
    """The cuts of tensor dimension ``dim`` in the order in which they are to be made."""
    ordered: list[_Cut] = []
    here = [
        _Cut(index, count, int(p.split_factor) if isinstance(p, _StridedShard) else 1)
        for p, index, count in zip(placements, coordinate, mesh_shape, strict=True)
        if isinstance(p, Shard | _StridedShard) and p.dim == dim
    ]
    for cut in reversed(here):
        after = _made_before(cut, ordered)
        if after is None:  # not all pieces are ranks' parts: as torch has it, from left to right
            return here
        ordered.insert(after, cut)
    return [_Cut(cut.index, cut.count, 1) for cut in ordered]


def _made_before(cut: _Cut, ordered: list[_Cut]) -> int | None:
    """How many of the cuts to the right of ``cut`` make up its pieces; None where no number of them does."""
    pieces = 1
    for position in range(len(ordered) + 1):
        if pieces == cut.pieces:
            return position
        if position < len(ordered):
            pieces *= ordered[position].count
    return None


def _runs(length: int, cuts: Sequence[_Cut]) -> list[Run]:
    runs = [(0, length)]
    for cut in cuts:
        total = sum(n for _, n in runs)
        picked = []
        for piece in range(cut.pieces):
            start, size = chunk(total, piece, cut.pieces)
            at, n = chunk(size, cut.index, cut.count)
            picked += _between(runs, start + at, n)
        runs = picked
    joined: list[Run] = []
    for start, n in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + n
        else:
            joined.append((start, n))
    return joined or [(length, 0)]


def _between(runs: Sequence[Run], start: int, length: int) -> list[Run]:
    """What lies from ``start`` on, ``length`` long, in the runs taken one after another."""
    found, passed = [], 0
    for at, n in runs:
        low, high = max(start, passed), min(start + length, passed + n)
        if low < high:
            found.append((at + low - passed, high - low))
        passed += n
    return found


def _with_local_offsets(runs: Sequence[Run]) -> list[tuple[int, Run]]:
    offsets = itertools.accumulate((n for _, n in runs[:-1]), initial=0)
    return list(zip(offsets, runs, strict=True))
