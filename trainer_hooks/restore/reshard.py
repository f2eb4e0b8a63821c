"""From boxes as they were stored to boxes as they are needed, in byte ranges. Pure: any layout to any other."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from everstep.boxes import Box, run_dimension
from everstep.errors import NotRestorable
from everstep.manifests import Manifest, Stored, Tensor

MOST_RUNS = 256
"""A box of more contiguous runs than this is fetched with the rows it lies in, where that is not much more."""
MOST_EXCESS = 4
"""How many times the wanted bytes such rows may have."""


class Want(msgspec.Struct, frozen=True, gc=False):
    """Box ``box`` of tensor ``tensor`` (index in the catalog) is needed."""

    tensor: int
    box: Box


class Read(msgspec.Struct, frozen=True, gc=False):
    """Part ``box`` of want ``want`` comes from ``stored`` in supply ``supply``."""

    want: int
    supply: int
    stored: Stored
    box: Box


def plan_reads(wants: Sequence[Want], supplies: Iterable[Manifest]) -> list[Read]:
    """Reads that fill every want exactly once, each byte from the first supply that has it: order them by nearness.

    Takes no more of ``supplies`` than it needs. Raises NotRestorable where something is in no supply.
    """
    wanting: dict[int, list[int]] = defaultdict(list)
    for index, want in enumerate(wants):
        wanting[want.tensor].append(index)
    rest = {index: [want.box] for index, want in enumerate(wants) if want.box.volume}
    reads: list[Read] = []
    catalog: tuple[Tensor, ...] = ()
    for supply, manifest in enumerate(supplies):
        catalog = manifest.catalog
        for stored in manifest.stored:
            for index in wanting.get(stored.tensor, ()):
                if (lacking := rest.get(index)) is None:
                    continue
                if len(lacking) > 1 or lacking[0] != stored.box:
                    lacking = _take(index, supply, stored, lacking, reads)
                else:
                    reads.append(Read(index, supply, stored, stored.box))
                    lacking = []
                if lacking:
                    rest[index] = lacking
                else:
                    del rest[index]
        if not rest:
            return reads
    for index, boxes in rest.items():
        name = catalog[wants[index].tensor].name if catalog else f"tensor {wants[index].tensor}"
        raise NotRestorable(f"{name}: the part at {boxes[0].offset} of size {boxes[0].size} is in no slot that is left")
    return reads


def _take(want: int, supply: int, stored: Stored, rest: list[Box], reads: list[Read]) -> list[Box]:
    """Adds reads of what ``stored`` has of ``rest``; returns what is still lacking."""
    lacking: list[Box] = []
    for part in rest:
        common = part.intersect(stored.box)
        if common is None:
            lacking.append(part)
        else:
            reads.append(Read(want, supply, stored, common))
            lacking += part.without(common)
    return lacking


def box_to_fetch(held: Box, wanted: Box) -> Box:
    """What to move over the network for ``wanted``: itself, or whole rows of ``held`` where it lies in many crumbs."""
    runs = math.prod(wanted.size[: run_dimension(held, wanted)])
    if runs <= MOST_RUNS:
        return wanted
    rows = Box((wanted.offset[0], *held.offset[1:]), (wanted.size[0], *held.size[1:]))
    return rows if rows.volume <= MOST_EXCESS * wanted.volume else wanted
