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
from everstep.layout.manifests import (
    BLOB_LENGTH_BYTES,
    Box,
    Manifest,
    Range,
    StoredBox,
    TensorInfo,
    byte_ranges,
    run_dimension,
)
from everstep.layout.segments import PAGE_BYTES
from everstep.wire.v1.local import Fetched, SlotInfo
from everstep.wire.v1.training import Member
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore.byte_moves import (
    FetchBatch,
    FilledMemory,
    TensorCopies,
    is_byte_copyable,
    split_into_batches,
)
from everstep_trainer.restore.local_slots import BadSlot, HashScope, LocalSlots
from everstep_trainer.restore.remote_slots import ScratchFetch, SlotStreams
from everstep_trainer.snapshot.copy import slot_view, view_of_box
from everstep_trainer.state.blob import dtype_of

# ---- reshard
# From boxes as they were stored to boxes as they are needed, in byte ranges. Pure: any layout to any other.

MAX_RUNS = 256
"""A box of more contiguous runs than this is fetched with the rows it lies in, where that is not much more."""
MAX_EXCESS_FACTOR = 4
"""How many times the wanted bytes such rows may have."""


class NeededBox(msgspec.Struct, frozen=True, gc=False):
    """Box ``box`` of tensor ``tensor_index`` (index in the catalog) is needed."""

    tensor_index: int
    box: Box


class PlannedRead(msgspec.Struct, frozen=True, gc=False):
    """Part ``box`` of want ``needed_index`` comes from ``stored`` in supply ``source_index``."""

    needed_index: int
    source_index: int
    stored: StoredBox
    box: Box


def plan_reads(needed: Sequence[NeededBox], sources: Iterable[Manifest]) -> list[PlannedRead]:
    """Reads that fill every want exactly once, each byte from the first supply that has it: order them by nearness.

    Takes no more of ``sources`` than it needs. Raises NotRestorable where something is in no supply.
    """
    wanting: dict[int, list[int]] = defaultdict(list)
    for index, want in enumerate(needed):
        wanting[want.tensor_index].append(index)
    rest = {index: [want.box] for index, want in enumerate(needed) if want.box.volume}
    reads: list[PlannedRead] = []
    catalog: tuple[TensorInfo, ...] = ()
    for supply, manifest in enumerate(sources):
        catalog = manifest.catalog
        for stored in manifest.stored:
            for index in wanting.get(stored.tensor, ()):
                if (lacking := rest.get(index)) is None:
                    continue
                if len(lacking) > 1 or lacking[0] != stored.box:
                    lacking = _plan_from_stored(index, supply, stored, lacking, reads)
                else:
                    reads.append(PlannedRead(index, supply, stored, stored.box))
                    lacking = []
                if lacking:
                    rest[index] = lacking
                else:
                    del rest[index]
        if not rest:
            return reads
    for index, boxes in rest.items():
        name = catalog[needed[index].tensor_index].name if catalog else f"tensor {needed[index].tensor_index}"
        raise NotRestorable(f"{name}: the part at {boxes[0].offset} of size {boxes[0].size} is in no slot that is left")
    return reads


def _plan_from_stored(
    needed_index: int, source_index: int, stored: StoredBox, uncovered: list[Box], reads: list[PlannedRead]
) -> list[Box]:
    """Adds reads of what ``stored`` has of ``uncovered``; returns what is still lacking."""
    lacking: list[Box] = []
    for part in uncovered:
        common = part.intersect(stored.box)
        if common is None:
            lacking.append(part)
        else:
            reads.append(PlannedRead(needed_index, source_index, stored, common))
            lacking += part.subtract(common)
    return lacking


def box_to_fetch(held: Box, wanted: Box) -> Box:
    """What to move over the network for ``wanted``: itself, or whole rows of ``held`` where it lies in many crumbs."""
    runs = math.prod(wanted.size[: run_dimension(held, wanted)])
    if runs <= MAX_RUNS:
        return wanted
    rows = Box((wanted.offset[0], *held.offset[1:]), (wanted.size[0], *held.size[1:]))
    return rows if rows.volume <= MAX_EXCESS_FACTOR * wanted.volume else wanted


