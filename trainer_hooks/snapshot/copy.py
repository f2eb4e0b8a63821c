"""Live tensors to slot bytes: views made once in a plan, then nothing but copies.

On the CPU one call copies all pieces with Python's lock released. On a GPU they go to page-locked slot memory on a
stream of their own, behind an event of the training stream and before an event that the next optimizer step waits on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer_hooks.snapshot.blob import dtype_of
from trainer_hooks.snapshot.layout import Box, Manifest
from trainer_hooks.snapshot.plan import Share
from trainer_hooks.state import TrackedTensor
from trainer_hooks.vault_client import MappedSegment

_BLOB_PREFIX = 8


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
    count = 1
    for n in size:
        count *= n
    return payload[at : at + count * kind.itemsize].view(kind).view(tuple(size))


class Sources:
    """Where a share's bytes come from: views of live tensors, and copies of those that a forward pass may change."""

    def __init__(self, tensors: list[TrackedTensor], share: Share | None) -> None:
        """``share`` None: nothing is planned yet, so every volatile tensor is staged."""
        wanted = None if share is None else {piece.part for piece in share.pieces}
        self._volatile = [(i, t) for i, t in enumerate(tensors) if t.volatile and (wanted is None or i in wanted)]
        self._staged = {i: torch.empty_like(t.local) for i, t in self._volatile}
        self._tensors = tensors

    def stage(self) -> None:
        """Copies the volatile tensors aside; from the training thread, before the next forward pass."""
        if self._volatile:
            torch._foreach_copy_([self._staged[i] for i, _ in self._volatile], [t.now() for _, t in self._volatile])

    def views(self, share: Share) -> list[torch.Tensor]:
        """One view for each piece of ``share``, in its order."""
        return [self._view(piece.part, piece.box) for piece in share.pieces]

    def _view(self, part: int, box: Box) -> torch.Tensor:
        tensor = self._tensors[part]
        local = self._staged.get(part, tensor.local)
        own = len(box.size) > len(tensor.box.size)  # stored with the rank as an extra leading dimension
        return part_of(local, tensor.box, Box(box.offset[1:], box.size[1:]) if own else box)


class SlotViews:
    """A slot's payload as the targets of a share's pieces."""

    def __init__(self, payload: torch.Tensor, manifest: Manifest) -> None:
        self.targets = []
        for stored in manifest.stored:
            tensor = manifest.catalog[stored.tensor]
            size = stored.box.size[1:] if tensor.own else stored.box.size
            self.targets.append(slot_view(payload, stored.at, tensor.dtype, size))


def write_blob(payload: memoryview, manifest: Manifest, blob: bytes) -> None:
    """The Python state into its place, behind its length."""
    at = manifest.blob_at
    payload[at : at + _BLOB_PREFIX] = len(blob).to_bytes(_BLOB_PREFIX, "little")
    payload[at + _BLOB_PREFIX : at + _BLOB_PREFIX + len(blob)] = blob


class HostCopy:
    """Copies between host tensors; done when it returns."""

    def begin(self) -> None:
        """Called by the training thread when the state is as it shall be copied."""

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)

    def order_before_step(self) -> None:
        """Called by the training thread before the state changes again."""

    def finish(self) -> None:
        """Waits, in the copier thread, until the bytes are there."""


class DeviceCopy(HostCopy):
    """Copies from a GPU on a stream of its own. ``register`` page-locks the segment, once, so that copies overlap."""

    def __init__(self, device: torch.device, segment: MappedSegment) -> None:
        self._stream = torch.cuda.Stream(device)
        self._device = device
        self._ready = torch.cuda.Event()
        self._copied = torch.cuda.Event()
        register(segment)

    def begin(self) -> None:
        self._ready.record(torch.cuda.current_stream(self._device))

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        with torch.no_grad(), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)
            self._copied.record(self._stream)

    def order_before_step(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._copied)

    def finish(self) -> None:
        self._copied.synchronize()


def register(segment: MappedSegment) -> None:
    """Page-locks a segment's mapping for the GPU, once in its life.

    Raises RuntimeError with CUDA's reason where the system does not let us lock that much (``ulimit -l``).
    """
    if segment.page_locked:
        return
    whole = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    code = torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)
    if int(code) != 0:
        raise RuntimeError(
            f"cannot page-lock {whole.numel()} bytes of slot memory for the GPU: CUDA error {int(code)}; "
            "raise the limit on locked memory (ulimit -l)"
        )
    segment.page_locked = True
