"""Detect writes to tensors that torch does not count, by comparing their bytes at a few places.

torch counts no writes through ``.data``, by foreign kernels, fused optimizers and CUDA graphs. Such writes change most
of a tensor, as a swap with averaged weights does. So the first bytes, the last ones and some between tell whether a
tensor was written to, for a few microseconds instead of a pass over all memory.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from everstep.native import MIN_BYTES, copy_hash

MAX_SPOTS = 64
"""Places in all tensors together; never fewer than two in a tensor. Each is a miss of the cache in every step."""
SPOT_BYTES = 64


class Spots:
    """Places in ``tensors``, all on the host or all on GPUs; tensors of equal shapes and dtypes have equal places."""

    def __init__(self, tensors: Sequence[torch.Tensor], places: int = 0) -> None:
        self._tensors = list(tensors)
        self.places = places or max(2, MAX_SPOTS // max(1, len(self._tensors)))  # in each tensor, at most
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        runs = [list(_runs(tensor, self.places)) if tensor.numel() else [] for tensor in self._tensors]
        self._ends = np.cumsum([sum(size for _, size in of) for of in runs], dtype=np.int64)
        self._groups: list[_DeviceGroup] = []
        self.is_on_gpu = any(tensor.is_cuda for tensor in self._tensors)
        if self.is_on_gpu:
            by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
            for index, tensor in enumerate(self._tensors):
                by_kind[tensor.device, tensor.dtype].append(index)
            self._groups = [_DeviceGroup(of, self._tensors, runs) for of in by_kind.values()]
            return
        sizes = np.array([size for of in runs for _, size in of], np.int64)
        starts = (at + start for at, of in zip(self._addresses, runs, strict=True) for start, _ in of)
        self._rows = np.cumsum(sizes) - sizes, np.fromiter(starts, np.int64, len(sizes)), sizes
        to, source, nbytes = self._rows
        self._columns = to.ctypes.data, source.ctypes.data, nbytes.ctypes.data
        # An array of numpy takes three times as long to make between steps, whose work evicts all code from the caches.
        self._room = ctypes.c_uint8 * max(self._nbytes, MIN_BYTES)

    def read(self, *, again: bool = False) -> SpotValues:
        """Return the present bytes; on GPUs only enqueued on the current streams. There may be two readings at a time,
        one of them read ``again``."""
        if self.is_on_gpu:
            for group in self._groups:
                group.read(again)
            return SpotValues(lambda: self._from_device(again), lambda: self._fetch(again))
        room = self._room()
        if copy_hash is not None:
            copy_hash.gather(ctypes.addressof(room), len(room), *self._columns, len(self._rows[0]))
        else:
            for to, source, nbytes in zip(*(column.tolist() for column in self._rows), strict=True):
                ctypes.memmove(ctypes.addressof(room) + to, source, nbytes)
        return SpotValues(lambda: np.frombuffer(memoryview(room), np.uint8, self._nbytes))

    def is_in_place(self) -> bool:
        """Return whether the memory of all tensors is where it was, so that it can be read."""
        return list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses

    def changed(self, one: SpotValues, other: SpotValues) -> list[int]:
        """Return the indices of the tensors whose bytes differ between two readings. Waits for GPUs."""
        if np.array_equal(one.bytes(), other.bytes()):
            return []
        different = np.flatnonzero(one.bytes() != other.bytes())
        found: list[int] = np.unique(np.searchsorted(self._ends, different, side="right")).tolist()
        return found

    def nbytes_of(self, count: int) -> int:
        """Return the number of bytes read from the first ``count`` tensors."""
        return int(self._ends[count - 1]) if count else 0

    @property
    def _nbytes(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def _fetch(self, again: bool) -> None:
        for group in self._groups:
            group.hosts[again] = group.rooms[again].to("cpu", non_blocking=True)

    def _from_device(self, again: bool) -> np.ndarray:
        """Return the bytes of a reading in the order of the tensors."""
        values = np.empty(self._nbytes, np.uint8)
        for group in self._groups:
            start = 0
            host = group.take(again).view(torch.uint8).numpy()
            for index in group.indices:
                end = int(self._ends[index])
                nbytes = end - (int(self._ends[index - 1]) if index else 0)
                values[end - nbytes : end] = host[start : start + nbytes]
                start += nbytes
        return values


class SpotValues:
    """The bytes at all places at one moment."""

    def __init__(self, load: Callable[[], np.ndarray], fetch: Callable[[], None] = lambda: None) -> None:
        self._load, self.fetch = load, fetch
        self._bytes: np.ndarray | None = None

    fetch: Callable[[], None]
    """Begin to copy them from GPUs, on the current streams; otherwise ``bytes`` does it and waits for these streams."""

    def after(self, nbytes: int) -> SpotValues:
        """Return those behind the first ``nbytes``."""
        return SpotValues(lambda: self.bytes()[nbytes:])

    def bytes(self) -> np.ndarray:
        """Return them on the host. Waits for GPUs."""
        if self._bytes is None:
            self._bytes = self._load()
        return self._bytes


class _DeviceGroup:
    """Tensors of one GPU and dtype, read by a few kernels into one of two rooms."""

    def __init__(
        self, indices: list[int], tensors: Sequence[torch.Tensor], runs: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        self.indices = indices
        first = tensors[indices[0]]
        self._views = [_view(tensors[index], run) for index in indices for run in runs[index]]
        sizes = [view.numel() for view in self._views]
        self.rooms = [first.new_empty(sum(sizes)) for _ in range(2)]
        self._parts = [torch.split(room, sizes) for room in self.rooms]
        self.hosts: list[torch.Tensor | None] = [None, None]

    def read(self, again: bool) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list(self._parts[again]), self._views)
        self.hosts[again] = None

    def take(self, again: bool) -> torch.Tensor:
        host = self.hosts[again]
        return self.rooms[again].cpu() if host is None else host


def _runs(tensor: torch.Tensor, count: int) -> Iterator[tuple[int, int]]:
    """Yield up to ``count`` places, each as an offset in bytes from the first element, and a size.

    The places depend only on the shape, also where the elements lie in another order.
    """
    size, elements = tensor.itemsize, tensor.numel()
    length = max(1, SPOT_BYTES // size)
    last = max(0, elements - length)
    firsts = sorted({last * number // (count - 1) for number in range(count)})
    if tensor.is_contiguous():
        yield from ((first * size, min(length, elements) * size) for first in firsts)
        return
    shape, strides = tensor.shape, tensor.stride()
    for first in firsts:
        for element in range(first, first + min(length, elements)):
            at, rest = 0, element
            for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
                rest, index = divmod(rest, extent)
                at += index * stride
            yield at * size, size


def _view(tensor: torch.Tensor, run: tuple[int, int]) -> torch.Tensor:
    start, nbytes = run
    size = tensor.itemsize
    return tensor.as_strided((nbytes // size,), (1,), tensor.storage_offset() + start // size)
