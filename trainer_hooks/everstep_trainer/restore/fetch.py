"""Slot bytes into live tensors: this node's slots straight from their mapping, others' from the vaults that hold them.

Nothing is used unchecked: of a local slot the chunks that are read are hashed, here or by the rank that wrote it; what
comes from elsewhere is held against what was sealed there. A slot that fails is named, never guessed around.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import torch

from everstep.errors import MalformedMessage, NotRestorable
from everstep.layout.manifests import BLOB_PREFIX, Box, Manifest, Range, Stored, Tensor, byte_ranges, run_dimension
from everstep.layout.segments import PAGE
from everstep.wire.v1.local import Fetched, SlotInfo
from everstep.wire.v1.training import Member
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore.byte_moves import Batch, Filled, Moves, batches_of, is_plain
from everstep_trainer.restore.local_slots import BadSlot, Check, LocalSlots
from everstep_trainer.restore.remote_slots import Landing, Streams
from everstep_trainer.snapshot.copy import part_of, slot_view
from everstep_trainer.state.blob import dtype_of

# ---- reshard
# From boxes as they were stored to boxes as they are needed, in byte ranges. Pure: any layout to any other.

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


NOTHING_READ = {"own": 0, "node": 0, "remote": 0, "parity": 0}


class Supply(msgspec.Struct, frozen=True):
    """A slot to read from, with its manifest."""

    slot: SlotInfo
    manifest: Manifest

    def tensor(self, read: Read) -> Tensor:
        return self.manifest.catalog[read.stored.tensor]

    @property
    def blob_range(self) -> Range:
        return self.manifest.blob_at, BLOB_PREFIX + self.manifest.blob_capacity


class Target(Protocol):
    """Live memory to fill: ``local`` is a view with the size of ``box``, which lies in the whole tensor. What is a
    parameter is sent for first."""

    @property
    def local(self) -> torch.Tensor: ...

    @property
    def box(self) -> Box: ...

    @property
    def parameter(self) -> bool: ...


class Landed(msgspec.Struct, frozen=True):
    """A read whose source box ``box`` lies contiguously at byte ``at`` of some bytes."""

    read: Read
    box: Box
    at: int


class _Arrivals(msgspec.Struct, frozen=True):
    """What is fetched of one remote slot: ``asides`` are bytes of which torch makes tensors when they have landed;
    ``blob`` takes the Python state, and is empty where none is fetched."""

    supply: Supply
    reads: list[Read]
    moves: Moves
    asides: list[tuple[torch.Tensor, Landed]]
    blob: torch.Tensor


class Loader:
    """Carries out a plan of reads.

    Args:
        member: this rank; slots on its node are read directly.
        targets: what each want of the plan fills.
        local: the slots of this rank's node.
        check: which chunks of a slot of this node are hashed here.
    """

    def __init__(
        self,
        vault: VaultClient,
        job: str,
        member: Member,
        targets: Sequence[Target],
        local: LocalSlots,
        check: Callable[[SlotInfo], Check] = lambda _: Check.READ,
    ) -> None:
        self._vault = vault
        self._job = job
        self._member = member
        self._targets = targets
        self._local = local
        self._check = check
        self._scratch: Path | None = None
        self._kept: set[tuple[int, Box]] = set()
        self._kept_bytes = dict(NOTHING_READ)
        self.bytes_by_source = dict(NOTHING_READ)

    def load(self, reads: Sequence[Read], supplies: Sequence[Supply], blob_of: int) -> tuple[bytes, list[BadSlot]]:
        """Fills the targets; returns the Python state of supply ``blob_of``, and the slots that failed.

        Where any failed, what was filled is not to be used. The next call, which may have other supplies, does not
        bring anew what came from other nodes and hashed right, unless the slot that it came from proved corrupt.
        """
        self.bytes_by_source = dict(self._kept_bytes)
        of_supply: dict[int, list[Read]] = defaultdict(list)
        of_supply[blob_of] = []
        for read in reads:
            of_supply[read.supply].append(read)
        local = {i: r for i, r in of_supply.items() if supplies[i].slot.is_on(self._member.node)}
        remote = {
            i: [read for read in r if (read.want, read.box) not in self._kept]
            for i, r in of_supply.items()
            if i not in local
        }
        arrivals = [
            self._arrivals(supplies[i], some, with_blob=parameters and i == blob_of)
            for parameters in (True, False)
            for i, mine in remote.items()
            for some in ([read for read in mine if self._targets[read.want].parameter is parameters],)
        ]
        blobs: list[bytes] = []
        failures: list[BadSlot] = []

        def read_local() -> None:
            for index, mine in local.items():
                try:
                    blobs.append(self._read_local(supplies[index], mine, index == blob_of))
                except BadSlot as failure:
                    failures.append(failure)

        failed, landed = self._bring(arrivals, meanwhile=read_local)
        failures += failed
        blobs += self._settle(arrivals, failures, landed)
        return b"".join(blobs), failures

    def python_state(self, supply: Supply) -> bytes:
        """One more slot's Python state. Raises BadSlot."""
        if supply.slot.is_on(self._member.node):
            return self._read_local(supply, [], with_blob=True)
        arrivals = [self._arrivals(supply, [], with_blob=True)]
        failures, landed = self._bring(arrivals)
        if failures:
            raise failures[0]
        return self._settle(arrivals, failures, landed)[0]

    def _bring(
        self, arrivals: Sequence[_Arrivals], meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[list[BadSlot], list[Batch]]:
        """All of it, from holders and from parity; the slots that failed, and what came of others and of those."""
        batches = [batch for each in arrivals for batch in batches_of(each.supply.slot, each.moves.rows())]
        streams = Streams(self._vault, self._job, (batch for batch in batches if batch.slot.group is None))
        lost = (batch for batch in batches if batch.slot.group is not None)
        landing = Landing(self._vault, self._job, self._scratch_file, lost)
        try:
            streams.begin()
            landing.begin()
            meanwhile()
            return streams.finish() + landing.finish(), streams.landed
        finally:
            streams.close()
            landing.close()

    def fetch_manifest(self, slot: SlotInfo) -> bytes:
        """A remote slot's manifest. Raises what the vault answers, Unavailable where it does not."""
        into = self._scratch_file()
        landed: Fetched = self._vault.fetch(
            job=self._job,
            node=slot.node,
            rank=slot.rank,
            version=slot.version,
            ranges=(),
            into=str(into),
            group=slot.group,
        ).result()
        with into.open("rb") as file:
            return file.read(landed.bytes)

    def _copy(self, data: torch.Tensor, supply: Supply, landed: list[Landed]) -> None:
        """Copies what landed in ``data`` to its targets."""
        sources, targets = [], []
        for item in landed:
            tensor = supply.tensor(item.read)
            here = part_of(slot_view(data, item.at, tensor.dtype, item.box.size), item.box, item.read.box)
            sources.append(here[0] if tensor.own else here)
            targets.append(self._part(item.read, tensor))
        pairs = list(zip(targets, sources, strict=True))
        lazy = [pair for pair in pairs if pair[0].is_conj() or pair[0].is_neg()]  # which torch fills one by one only
        if lazy:
            pairs = [pair for pair in pairs if not (pair[0].is_conj() or pair[0].is_neg())]
        with torch.no_grad():
            if pairs:
                torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])
            for target, source in lazy:
                target.copy_(source)

    def _count(self, supply: Supply, reads: list[Read]) -> None:
        slot = supply.slot
        kind = "node" if slot.is_on(self._member.node) else "parity" if slot.group else "remote"
        if kind == "node" and slot.rank == self._member.rank and not slot.replica:
            kind = "own"
        self.bytes_by_source[kind] += sum(r.box.volume * supply.tensor(r).itemsize for r in reads)

    # --- this node's slots

    def _read_local(self, supply: Supply, reads: list[Read], with_blob: bool) -> bytes:
        """Fills the reads' targets; returns the Python state if it is wanted. Raises BadSlot."""
        moves, rest = self._sorted(supply, reads)
        also = [(item.at, item.box.volume * supply.tensor(item.read).itemsize) for item in rest]
        if with_blob:
            also.append(supply.blob_range)
        try:
            payload = self._local.sweep(supply.slot, moves.rows(), also, self._check(supply.slot))
        finally:
            moves.settle()
        self._copy(payload, supply, rest)
        blob = _blob(payload, supply.manifest.blob_at) if with_blob else b""
        self._local.require_still(supply.slot)
        self._count(supply, reads)
        return blob

    def _sorted(self, supply: Supply, reads: list[Read]) -> tuple[Moves, list[Landed]]:
        """Those that are copies of bytes, in columns; and the others, which torch copies from tensor to tensor."""
        moves, rest = Moves(), []
        kinds = {name: dtype_of(name) for name in {supply.tensor(read).dtype for read in reads}}
        for read in reads:
            tensor, stored = supply.tensor(read), read.stored
            target = self._part(read, tensor)
            ranges = _ranges(read, tensor.itemsize) if is_plain(target, kinds[tensor.dtype]) else None
            if ranges is None:
                rest.append(Landed(read, stored.box, stored.at))
            else:
                moves.add(target, ranges)
        return moves, rest

    def _part(self, read: Read, tensor: Tensor) -> torch.Tensor:
        """The live memory that a read fills."""
        target, box = self._targets[read.want], read.box
        if tensor.own:
            box = Box(box.offset[1:], box.size[1:])
        return target.local if box == target.box else part_of(target.local, target.box, box)

    # --- other nodes' slots

    def _arrivals(self, supply: Supply, reads: list[Read], with_blob: bool) -> _Arrivals:
        """What is fetched of a remote slot: plain tensors into their own memory, others by way of one of bytes."""
        moves, rest = self._sorted(supply, reads)
        boxes = [box_to_fetch(item.read.stored.box, item.read.box) for item in rest]
        asides = []
        for item, box in zip(rest, boxes, strict=True):
            itemsize = supply.tensor(item.read).itemsize
            aside = torch.empty(box.volume * itemsize, dtype=torch.uint8)
            moves.add(aside, byte_ranges(item.box, box, itemsize, item.at))
            asides.append((aside, Landed(item.read, box, 0)))
        blob = torch.empty(supply.blob_range[1] if with_blob else 0, dtype=torch.uint8)
        if with_blob:
            moves.add(blob, [supply.blob_range])
        return _Arrivals(supply, reads, moves, asides, blob)

    def _settle(self, arrivals: Sequence[_Arrivals], failures: list[BadSlot], landed: Sequence[Batch]) -> list[bytes]:
        """After all has come; the Python state, where it was among it. Where anything failed, what came from others and
        hashed right need not come again."""
        blobs = []
        for each in arrivals:
            each.moves.settle()
            failure = next((failure for failure in failures if failure.slot is each.supply.slot), None)
            if failure is not None:
                if not failure.corrupt:
                    self._keep(each.supply, self._landed_reads(each, landed))
                continue
            for aside, item in each.asides:
                self._copy(aside, each.supply, [item])
            self._keep(each.supply, each.reads)
            if each.blob.numel():
                blobs.append(_blob(each.blob, 0))
        return blobs

    def _landed_reads(self, arrivals: _Arrivals, landed: Sequence[Batch]) -> list[Read]:
        """Those reads of a slot that failed whose targets had been filled before that, with what hashed right."""
        supply = arrivals.supply
        filled = Filled([batch.rows for batch in landed if batch.slot is supply.slot])
        aside = {id(item.read) for _, item in arrivals.asides}
        return [
            read
            for read in arrivals.reads
            if id(read) not in aside and filled.holds(self._part(read, supply.tensor(read)))
        ]

    def _keep(self, supply: Supply, reads: list[Read]) -> None:
        before = dict(self.bytes_by_source)
        self._count(supply, reads)
        for kind, nbytes in self.bytes_by_source.items():
            self._kept_bytes[kind] += nbytes - before[kind]
        self._kept.update((read.want, read.box) for read in reads)

    def _scratch_file(self) -> Path:
        """Beside this rank's segment; a rank that has none yet gets the smallest."""
        if self._scratch is None:
            segment = self._vault.open_segment(self._job, self._member.local_rank, PAGE, slots=1)
            self._scratch = Path(segment.directory) / f"scratch-{self._member.local_rank}"
        return self._scratch


def _ranges(read: Read, itemsize: int) -> list[Range] | None:
    """Where the bytes of a read lie in the slot; None where they are in many crumbs."""
    stored = read.stored
    if read.box == stored.box:
        return [(stored.at, stored.box.volume * itemsize)]
    if math.prod(read.box.size[: run_dimension(stored.box, read.box)]) > MOST_RUNS:
        return None
    return byte_ranges(stored.box, read.box, itemsize, stored.at)


def _blob(data: torch.Tensor, at: int) -> bytes:
    """Raises MalformedMessage where the length before it cannot be."""
    length = int.from_bytes(data[at : at + BLOB_PREFIX].numpy().tobytes(), "little")
    if length > data.numel() - at - BLOB_PREFIX:
        raise MalformedMessage(f"a slot's Python state says that it has {length} bytes")
    return data[at + BLOB_PREFIX : at + BLOB_PREFIX + length].numpy().tobytes()
