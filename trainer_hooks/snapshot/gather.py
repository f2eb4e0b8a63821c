"""Copies of many tensors into one payload: what is small and lies side by side goes in one call.

``torch._foreach_copy_`` takes 0.3 us a tensor on a CPU whatever its size. ``torch.cat`` into a place that is there
takes 0.1 us, by a plain loop over its inputs, as long as the result has fewer elements than torch divides among
threads. So small pieces are seen as bytes, and gathered by runs; the bytes between two of them are zeroes.
"""

from __future__ import annotations

import torch

from trainer_hooks.snapshot.layout import ALIGN

SMALL_BYTES = 8 << 10
"""Up to here a piece costs more to begin than to copy."""
RUN_BYTES = (32 << 10) - 64
"""Below at::internal::GRAIN_SIZE (32,768 elements), from which on torch.cat looks at each input for longer."""


class Gather:
    """Pairs of tensors of one dtype and shape each, to be copied again and again; the memory of none may move.

    Args:
        targets: contiguous, disjoint parts of one payload that begin at multiples of ALIGN.
        sources: live tensors on the CPU.
    """

    def __init__(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self._targets: list[torch.Tensor] = []
        self._sources: list[torch.Tensor] = []
        self._runs: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        run: list[tuple[torch.Tensor, torch.Tensor]] = []
        for target, source in zip(targets, sources, strict=True):
            if not _is_small(source):
                self._targets.append(target)
                self._sources.append(source)
                continue
            if run and not _continues(run, target):
                self._close(run)
                run = []
            run.append((target, source))
        self._close(run)

    def copy(self) -> None:
        """Everything, without Python's lock for most of it."""
        with torch.no_grad():
            if self._targets:
                torch._foreach_copy_(self._targets, self._sources)
            for target, parts in self._runs:
                torch.cat(parts, out=target)

    def _close(self, run: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if not run:
            return
        at, parts = _start(run[0][0]), []
        for target, source in run:
            if gap := _start(target) - at:
                parts.append(torch.zeros(gap, dtype=torch.uint8))
            parts.append(_bytes_of(source, source.nbytes))
            at = _end(target)
        first, last = run[0][0], run[-1][0]
        whole = _bytes_of(first, _end(last) - _start(first))
        self._runs.append((whole, parts))


def _continues(run: list[tuple[torch.Tensor, torch.Tensor]], target: torch.Tensor) -> bool:
    """Whether nothing but padding lies between the last one and this, and the run does not get too long."""
    gap = _start(target) - _end(run[-1][0])
    return 0 <= gap < ALIGN and _end(target) - _start(run[0][0]) <= RUN_BYTES


def _is_small(source: torch.Tensor) -> bool:
    plain = type(source) in (torch.Tensor, torch.nn.Parameter) and not source.is_conj() and not source.is_neg()
    return plain and source.is_contiguous() and 0 < source.nbytes <= SMALL_BYTES


def _bytes_of(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """So many bytes of memory from a contiguous tensor's first one on."""
    made = torch.empty(0, dtype=torch.uint8)
    return made.set_(tensor.untyped_storage(), _start(tensor), (count,))  # type: ignore[call-overload, no-any-return]


def _start(target: torch.Tensor) -> int:
    """The byte of its storage that it begins at."""
    return int(target.storage_offset()) * target.itemsize


def _end(target: torch.Tensor) -> int:
    return _start(target) + target.nbytes
