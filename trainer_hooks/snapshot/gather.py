"""Copies of many tensors into one slot: what is small and lies side by side goes in one call.

``torch._foreach_copy_`` takes 0.9 us a tensor on a CPU whatever its size. A slot is also a file, and the kernel gathers
into a file what lies at up to 1,024 addresses: ``pwritev`` takes 0.1 us a tensor, and Python and torch have no part in
it. So small pieces are gathered by runs; the bytes between two of them are zeroes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Protocol

import torch

from trainer_hooks.snapshot.layout import ALIGN

SMALL_BYTES = 8 << 10
"""Up to here a piece costs more to begin than to copy; from here on the kernel is slower than torch, page by page."""
MOST_BUFFERS = 1024
"""Of one call: IOV_MAX in limits.h."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.pwritev.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_libc.pwritev.restype = ctypes.c_ssize_t
_zeroes = ctypes.create_string_buffer(ALIGN)

Pair = tuple[torch.Tensor, torch.Tensor]
"""Target and source."""


class Mapped(Protocol):
    """A file that is mapped writable: its descriptor, and the address of its first byte."""

    @property
    def descriptor(self) -> int: ...

    @property
    def address(self) -> int: ...


class Targets(list[torch.Tensor]):
    """Views into a slot of ``file``. ``payload``: all that is hashed of the slot, where the digests are wanted."""

    def __init__(self, views: Iterable[torch.Tensor], file: Mapped, payload: torch.Tensor | None = None) -> None:
        super().__init__(views)
        self.file = file
        self.payload = payload


class _Buffer(ctypes.Structure):
    """struct iovec of sys/uio.h."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class _Run(NamedTuple):
    """Pairs whose targets lie side by side: ``length`` bytes at ``offset`` of the file, made up of ``buffers``."""

    targets: list[torch.Tensor]
    sources: list[torch.Tensor]
    buffers: ctypes.Array[_Buffer]
    offset: int
    length: int


class Gather:
    """Pairs of tensors of one dtype and shape each, to be copied again and again; the memory of none may move.

    Args:
        targets: contiguous, disjoint parts of one payload that begin at multiples of ALIGN.
        sources: live tensors on the CPU.
    """

    def __init__(self, targets: Targets, sources: list[torch.Tensor]) -> None:
        self._file = targets.file
        pairs = list(zip(targets, sources, strict=True))
        large = [pair for pair in pairs if not _is_small(pair[1])]
        self._targets, self._sources = [target for target, _ in large], [source for _, source in large]
        self._runs = [self._run(run) for run in _runs([pair for pair in pairs if _is_small(pair[1])])]

    def copy(self) -> None:
        """Everything, without Python's lock for most of it."""
        with torch.no_grad():
            if self._targets:
                torch._foreach_copy_(self._targets, self._sources)
            for run in self._runs:
                written = _libc.pwritev(self._file.descriptor, run.buffers, len(run.buffers), run.offset)
                if written != run.length:  # a limit of the process on files, say
                    torch._foreach_copy_(run.targets, run.sources)

    def _run(self, run: list[Pair]) -> _Run:
        buffers: list[_Buffer] = []
        at = start = run[0][0].data_ptr()
        for target, source in run:
            if gap := target.data_ptr() - at:
                buffers.append(_Buffer(ctypes.addressof(_zeroes), gap))
            buffers.append(_Buffer(source.data_ptr(), source.nbytes))
            at = _end(target)
        array = (_Buffer * len(buffers))(*buffers)
        return _Run([t for t, _ in run], [s for _, s in run], array, start - self._file.address, at - start)


def _runs(pairs: list[Pair]) -> Iterator[list[Pair]]:
    """Pairs of which one target follows the other with nothing but padding between, as many as one call may take."""
    run: list[Pair] = []
    for target, source in pairs:
        if run and (2 * len(run) >= MOST_BUFFERS or not 0 <= target.data_ptr() - _end(run[-1][0]) < ALIGN):
            yield run
            run = []
        run.append((target, source))
    if run:
        yield run


def _is_small(source: torch.Tensor) -> bool:
    plain = type(source) in (torch.Tensor, torch.nn.Parameter) and not source.is_conj() and not source.is_neg()
    return plain and source.is_contiguous() and 0 < source.nbytes <= SMALL_BYTES


def _end(target: torch.Tensor) -> int:
    return target.data_ptr() + target.nbytes
