"""Read slots into live tensors: this node's slots from their mapping, others' from the vaults that hold them.

All bytes are checked before use. The chunks read from a local slot are hashed, here or by the rank that wrote it;
remote bytes are compared with the digests sealed there. A slot that fails is reported, never worked around.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

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
from everstep.layout.segment_header import PAGE_BYTES
from everstep.wire.v1.local import Fetched, SlotInfo
from everstep.wire.v1.training import Member
from everstep_trainer.digests.piece_digests import places_of
from everstep_trainer.slots.byte_moves import TensorCopies, is_byte_copyable, split_into_batches
from everstep_trainer.slots.copy import slot_view, view_of_box
from everstep_trainer.slots.local_slots import BadSlot, HashScope, LocalSlots
from everstep_trainer.slots.remote_slots import ScratchFetch, SlotStreams, make_fetch
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.state.python_value_codec import dtype_of
from everstep_trainer.state.tensors import TrackedTensor

# ---- resharding: from stored boxes to needed boxes, in byte ranges. Pure: any layout to any other.

MAX_RUNS = 256
"""A box of more contiguous runs than this is fetched with its surrounding rows, unless these are much larger."""
MAX_EXCESS_FACTOR = 4  # largest ratio of such rows to the wanted bytes


class NeededBox(msgspec.Struct, frozen=True, gc=False):
    """A needed box of tensor ``tensor_index`` (index in the catalog)."""

    tensor_index: int
    box: Box


class PlannedRead(msgspec.Struct, frozen=True, gc=False):
    """The part ``box`` of a needed box is read from ``stored`` in source ``source_index``."""

    needed_index: int
    source_index: int
    stored: StoredBox
    box: Box


def plan_reads(needed: Sequence[NeededBox], sources: Iterable[Manifest]) -> list[PlannedRead]:
    """Return reads of every needed byte, once, from the first of ``sources`` that has it. Raises NotRestorable."""
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
        raise NotRestorable(f"{name}: the part at {boxes[0].offset} of size {boxes[0].size} is in no usable slot")
    return reads


def _plan_from_stored(
    needed_index: int, source_index: int, stored: StoredBox, uncovered: list[Box], reads: list[PlannedRead]
) -> list[Box]:
    """Add reads of the uncovered parts that ``stored`` has; return the parts still missing."""
    lacking: list[Box] = []
    for part in uncovered:
        common = part.intersect(stored.box)
        if common is None:
            lacking.append(part)
        else:
            reads.append(PlannedRead(needed_index, source_index, stored, common))
            lacking += part.subtract(common)
    return lacking


def box_to_fetch(stored: Box, needed: Box) -> Box:
    """Return the box to fetch: ``needed`` itself, or whole rows of ``stored`` if it consists of many small runs."""
    runs = math.prod(needed.size[: run_dimension(stored, needed)])
    if runs <= MAX_RUNS:
        return needed
    rows = Box((needed.offset[0], *stored.offset[1:]), (needed.size[0], *stored.size[1:]))
    return rows if rows.volume <= MAX_EXCESS_FACTOR * needed.volume else needed


NO_BYTES_READ = {"own": 0, "node": 0, "remote": 0, "parity": 0}


class ReadSource(msgspec.Struct, frozen=True):
    """A slot to read from, with its manifest."""

    slot: SlotInfo
    manifest: Manifest

    def tensor(self, read: PlannedRead) -> TensorInfo:
        return self.manifest.catalog[read.stored.tensor]


class RestoreTarget(msgspec.Struct, frozen=True):
    """Live memory to fill: a view with the size of ``box``, a part of the whole tensor. Parameters are read first."""

    local: torch.Tensor
    box: Box
    is_parameter: bool = True


class BufferedRead(msgspec.Struct, frozen=True):
    """A read whose source box ``box`` lies contiguously at byte ``offset`` of some bytes."""

    read: PlannedRead
    box: Box
    offset: int


class _RemoteFetch(msgspec.Struct, frozen=True):
    """The fetch of one remote slot: into live memory, into buffers that torch copies from, and into ``blob``."""

    source: ReadSource
    reads: list[PlannedRead]
    moves: TensorCopies
    staged_reads: list[tuple[torch.Tensor, BufferedRead]]
    blob: torch.Tensor
    digests: torch.Tensor


class FilledPiece(NamedTuple):
    """Live memory that was filled with a whole stored box.

    Attributes:
        source: The slot.
        read: The read.
        live: The memory.
        place: Its place in the digest of the slot's boxes (`everstep_trainer.digests.piece_digests`).
        digest: Its digest there, as kept in the slot.
    """

    source: ReadSource
    read: PlannedRead
    live: torch.Tensor
    place: int
    digest: int

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.source.tensor(self.read).name


@dataclass(eq=False)
class SlotLoader:
    """Carries out a plan of reads into ``targets``, one per needed box; ``hash_scope``: local chunks hashed here;
    ``reads_digests``: also of the digests that the slots keep."""

    _vault: VaultClient
    _job: str
    _member: Member
    _targets: Sequence[RestoreTarget | TrackedTensor]
    _local: LocalSlots
    _hash_scope: Callable[[SlotInfo], HashScope] = lambda _: HashScope.READ
    reads_digests: bool = False

    def __post_init__(self) -> None:
        self._scratch: Path | None = None
        self._filled: dict[tuple[int, Box], FilledPiece] = {}
        self._kept_reads: dict[tuple[int, Box], tuple[ReadSource, PlannedRead]] = {}
        self.bytes_by_source = dict(NO_BYTES_READ)

    def load(self, reads: list[PlannedRead], sources: list[ReadSource], blob_from: int) -> tuple[bytes, list[BadSlot]]:
        """Fill the targets; return the Python state of source ``blob_from``, and the slots that failed. After a
        failure the targets must not be used; a repeated call does not fetch again from nodes that did not fail."""
        self.bytes_by_source = dict(NO_BYTES_READ)
        for source, read in self._kept_reads.values():
            self._count(source, [read])
        self._filled = {key: piece for key, piece in self._filled.items() if key in self._kept_reads}
        by_source: dict[int, list[PlannedRead]] = defaultdict(list)
        by_source[blob_from] = []
        for read in reads:
            by_source[read.source_index].append(read)
        local = {i: mine for i, mine in by_source.items() if sources[i].slot.is_on(self._member.node)}
        remote = [i for i in by_source if i not in local]
        fetches = []
        for parameters in (True, False):
            for i in remote:
                wanted = [
                    read
                    for read in by_source[i]
                    if self._targets[read.needed_index].is_parameter is parameters
                    and (read.needed_index, read.box) not in self._kept_reads
                ]
                fetches.append(self._plan_remote_fetch(sources[i], wanted, parameters and i == blob_from))
        blobs: list[bytes] = []
        failures: list[BadSlot] = []

        def read_local() -> None:
            for index, mine in local.items():
                try:
                    blobs.append(self._read_local(sources[index], mine, index == blob_from))
                except BadSlot as failure:
                    failures.append(failure)

        failures += self._fetch_all(fetches, meanwhile=read_local)
        blobs += self._finish(fetches, failures)
        return b"".join(blobs), failures

    @property
    def filled_pieces(self) -> list[FilledPiece]:
        """Memory filled with whole boxes whose digests are known."""
        return list(self._filled.values())

    def drop(self, slot: SlotInfo) -> None:
        """Fetch again all that came from this slot, also what has no digest."""
        self._kept_reads = {key: kept for key, kept in self._kept_reads.items() if kept[0].slot != slot}

    def read_python_state(self, source: ReadSource) -> bytes:
        """Return the Python state of another slot. Raises BadSlot."""
        if source.slot.is_on(self._member.node):
            return self._read_local(source, [], with_blob=True)
        fetches = [self._plan_remote_fetch(source, [], with_blob=True)]
        if failures := self._fetch_all(fetches):
            raise failures[0]
        return self._finish(fetches, [])[0]

    def _fetch_all(self, fetches: list[_RemoteFetch], meanwhile: Callable[[], None] = lambda: None) -> list[BadSlot]:
        """Fetch everything, from holders and from parity; return the failed slots."""
        batches = [batch for each in fetches for batch in split_into_batches(each.source.slot, each.moves.table())]
        streams = SlotStreams(self._vault, self._job, (batch for batch in batches if batch.slot.parity_group is None))
        lost = [batch for batch in batches if batch.slot.parity_group is not None]
        landing = ScratchFetch(self._vault, self._job, self._scratch_file, lost)
        try:
            streams.start()
            landing.start()
            meanwhile()
            return streams.finish() + landing.finish()
        finally:
            streams.close()
            landing.close()

    def fetch_manifest(self, slot: SlotInfo) -> bytes:
        """Return a remote slot's manifest. Raises the vault's error, or Unavailable if it does not answer."""
        into = self._scratch_file()
        fetched: Fetched = self._vault.fetch(make_fetch(self._job, slot, into)).result()
        with into.open("rb") as file:
            return file.read(fetched.bytes)

    def _copy(self, data: torch.Tensor, read_source: ReadSource, landed: list[BufferedRead]) -> None:
        """Copy the received ``data`` to its targets."""
        sources, targets = [], []
        for item in landed:
            tensor = read_source.tensor(item.read)
            here = view_of_box(slot_view(data, item.offset, tensor.dtype, item.box.size), item.box, item.read.box)
            sources.append(here[0] if tensor.per_rank else here)
            targets.append(self._part(item.read, tensor))
        pairs = list(zip(targets, sources, strict=True))
        with torch.no_grad():
            if any(target.is_conj() or target.is_neg() for target in targets):  # torch fills these only one by one
                for target, source in pairs:
                    target.copy_(source)
            elif pairs:
                torch._foreach_copy_(targets, sources)

    def _count(self, source: ReadSource, reads: list[PlannedRead]) -> None:
        slot = source.slot
        kind = "node" if slot.is_on(self._member.node) else "parity" if slot.parity_group else "remote"
        if kind == "node" and slot.rank == self._member.rank and not slot.replica:
            kind = "own"
        self.bytes_by_source[kind] += sum(r.box.volume * source.tensor(r).itemsize for r in reads)

    def _read_local(self, source: ReadSource, reads: list[PlannedRead], with_blob: bool) -> bytes:
        """Fill the reads' targets; return the Python state if it is wanted. Raises BadSlot."""
        moves, rest = self._sorted(source, reads)
        also = [(item.offset, item.box.volume * source.tensor(item.read).itemsize) for item in rest]
        if with_blob:
            also.append(source.manifest.python_state_range)
        digests_at, digest_bytes = self._digests_range(source, reads)
        if digest_bytes:
            also.append((digests_at, digest_bytes))
        try:
            payload = self._local.copy_and_check(source.slot, moves.table(), also, self._hash_scope(source.slot))
        finally:
            moves.mark_written()
        self._copy(payload, source, rest)
        blob = _blob(payload, source.manifest.blob_offset) if with_blob else b""
        self._record_filled(source, reads, payload[digests_at : digests_at + digest_bytes])
        self._local.require_unchanged(source.slot)
        self._count(source, reads)
        return blob

    def _digests_range(self, source: ReadSource, reads: list[PlannedRead]) -> Range:
        return source.manifest.digests_range if self.reads_digests and reads else (0, 0)

    def _record_filled(self, source: ReadSource, reads: list[PlannedRead], digests: torch.Tensor) -> None:
        """Record the reads of whole boxes, if the slot keeps ``digests`` of them and nothing was converted."""
        if not digests.numel():
            return
        is_marked, *known = digests.clone().view(torch.int64).tolist()
        if not is_marked:
            return
        catalog, stored = source.manifest.catalog, source.manifest.stored
        kinds = [(dtype_of(catalog[each.tensor].dtype), catalog[each.tensor].itemsize) for each in stored]
        places = places_of((kind, size * each.box.volume) for (kind, size), each in zip(kinds, stored, strict=True))
        number_of = {each: number for number, each in enumerate(stored)}
        for read in reads:
            number, live = number_of[read.stored], self._part(read, source.tensor(read))
            if read.box == read.stored.box and live.dtype == kinds[number][0]:
                piece = FilledPiece(source, read, live, places[number], known[number])
                self._filled[read.needed_index, read.box] = piece

    def _sorted(self, source: ReadSource, reads: list[PlannedRead]) -> tuple[TensorCopies, list[BufferedRead]]:
        """Sort reads into byte copies, in columns, and others, which torch copies between tensors."""
        moves, rest = TensorCopies(), []
        kinds = {name: dtype_of(name) for name in {source.tensor(read).dtype for read in reads}}
        for read in reads:
            tensor, stored = source.tensor(read), read.stored
            target = self._part(read, tensor)
            ranges = _ranges(read, tensor.itemsize) if is_byte_copyable(target, kinds[tensor.dtype]) else None
            if ranges is None:
                rest.append(BufferedRead(read, stored.box, stored.offset))
            else:
                moves.add(target, ranges)
        return moves, rest

    def _part(self, read: PlannedRead, tensor: TensorInfo) -> torch.Tensor:
        """Return the live memory that a read fills."""
        target, box = self._targets[read.needed_index], read.box
        if tensor.per_rank:
            box = Box(box.offset[1:], box.size[1:])
        return target.local if box == target.box else view_of_box(target.local, target.box, box)

    def _plan_remote_fetch(self, source: ReadSource, reads: list[PlannedRead], with_blob: bool) -> _RemoteFetch:
        """Return the fetch of a remote slot: plain tensors directly into their memory, others through a byte buffer."""
        moves, rest = self._sorted(source, reads)
        boxes = [box_to_fetch(item.read.stored.box, item.read.box) for item in rest]
        asides = []
        for item, box in zip(rest, boxes, strict=True):
            itemsize = source.tensor(item.read).itemsize
            aside = torch.empty(box.volume * itemsize, dtype=torch.uint8)
            moves.add(aside, byte_ranges(item.box, box, itemsize, item.offset))
            asides.append((aside, BufferedRead(item.read, box, 0)))
        state, kept = source.manifest.python_state_range if with_blob else (0, 0), self._digests_range(source, reads)
        blob, digests = (torch.empty(length, dtype=torch.uint8) for _, length in (state, kept))
        for landing, place in ((blob, state), (digests, kept)):
            if landing.numel():
                moves.add(landing, [place])
        return _RemoteFetch(source, reads, moves, asides, blob, digests)

    def _finish(self, fetches: Sequence[_RemoteFetch], failures: list[BadSlot]) -> list[bytes]:
        """Finish after everything arrived; return the Python states."""
        blobs = []
        for each in fetches:
            each.moves.mark_written()
            if any(failure.slot is each.source.slot for failure in failures):
                continue
            for aside, item in each.staged_reads:
                self._copy(aside, each.source, [item])
            self._count(each.source, each.reads)
            self._kept_reads |= {(read.needed_index, read.box): (each.source, read) for read in each.reads}
            self._record_filled(each.source, each.reads, each.digests)
            if each.blob.numel():
                blobs.append(_blob(each.blob, 0))
        return blobs

    def _scratch_file(self) -> Path:
        """Return a scratch file beside this rank's segment; a rank without one gets the smallest."""
        if self._scratch is None:
            segment = self._vault.open_segment(self._job, self._member.local_rank, PAGE_BYTES, slots=1)
            self._scratch = Path(segment.path).with_name(f"scratch-{self._member.local_rank}")
        return self._scratch


def _ranges(read: PlannedRead, itemsize: int) -> list[Range] | None:
    """Return the byte ranges of a read in the slot; None if it consists of too many runs."""
    stored = read.stored
    if read.box == stored.box:
        return [(stored.offset, stored.box.volume * itemsize)]
    if math.prod(read.box.size[: run_dimension(stored.box, read.box)]) > MAX_RUNS:
        return None
    return byte_ranges(stored.box, read.box, itemsize, stored.offset)


def _blob(data: torch.Tensor, at: int) -> bytes:
    """Return the Python state behind its length. Raises MalformedMessage for an impossible length."""
    length = int.from_bytes(data[at : at + BLOB_LENGTH_BYTES].numpy().tobytes(), "little")
    if length > data.numel() - at - BLOB_LENGTH_BYTES:
        raise MalformedMessage(f"a slot's Python state claims an impossible length of {length} bytes")
    return data[at + BLOB_LENGTH_BYTES : at + BLOB_LENGTH_BYTES + length].numpy().tobytes()