NO_BYTES_READ = {"own": 0, "node": 0, "remote": 0, "parity": 0}


class ReadSource(msgspec.Struct, frozen=True):
    """A slot to read from, with its manifest."""

    slot: SlotInfo
    manifest: Manifest

    def tensor(self, read: PlannedRead) -> TensorInfo:
        return self.manifest.catalog[read.stored.tensor]

    @property
    def blob_range(self) -> Range:
        return self.manifest.blob_offset, BLOB_LENGTH_BYTES + self.manifest.blob_capacity


class RestoreTarget(Protocol):
    """Live memory to fill: ``local`` is a view with the size of ``box``, which lies in the whole tensor. What is a
    parameter is sent for first."""

    @property
    def local(self) -> torch.Tensor: ...

    @property
    def box(self) -> Box: ...

    @property
    def is_parameter(self) -> bool: ...


class LandedRead(msgspec.Struct, frozen=True):
    """A read whose source box ``box`` lies contiguously at byte ``offset`` of some bytes."""

    read: PlannedRead
    box: Box
    offset: int


class _Arrivals(msgspec.Struct, frozen=True):
    """What is fetched of one remote slot: ``staged_reads`` are bytes of which torch makes tensors when they have
    landed; ``blob`` takes the Python state, and is empty where none is fetched."""

    source: ReadSource
    reads: list[PlannedRead]
    moves: TensorCopies
    staged_reads: list[tuple[torch.Tensor, LandedRead]]
    blob: torch.Tensor


