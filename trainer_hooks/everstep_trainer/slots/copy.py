"""Copy live tensors into slots, through views made once per plan.

On the CPU all pieces are copied without Python's lock, and hashed on the way if the native code is there. On each GPU
they go to page-locked slot memory on a separate stream, between an event of the training stream and one that the next
optimizer step waits for.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor

from everstep.layout.manifests import BLOB_LENGTH_BYTES, Box, Manifest
from everstep.layout.slots import CHUNK_BYTES, chunk_count
from everstep.native import MIN_BYTES, CopyHash, copy_hash
from everstep_trainer.digests.digest import WeightedDigest, combined_digest, tensor_digest, to_hex
from everstep_trainer.digests.piece_digests import separate_digests
from everstep_trainer.slots.byte_moves import CopyTable, is_byte_copyable
from everstep_trainer.slots.shares import RankShare
from everstep_trainer.state.python_value_codec import dtype_of
from everstep_trainer.state.spots import Spots, SpotValues
from everstep_trainer.state.tensors import TrackedTensor

# ---- devices of a rank's state and of a thread


def gpus_of(tensors: Iterable[TrackedTensor]) -> tuple[torch.device, ...]:
    """Return the GPUs that tracked tensors are on, lowest first; mostly one, and none if all are on the host."""
    found = {tensor.local.device for tensor in tensors if tensor.local.is_cuda}
    return tuple(sorted(found, key=lambda device: device.index or 0))


def current_gpu() -> torch.device | None:
    """Return the calling thread's current GPU; None in a process that has not used CUDA."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.device("cuda", torch.cuda.current_device())


# ---- copy many tensors into one slot


class SlotTargets(list[torch.Tensor]):
    """Views into a slot. ``payload``: all bytes of the slot that are hashed, if digests are wanted. ``digests``: the
    room for those of the views, behind their mark."""

    def __init__(
        self,
        views: Iterable[torch.Tensor],
        payload: torch.Tensor | None = None,
        digests: torch.Tensor | None = None,
    ) -> None:
        super().__init__(views)
        self.payload, self._digests = payload, digests
        self._spots: tuple[tuple[int, ...], Spots] | None = None

    def spots(self, numbers: tuple[int, ...], places: int) -> Spots:
        """Return so many places in each of the views of these numbers."""
        if self._spots is None or self._spots[0] != numbers or self._spots[1].places != places:
            self._spots = numbers, Spots([self[number] for number in numbers], places)
        return self._spots[1]

    def keep_digests(self, digests: torch.Tensor | None) -> None:
        """Write the digest of each view into the slot, or that there are none."""
        if self._digests is not None:
            self._digests[0] = int(digests is not None)
            if digests is not None:
                self._digests[1:].copy_(digests)


def copy_all(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy between pairs of tensors of equal dtype and shape, mostly without Python's lock."""
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)


# With the native code, the digests of the slot's chunks are computed in the same pass, as fast as a plain copy. The
# data need not be read again when the slot is sealed, and the digests are those of the live memory.

MIN_THREAD_BYTES = 16 << 20


class _PayloadChunk(NamedTuple):
    """A chunk of the payload, filled in one call: ``rows`` copy to offsets ``source`` from addresses ``target``."""

    address: int
    length: int
    rows: CopyTable
    columns: tuple[int, int, int]
    """Addresses of the columns of ``rows``."""


