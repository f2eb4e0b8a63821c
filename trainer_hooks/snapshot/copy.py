"""Live tensors to slot bytes: views made once in a plan, then nothing but copies.

On the CPU all pieces are copied with Python's lock released, and hashed on the way where that is to be had. On a GPU
they go to page-locked slot memory on a stream of their own, behind an event of the training stream and before an event
that the next optimizer step waits on; on several GPUs of one process so on each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch

from everstep.native import copy_hash
from trainer_hooks.sdc.digest import WeightedDigest
from trainer_hooks.snapshot.blob import dtype_of
from trainer_hooks.snapshot.device import gpus_of
from trainer_hooks.snapshot.gather import Gather, Targets
from trainer_hooks.snapshot.hashing_gather import HashingGather
from trainer_hooks.snapshot.layout import BLOB_PREFIX, Box, Manifest
from trainer_hooks.snapshot.plan import Share
from trainer_hooks.snapshot.standing import Writes
from trainer_hooks.state import TrackedTensor

Digests = Callable[[], dict[str, WeightedDigest]]
"""Makes them, or gives those made before. Their buffers are cleared on the stream that is current then."""

MOST_GATHERS = 16
"""One for each slot of a segment, and some for segments before it."""


def part_of(local: torch.Tensor, held: Box, wanted: Box) -> torch.Tensor:
    """The view of ``local``, which is box ``held``, on box ``wanted`` inside it."""
    view = local
    for dim, (start, size, base) in enumerate(zip(wanted.offset, wanted.size, held.offset, strict=True)):
        if size != view.shape[dim]:
            view = view.narrow(dim, start - base, size)
    return view


def slot_view(payload: torch.Tensor, at: int, dtype: str, size: Sequence[int]) -> torch.Tensor:
    """Bytes of a payload from ``at`` on as a contiguous tensor."""
    kind = dtype_of(dtype)
    return payload[at : at + math.prod(size) * kind.itemsize].view(kind).view(tuple(size))


class Copied(NamedTuple):
    """What was made on the way. ``digests``: of groups of tensors; ``chunks``: the xxh3-128 of each chunk of the slot's
    payload as it is now, None where they are still to be made."""

    digests: dict[str, torch.Tensor]
    chunks: list[bytes] | None = None


class Sources:
    """Where a share's bytes come from: views of live tensors, and copies of those that a forward pass may change."""

    def __init__(self, tensors: list[TrackedTensor], share: Share | None) -> None:
        """``share`` None: nothing is planned yet, so every volatile tensor is staged."""
        self.share = share
        wanted = None if share is None else {piece.part for piece in (*share.pieces, *share.covers)}
        self._volatile = [(i, t) for i, t in enumerate(tensors) if t.volatile and (wanted is None or i in wanted)]
        self._staged = {i: torch.empty_like(t.local) for i, t in self._volatile}
        self._tensors = tensors
        self.writes = Writes(t for t in tensors if t.parameter)
        gpus = gpus_of(tensors)
        self.mover = DeviceMover(gpus) if gpus else HostMover()
        self._views: list[torch.Tensor] | None = None
        self._digests: tuple[Share, dict[str, WeightedDigest]] | None = None

    @property
    def on_gpu(self) -> bool:
        return isinstance(self.mover, DeviceMover)

    def begin(self) -> None:
        """Copies the volatile tensors aside; from the training thread, before the next forward pass."""
        if self._volatile:
            with torch.no_grad():
                now = [t.now() for _, t in self._volatile]
                torch._foreach_copy_([*self._staged.values()], now)
        self.mover.begin()

    def copy(self, share: Share, targets: Targets, *, digest: bool) -> Copied:
        """Copies the share's pieces to ``targets``, and digests each of its groups if asked to.

        From the copier thread. On a GPU both are enqueued when this returns; ``mover.finish`` waits for them, after
        which the digests are host tensors.
        """
        return self.mover.run(targets, self._views_of(share), partial(self._digests_of, share) if digest else dict)

    def _views_of(self, share: Share) -> list[torch.Tensor]:
        if share is not self.share:
            return [self._view(piece.part, piece.box) for piece in share.pieces]
        if self._views is None:
            self._views = [self._view(piece.part, piece.box) for piece in share.pieces]
        return self._views

    def _view(self, part: int, box: Box) -> torch.Tensor:
        tensor = self._tensors[part]
        local = self._staged.get(part, tensor.local)
        own = len(box.size) > len(tensor.box.size)  # stored with the rank as an extra leading dimension
        return part_of(local, tensor.box, Box(box.offset[1:], box.size[1:]) if own else box)

    def _digests_of(self, share: Share) -> dict[str, WeightedDigest]:
        if self._digests is None or self._digests[0] is not share:
            made = {
                group: WeightedDigest([self._tensors[i].local for i in members])
                for group, members in share.groups.items()
            }
            self._digests = share, made
        return self._digests[1]


