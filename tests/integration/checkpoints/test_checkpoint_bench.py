"""The checkpoint bench in a size that takes seconds: real vaults and ranks, nothing left behind. Times are its own."""

from __future__ import annotations

import pytest
import torch

from bench.checkpoint_rows import gpu_rows, reading
from bench.checkpoint_rows.state import Size
from bench.processes import ProcessPool, RankFailed


@pytest.mark.slow
def test_a_slot_is_read_from_a_peer() -> None:
    with ProcessPool(["bench.checkpoint_rows.rank"]) as pool:
        rows = reading.read(pool, 3 << 20, 1, judged=False)
    assert all(row.value for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_bench_gpu_rows_are_empty_without_a_gpu() -> None:
    with ProcessPool(["bench.checkpoint_rows.rank"]) as pool:
        rows = gpu_rows.rows(pool, Size(3, 64 << 10), 1, judged=True)
    assert [(row.value, row.against, row.met) for row in rows] == [(None, "no GPU on this machine", "aim")] * 2


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bench_measures_and_restores_gpu_snapshots() -> None:
    with ProcessPool(["bench.checkpoint_rows.rank"]) as pool:
        rows = gpu_rows.rows(pool, Size(4, 1 << 20), 2, judged=False)
    assert all(row.value is not None for row in rows)


@pytest.mark.slow
def test_bench_fails_with_the_traceback_of_a_failing_rank() -> None:
    with ProcessPool(["bench.checkpoint_rows.rank"]) as pool, pytest.raises(RankFailed, match="ZeroDivisionError"):
        pool.run(divmod, [(1, 0), (1, 1)])
