"""What a worker frees stays with it, and a standby holds memory before it needs it."""

from __future__ import annotations

import os
import resource

from everstep_trainer.launch.forking.process_setup import (
    TOUCH_PIECE_BYTES,
    anonymous_bytes,
    keep_freed_memory,
    largest_rank_bytes,
    pretouch_heap,
)

from tests.support.forked import ForkPool


def faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def faults_of_models() -> list[int]:
    """Page faults of building 32 MiB of tensors again and again, each time after the last were freed.

    glibc's aligned allocation needs a round or two until its free blocks fit.
    """
    import torch

    keep_freed_memory()
    counts = []
    for _ in range(5):
        before = faults()
        tensors = [torch.ones(1 << 20) for _ in range(8)]
        counts.append(faults() - before)
        del tensors
    return counts


def faults_after_touching(wanted: int) -> tuple[int, int, int]:
    """(bytes touched, growth of resident memory, faults of building as much afterwards)."""
    import torch

    keep_freed_memory()
    before = anonymous_bytes(os.getpid())
    touched = pretouch_heap(wanted)
    grown = anonymous_bytes(os.getpid()) - before
    first = faults()
    tensors = [torch.ones(1 << 20) for _ in range(wanted // (4 << 20) - 1)]
    count = faults() - first
    del tensors
    return touched, grown, count


def test_freed_model_memory_is_reused_without_page_faults(forks: ForkPool) -> None:
    first, *_, last = forks.start(faults_of_models).result()
    assert first > 8000  # 32 MiB in pages of 4 KiB
    assert last < first / 10


def test_pretouched_memory_serves_tensors_without_page_faults(forks: ForkPool) -> None:
    touched, grown, count = forks.start(faults_after_touching, 4 * TOUCH_PIECE_BYTES).result()
    assert touched == 4 * TOUCH_PIECE_BYTES
    assert grown > 3 * TOUCH_PIECE_BYTES
    assert count < 2000  # of 15,000 pages


def test_largest_sibling_is_zero_without_sibling_ranks() -> None:
    assert largest_rank_bytes() == 0