class HashingCopyBatch:
    """Pairs of tensors of equal dtype and shape, copied repeatedly in fixed memory. All of ``payload`` is hashed."""

    def __init__(
        self, payload: torch.Tensor, targets: list[torch.Tensor], sources: list[torch.Tensor], native: CopyHash
    ) -> None:
        self._native, self._payload = native, payload
        pairs = [(target, source) for target, source in zip(targets, sources, strict=True) if source.nbytes]
        self._plain = [(to, source) for to, source in pairs if is_byte_copyable(source, source.dtype)]
        others = [(to, source) for to, source in pairs if not is_byte_copyable(source, source.dtype)]
        self._targets, self._sources = [target for target, _ in others], [source for _, source in others]
        self._chunks = list(self._cut())

    def copy(self) -> list[bytes]:
        """Copy everything, mostly without Python's lock; return the xxh3-128 of each chunk."""
        copy_all(self._targets, self._sources)
        digests = [b""] * len(self._chunks)
        todo = iter(range(len(digests)))

        def work() -> None:
            for number in todo:
                digests[number] = self._fill(self._chunks[number])

        worth = min(torch.get_num_threads(), self._payload.numel() // MIN_THREAD_BYTES)
        helpers = [threading.Thread(target=work, name="everstep-copy", daemon=True) for _ in range(worth - 1)]
        for helper in helpers:
            helper.start()
        work()
        for helper in helpers:
            helper.join()
        if not all(digests):
            raise RuntimeError("a copying thread failed")
        return digests

    def _cut(self) -> Iterator[_PayloadChunk]:
        base = self._payload.data_ptr()
        copies = [(to.data_ptr() - base, source.data_ptr(), source.nbytes) for to, source in self._plain]
        rows = CopyTable(*np.array(sorted(copies), np.int64).reshape(-1, 3).T.copy()).split_at_multiples(CHUNK_BYTES)
        count = chunk_count(self._payload.numel())
        bounds = np.searchsorted(rows.source, np.arange(count + 1) * CHUNK_BYTES).tolist()
        for number, (first, last) in enumerate(itertools.pairwise(bounds)):
            start = number * CHUNK_BYTES
            source, target, length = (column[first:last] for column in rows)
            size = min(CHUNK_BYTES, self._payload.numel() - start)
            part = CopyTable(source - start, target.copy(), length.copy())
            columns = part.source.ctypes.data, part.target.ctypes.data, part.length.ctypes.data
            yield _PayloadChunk(base + start, size, part, columns)

    def _fill(self, chunk: _PayloadChunk) -> bytes:
        address, length, rows, columns = chunk
        if length >= MIN_BYTES:
            return self._native.gather(address, length, *columns, len(rows.source))
        for to, source, nbytes in zip(*(column.tolist() for column in rows), strict=True):
            ctypes.memmove(address + to, source, nbytes)
        return xxhash.xxh3_128_digest(ctypes.string_at(address, length))


MakeDigests = Callable[[], dict[str, WeightedDigest]]
"""Makes the digests, or returns earlier ones. Their buffers are cleared on the then current stream."""

ReadSpots = Callable[[], SpotValues | None]
"""Reads the parameters' bytes at a few places, on the then current streams."""

MAX_COPY_BATCHES = 16  # one for each slot of a segment, and some for earlier segments


def view_of_box(local: torch.Tensor, local_box: Box, selected_box: Box) -> torch.Tensor:
    """Return the view of ``local``, which is ``local_box`` of a tensor, on ``selected_box`` inside it."""
    view = local
    ranges = zip(selected_box.offset, selected_box.size, local_box.offset, strict=True)
    for dim, (start, size, base) in enumerate(ranges):
        if size != view.shape[dim]:
            view = view.narrow(dim, start - base, size)
    return view


def slot_view(payload: torch.Tensor, at: int, dtype: str, size: Sequence[int]) -> torch.Tensor:
    """Return the bytes of a payload from ``at`` on as a contiguous tensor."""
    kind = dtype_of(dtype)
    return payload[at : at + math.prod(size) * kind.itemsize].view(kind).view(tuple(size))


class CopyResult(NamedTuple):
    """The digests made by a copy: of groups of tensors, and of the payload's chunks (None: still to be hashed).

    ``before``: the digest of all sources before an audited copy. ``after``: of the same after it, on a GPU, where they
    may have changed since. ``spots``: bytes of the parameters after the copy, on a GPU.
    """

    digests: dict[str, torch.Tensor]
    chunks: list[bytes] | None = None
    before: torch.Tensor | None = None
    after: torch.Tensor | None = None
    spots: SpotValues | None = None


_version = attrgetter("_version")


class WriteCounts:
    """Counts of writes to parameters, about 50 ns each. Other state is staged, or changes only in optimizer steps."""

    def __init__(self, parameters: Iterable[TrackedTensor]) -> None:
        self._counted: list[torch.Tensor] = []
        self._names: list[str] = []
        for tracked in parameters:
            tensor = tracked.container[tracked.key]
            # a DTensor and its local tensor count separately
            for each in (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,):
                if not each.is_inference():
                    self._counted.append(each)
                    self._names.append(tracked.name)

    def counts(self) -> list[int]:
        return list(map(_version, self._counted))

    def written_since(self, counts: list[int]) -> list[str]:
        """Return the names of tensors written to since then; an operation that still runs is not counted yet."""
        now = self.counts()
        if now == counts:
            return []
        return sorted({name for name, is_, was in zip(self._names, now, counts, strict=True) if is_ != was})


class ParameterKey(NamedTuple):
    """The part of a parameter that the ranks of one replica group hold alike."""

    name: str
    box: Box
    group: str


class SnapshotSources:
    """The sources of a share's bytes: views of live tensors, and staged copies of those that forward passes change.

    ``covered_parts``: parts that other ranks store, which are staged as well, so that this rank can store them.
    """

    def __init__(
        self, tensors: list[TrackedTensor], share: RankShare | None, covered_parts: Iterable[int] = ()
    ) -> None:
        self.share = share
        wanted = None if share is None else {piece.part for piece in share.pieces}.union(covered_parts)
        self._volatile = [(i, t) for i, t in enumerate(tensors) if t.is_volatile and (wanted is None or i in wanted)]
        self._staged = {i: torch.empty_like(t.local) for i, t in self._volatile}
        self._tensors = tensors
        parameters = {i: t for i, t in enumerate(tensors) if t.is_parameter and not t.is_replaced}
        self.writes = WriteCounts(parameters.values())
        gpus = gpus_of(tensors)
        self.mover = DeviceMover(gpus) if gpus else HostMover()
        self._views: list[torch.Tensor] | None = None
        self._spotted = {i: t for i, t in parameters.items() if t.local.is_cuda == bool(gpus)}
        self._piece_numbers: tuple[int, ...] = ()  # of the pieces of these parameters in the share
        self._spots: Spots | None = None  # made when first needed, as small states are copied at once
        self._spot_names: list[str] = []
        self._reading: SpotValues | None = None
        self._digests: tuple[RankShare, dict[str, WeightedDigest]] | None = None

    @property
    def is_on_gpu(self) -> bool:
        return isinstance(self.mover, DeviceMover)

    def stage(self) -> None:
        """Stage the volatile tensors; for the training thread, before the next forward pass."""
        if self._volatile:
            with torch.no_grad():
                torch._foreach_copy_([*self._staged.values()], [t.current() for _, t in self._volatile])
        self._reading = self._read_spots() if self.is_on_gpu else None  # before the copy is allowed to begin
        self.mover.mark_ready()

    def read_spots(self) -> SpotValues:
        """Return some bytes of the parameters as staged; for the training thread, before the next forward pass."""
        if self._reading is None:
            self._reading = self._read_spots()
        return self._reading

    def _read_spots(self) -> SpotValues:
        if self._spots is None:
            views, pieces = [tensor.local for tensor in self._spotted.values()], []
            self._spot_names = [tensor.name for tensor in self._spotted.values()]
            if self.share is not None:
                numbered = enumerate(zip(self.share.pieces, self._views_of(self.share), strict=True))
                pieces = [(n, piece, view) for n, (piece, view) in numbered if piece.part in self._spotted]
            self._piece_numbers = tuple(number for number, _, _ in pieces)
            self._spot_names += [self._tensors[piece.part].name for _, piece, _ in pieces]
            self._spots = Spots([*views, *(view for _, _, view in pieces)])
        return self._spots.read()

    def spots_changed(self, before: SpotValues, after: SpotValues | None = None) -> list[str]:
        """Return the names of parameters whose bytes changed; ``after``: the later ones, by default as they are now."""
        assert self._spots is not None
        if after is None and not self._spots.is_in_place():
            return self._spot_names
        changed = self._spots.changed(before, self._spots.read(again=True) if after is None else after)
        return sorted({self._spot_names[index] for index in changed})

    def spots_miscopied(self, before: SpotValues, share: RankShare, targets: SlotTargets) -> list[str]:
        """Return the names of parameters whose bytes in the slot are not those before the copy."""
        if share is not self.share or self._spots is None:  # planned after the copy was queued
            return []
        first = len(self._spotted)
        spots = targets.spots(self._piece_numbers, self._spots.places)
        changed = spots.changed(before.after(self._spots.nbytes_of(first)), spots.read())
        return sorted({self._spot_names[first + index] for index in changed})

    def copy(self, share: RankShare, targets: SlotTargets, *, digest: bool, audit: bool = False) -> CopyResult:
        """Copy the share's pieces, and digest its groups if ``digest``; on a GPU done after ``mover.finish``.

        ``audit``: also digest the sources, to be compared with the bytes in the slot. On the host the slot then keeps
        the digest of each piece.
        """
        groups = partial(self._digests_of, share) if digest else dict
        return self.mover.run(targets, self._views_of(share), groups, audit=audit, spots=self._fetch_spots)

    def _fetch_spots(self) -> SpotValues | None:
        """Read the parameters again on GPUs, and begin to copy both readings to the host."""
        if self._reading is None or self._spots is None:
            return None
        after = self._spots.read(again=True)
        for values in (self._reading, after):
            values.fetch()
        return after

    def digest(self, share: RankShare) -> torch.Tensor:
        """Return the digest of the share's pieces as they are now."""
        return combined_digest(self._views_of(share))

    def parameter_digests(self, share: RankShare) -> dict[ParameterKey, str]:
        """Return a digest of each parameter of the share's groups, as they are now. Waits for GPUs."""
        parts = [(group, self._tensors[index]) for group, of in share.digest_groups.items() for index in of]
        with torch.no_grad():
            found = {ParameterKey(part.name, part.box, group): tensor_digest(part.local) for group, part in parts}
        return {key: to_hex(digest) for key, digest in found.items()}

    def _views_of(self, share: RankShare) -> list[torch.Tensor]:
        if share is self.share and self._views is not None:
            return self._views
        views = [self._view(piece.part, piece.box) for piece in share.pieces]
        if share is self.share:
            self._views = views
        return views

    def _view(self, part: int, box: Box) -> torch.Tensor:
        tensor = self._tensors[part]
        local = self._staged.get(part, tensor.local)
        own = len(box.size) > len(tensor.box.size)  # stored with the rank as an extra leading dimension
        return view_of_box(local, tensor.box, Box(box.offset[1:], box.size[1:]) if own else box)

    def _digests_of(self, share: RankShare) -> dict[str, WeightedDigest]:
        if self._digests is None or self._digests[0] is not share:
            groups = share.digest_groups.items()
            made = {group: WeightedDigest([self._tensors[i].local for i in of]) for group, of in groups}
            self._digests = share, made
        return self._digests[1]


def write_blob(payload: memoryview, manifest: Manifest, blob: bytes) -> None:
    """Write the Python state into its place, after its length."""
    at = manifest.blob_offset
    payload[at : at + BLOB_LENGTH_BYTES] = len(blob).to_bytes(BLOB_LENGTH_BYTES, "little")
    payload[at + BLOB_LENGTH_BYTES : at + BLOB_LENGTH_BYTES + len(blob)] = blob


class HostMover:
    """Copies between host tensors; complete when ``run`` returns."""

    def __init__(self) -> None:
        self._gathers: dict[tuple[int, int], tuple[SlotTargets, list[torch.Tensor], HashingCopyBatch]] = {}

    def mark_ready(self) -> None:
        """Mark the state as ready to be copied; called by the training thread."""

    def run(
        self,
        targets: SlotTargets,
        sources: list[torch.Tensor],
        digests: MakeDigests,
        *,
        audit: bool = False,
        spots: ReadSpots = lambda: None,
    ) -> CopyResult:
        chunks = before = None
        pieces = separate_digests(sources) if audit else None
        if pieces is not None:
            before = pieces.sum()
        targets.keep_digests(pieces)  # before the copy: they are hashed with it
        if copy_hash is None or targets.payload is None:
            copy_all(targets, sources)
        else:  # a batch is made once for a slot; identity of the lists is a safe key while they are held here
            key = (id(targets), id(sources))
            if key not in self._gathers:
                if len(self._gathers) >= MAX_COPY_BATCHES:
                    self._gathers.clear()
                batch = HashingCopyBatch(targets.payload, targets, sources, copy_hash)
                self._gathers[key] = targets, sources, batch
            chunks = self._gathers[key][2].copy()
        return CopyResult({group: digest.enqueue() for group, digest in digests().items()}, chunks, before)

    def order_before_step(self) -> None:
        """Order the copy before later changes of the state; called by the training thread."""

    def finish(self) -> None:
        """Wait, in the copier thread, until the bytes are there."""


class GpuLane:
    """One GPU's part: a stream of its own between two events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits leaves its core


class DeviceMover(HostMover):
    """Copies from GPUs into page-locked slots, each on its own stream."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.lanes = [GpuLane(device) for device in devices]

    def mark_ready(self) -> None:
        for lane in self.lanes:
            lane.ready.record(torch.cuda.current_stream(lane.device))

    def run(
        self,
        targets: SlotTargets,
        sources: list[torch.Tensor],
        digests: MakeDigests,
        *,
        audit: bool = False,
        spots: ReadSpots = lambda: None,
    ) -> CopyResult:
        with torch.no_grad(), ExitStack() as current:
            # each copy uses the stream that is current on its GPU, and a digest may need several GPUs
            for lane in reversed(self.lanes):  # reversed, so that the thread's current device is the first
                current.enter_context(torch.cuda.stream(lane.stream))
                lane.stream.wait_event(lane.ready)
            targets.keep_digests(None)  # until the bytes are there
            wanted = digests()  # before the copies: making them waits for the GPU
            before = combined_digest(sources).to("cpu", non_blocking=True) if audit else None
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            # copied to the host on this stream: on another they would wait for all enqueued training work
            made = {group: digest.enqueue().to("cpu", non_blocking=True) for group, digest in wanted.items()}
            after = combined_digest(sources).to("cpu", non_blocking=True) if audit else None
            values = spots()
            for lane in self.lanes:
                lane.copied.record(lane.stream)
        return CopyResult(made, before=before, after=after, spots=values)

    def order_before_step(self) -> None:
        for lane in self.lanes:
            torch.cuda.current_stream(lane.device).wait_event(lane.copied)

    def finish(self) -> None:
        for lane in self.lanes:
            lane.copied.synchronize()