class SlotLoader:
    """Carries out a plan of reads.

    Args:
        member: this rank; slots on its node are read directly.
        targets: what each want of the plan fills.
        local: the slots of this rank's node.
        hash_scope: which chunks of a slot of this node are hashed here.
    """

    def __init__(
        self,
        vault: VaultClient,
        job: str,
        member: Member,
        targets: Sequence[RestoreTarget],
        local: LocalSlots,
        hash_scope: Callable[[SlotInfo], HashScope] = lambda _: HashScope.READ,
    ) -> None:
        self._vault = vault
        self._job = job
        self._member = member
        self._targets = targets
        self._local = local
        self._hash_scope = hash_scope
        self._scratch: Path | None = None
        self._kept_reads: set[tuple[int, Box]] = set()
        self._kept_bytes = dict(NO_BYTES_READ)
        self.bytes_by_source = dict(NO_BYTES_READ)

    def load(
        self, reads: Sequence[PlannedRead], sources: Sequence[ReadSource], blob_source: int
    ) -> tuple[bytes, list[BadSlot]]:
        """Fills the targets; returns the Python state of supply ``blob_source``, and the slots that failed.

        Where any failed, what was filled is not to be used. The next call, which may have other supplies, does not
        bring anew what came from other nodes and hashed right, unless the slot that it came from proved corrupt.
        """
        self.bytes_by_source = dict(self._kept_bytes)
        of_supply: dict[int, list[PlannedRead]] = defaultdict(list)
        of_supply[blob_source] = []
        for read in reads:
            of_supply[read.source_index].append(read)
        local = {i: r for i, r in of_supply.items() if sources[i].slot.is_on(self._member.node)}
        remote = {
            i: [read for read in r if (read.needed_index, read.box) not in self._kept_reads]
            for i, r in of_supply.items()
            if i not in local
        }
        arrivals = [
            self._arrivals(sources[i], some, with_blob=parameters and i == blob_source)
            for parameters in (True, False)
            for i, mine in remote.items()
            for some in ([read for read in mine if self._targets[read.needed_index].is_parameter is parameters],)
        ]
        blobs: list[bytes] = []
        failures: list[BadSlot] = []

        def read_local() -> None:
            for index, mine in local.items():
                try:
                    blobs.append(self._read_local(sources[index], mine, index == blob_source))
                except BadSlot as failure:
                    failures.append(failure)

        failed, landed = self._fetch_all(arrivals, meanwhile=read_local)
        failures += failed
        blobs += self._settle(arrivals, failures, landed)
        return b"".join(blobs), failures

    def read_python_state(self, supply: ReadSource) -> bytes:
        """One more slot's Python state. Raises BadSlot."""
        if supply.slot.is_on(self._member.node):
            return self._read_local(supply, [], with_blob=True)
        arrivals = [self._arrivals(supply, [], with_blob=True)]
        failures, landed = self._fetch_all(arrivals)
        if failures:
            raise failures[0]
        return self._settle(arrivals, failures, landed)[0]

    def _fetch_all(
        self, arrivals: Sequence[_Arrivals], meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[list[BadSlot], list[FetchBatch]]:
        """All of it, from holders and from parity; the slots that failed, and what came of others and of those."""
        batches = [batch for each in arrivals for batch in split_into_batches(each.source.slot, each.moves.table())]
        streams = SlotStreams(self._vault, self._job, (batch for batch in batches if batch.slot.parity_group is None))
        lost = (batch for batch in batches if batch.slot.parity_group is not None)
        landing = ScratchFetch(self._vault, self._job, self._scratch_file, lost)
        try:
            streams.start()
            landing.start()
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
            target_path=str(into),
            parity_group=slot.parity_group,
        ).result()
        with into.open("rb") as file:
            return file.read(landed.bytes)

    def _copy(self, data: torch.Tensor, supply: ReadSource, landed: list[LandedRead]) -> None:
        """Copies what landed in ``data`` to its targets."""
        sources, targets = [], []
        for item in landed:
            tensor = supply.tensor(item.read)
            here = view_of_box(slot_view(data, item.offset, tensor.dtype, item.box.size), item.box, item.read.box)
            sources.append(here[0] if tensor.per_rank else here)
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

    def _count(self, supply: ReadSource, reads: list[PlannedRead]) -> None:
        slot = supply.slot
        kind = "node" if slot.is_on(self._member.node) else "parity" if slot.parity_group else "remote"
        if kind == "node" and slot.rank == self._member.rank and not slot.replica:
            kind = "own"
        self.bytes_by_source[kind] += sum(r.box.volume * supply.tensor(r).itemsize for r in reads)

    # --- this node's slots

    def _read_local(self, supply: ReadSource, reads: list[PlannedRead], with_blob: bool) -> bytes:
        """Fills the reads' targets; returns the Python state if it is wanted. Raises BadSlot."""
        moves, rest = self._sorted(supply, reads)
        also = [(item.offset, item.box.volume * supply.tensor(item.read).itemsize) for item in rest]
        if with_blob:
            also.append(supply.blob_range)
        try:
            payload = self._local.copy_and_check(supply.slot, moves.table(), also, self._hash_scope(supply.slot))
        finally:
            moves.mark_written()
        self._copy(payload, supply, rest)
        blob = _blob(payload, supply.manifest.blob_offset) if with_blob else b""
        self._local.require_unchanged(supply.slot)
        self._count(supply, reads)
        return blob

    def _sorted(self, supply: ReadSource, reads: list[PlannedRead]) -> tuple[TensorCopies, list[LandedRead]]:
        """Those that are copies of bytes, in columns; and the others, which torch copies from tensor to tensor."""
        moves, rest = TensorCopies(), []
        kinds = {name: dtype_of(name) for name in {supply.tensor(read).dtype for read in reads}}
        for read in reads:
            tensor, stored = supply.tensor(read), read.stored
            target = self._part(read, tensor)
            ranges = _ranges(read, tensor.itemsize) if is_byte_copyable(target, kinds[tensor.dtype]) else None
            if ranges is None:
                rest.append(LandedRead(read, stored.box, stored.offset))
            else:
                moves.add(target, ranges)
        return moves, rest

    def _part(self, read: PlannedRead, tensor: TensorInfo) -> torch.Tensor:
        """The live memory that a read fills."""
        target, box = self._targets[read.needed_index], read.box
        if tensor.per_rank:
            box = Box(box.offset[1:], box.size[1:])
        return target.local if box == target.box else view_of_box(target.local, target.box, box)

    # --- other nodes' slots

    def _arrivals(self, supply: ReadSource, reads: list[PlannedRead], with_blob: bool) -> _Arrivals:
        """What is fetched of a remote slot: plain tensors into their own memory, others by way of one of bytes."""
        moves, rest = self._sorted(supply, reads)
        boxes = [box_to_fetch(item.read.stored.box, item.read.box) for item in rest]
        asides = []
        for item, box in zip(rest, boxes, strict=True):
            itemsize = supply.tensor(item.read).itemsize
            aside = torch.empty(box.volume * itemsize, dtype=torch.uint8)
            moves.add(aside, byte_ranges(item.box, box, itemsize, item.offset))
            asides.append((aside, LandedRead(item.read, box, 0)))
        blob = torch.empty(supply.blob_range[1] if with_blob else 0, dtype=torch.uint8)
        if with_blob:
            moves.add(blob, [supply.blob_range])
        return _Arrivals(supply, reads, moves, asides, blob)

    def _settle(
        self, arrivals: Sequence[_Arrivals], failures: list[BadSlot], landed: Sequence[FetchBatch]
    ) -> list[bytes]:
        """After all has come; the Python state, where it was among it. Where anything failed, what came from others and
        hashed right need not come again."""
        blobs = []
        for each in arrivals:
            each.moves.mark_written()
            failure = next((failure for failure in failures if failure.slot is each.source.slot), None)
            if failure is not None:
                if not failure.is_corrupt:
                    self._keep(each.source, self._landed_reads(each, landed))
                continue
            for aside, item in each.staged_reads:
                self._copy(aside, each.source, [item])
            self._keep(each.source, each.reads)
            if each.blob.numel():
                blobs.append(_blob(each.blob, 0))
        return blobs

    def _landed_reads(self, arrivals: _Arrivals, landed: Sequence[FetchBatch]) -> list[PlannedRead]:
        """Those reads of a slot that failed whose targets had been filled before that, with what hashed right."""
        supply = arrivals.source
        filled = FilledMemory([batch.copies for batch in landed if batch.slot is supply.slot])
        aside = {id(item.read) for _, item in arrivals.staged_reads}
        return [
            read
            for read in arrivals.reads
            if id(read) not in aside and filled.contains(self._part(read, supply.tensor(read)))
        ]

    def _keep(self, supply: ReadSource, reads: list[PlannedRead]) -> None:
        before = dict(self.bytes_by_source)
        self._count(supply, reads)
        for kind, nbytes in self.bytes_by_source.items():
            self._kept_bytes[kind] += nbytes - before[kind]
        self._kept_reads.update((read.needed_index, read.box) for read in reads)

    def _scratch_file(self) -> Path:
        """Beside this rank's segment; a rank that has none yet gets the smallest."""
        if self._scratch is None:
            segment = self._vault.open_segment(self._job, self._member.local_rank, PAGE_BYTES, slots=1)
            self._scratch = Path(segment.directory) / f"scratch-{self._member.local_rank}"
        return self._scratch


def _ranges(read: PlannedRead, itemsize: int) -> list[Range] | None:
    """Where the bytes of a read lie in the slot; None where they are in many crumbs."""
    stored = read.stored
    if read.box == stored.box:
        return [(stored.offset, stored.box.volume * itemsize)]
    if math.prod(read.box.size[: run_dimension(stored.box, read.box)]) > MAX_RUNS:
        return None
    return byte_ranges(stored.box, read.box, itemsize, stored.offset)


def _blob(data: torch.Tensor, at: int) -> bytes:
    """Raises MalformedMessage where the length before it cannot be."""
    length = int.from_bytes(data[at : at + BLOB_LENGTH_BYTES].numpy().tobytes(), "little")
    if length > data.numel() - at - BLOB_LENGTH_BYTES:
        raise MalformedMessage(f"a slot's Python state says that it has {length} bytes")
    return data[at + BLOB_LENGTH_BYTES : at + BLOB_LENGTH_BYTES + length].numpy().tobytes()
