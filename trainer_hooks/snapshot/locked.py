"""Slot memory that a GPU copies into by itself: registered with CUDA while a process has it mapped."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch

from trainer_hooks.mapped_segment import MappedSegment

log = logging.getLogger(__name__)

PORTABLE = 1
"""cudaHostRegisterPortable: for all GPUs of the process, not only the one that the thread acts on."""


def page_lock(segment: MappedSegment) -> None:
    """Page-locks a segment's mapping for the GPU, until nobody holds the segment or the process ends in order.

    Whoever copies into it holds it until the copies are done. Raises RuntimeError with CUDA's reason where the system
    does not let us lock that much (``ulimit -l``).
    """
    if segment.page_locked:
        return
    mapped = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    address, length = mapped.data_ptr(), mapped.numel()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(address, length, PORTABLE))
    if code != 0:
        raise RuntimeError(
            f"cannot page-lock {length} bytes of slot memory for the GPU: CUDA error {code}; "
            "raise the limit on locked memory (ulimit -l)"
        )
    segment.page_locked = True
    weakref.finalize(segment, _unlock, cudart, address, length)  # before its mapping goes


def _unlock(cudart: Any, address: int, length: int) -> None:
    """CUDA would keep the pages, and find the address taken when another mapping comes to lie there."""
    code = int(cudart.cudaHostUnregister(address))
    if code != 0:
        log.info("%d bytes of slot memory stay page-locked until this process ends: CUDA error %d", length, code)