def write_blob(payload: memoryview, manifest: Manifest, blob: bytes) -> None:
    """The Python state into its place, behind its length."""
    at = manifest.blob_at
    payload[at : at + BLOB_PREFIX] = len(blob).to_bytes(BLOB_PREFIX, "little")
    payload[at + BLOB_PREFIX : at + BLOB_PREFIX + len(blob)] = blob


class HostMover:
    """Copies between host tensors; done when ``run`` returns."""

    def __init__(self) -> None:
        self._gathers: dict[tuple[int, int], tuple[Targets, list[torch.Tensor], Gather | HashingGather]] = {}

    def begin(self) -> None:
        """Called by the training thread when the state is as it shall be copied."""

    def run(self, targets: Targets, sources: list[torch.Tensor], digests: Digests) -> Copied:
        chunks = self._gather(targets, sources).copy()
        return Copied({group: digest.start() for group, digest in digests().items()}, chunks)

    def _gather(self, targets: Targets, sources: list[torch.Tensor]) -> Gather | HashingGather:
        """Made once for each slot; a list is known by its identity as long as it is held here."""
        key = (id(targets), id(sources))
        if key not in self._gathers:
            if len(self._gathers) >= MOST_GATHERS:
                self._gathers.clear()
            if copy_hash is not None and targets.payload is not None:
                gather: Gather | HashingGather = HashingGather(targets.payload, targets, sources, copy_hash)
            else:
                gather = Gather(targets, sources)
            self._gathers[key] = targets, sources, gather
        return self._gathers[key][2]

    def order_before_step(self) -> None:
        """Called by the training thread before the state changes again."""

    def finish(self) -> None:
        """Waits, in the copier thread, until the bytes are there."""


class Lane:
    """One GPU's part: a stream of its own between two events."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits leaves its core


class DeviceMover(HostMover):
    """Copies from GPUs, each on a stream of its own, into page-locked slots."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        super().__init__()
        self.lanes = [Lane(device) for device in devices]

    def begin(self) -> None:
        for lane in self.lanes:
            lane.ready.record(torch.cuda.current_stream(lane.device))

    def run(self, targets: Targets, sources: list[torch.Tensor], digests: Digests) -> Copied:
        with torch.no_grad(), ExitStack() as current:
            # all at once: each copy goes by the stream that is current on its GPU, and a digest may want several GPUs
            for lane in reversed(self.lanes):  # the thread acts on the first of them
                current.enter_context(torch.cuda.stream(lane.stream))
                lane.stream.wait_event(lane.ready)
            wanted = digests()  # before the copies: the thread waits for what it makes of them on the GPU
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            # to the host on this stream: read on another one they would wait for all that training has enqueued there
            made = {group: digest.start().to("cpu", non_blocking=True) for group, digest in wanted.items()}
            for lane in self.lanes:
                lane.copied.record(lane.stream)
        return Copied(made)

    def order_before_step(self) -> None:
        for lane in self.lanes:
            torch.cuda.current_stream(lane.device).wait_event(lane.copied)

    def finish(self) -> None:
        for lane in self.lanes:
            lane.copied.synchronize()
