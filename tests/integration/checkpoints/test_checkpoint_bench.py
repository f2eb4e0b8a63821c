"""The checkpoint bench in a size that takes seconds: real vaults and ranks, nothing left behind. Times are its own."""

from __future__ import annotations

import pytest

from bench.checkpoint_rows import transfer
from bench.processes import ProcessPool, RankFailed


@pytest.mark.slow
def test_a_slot_is_read_from_a_peer() -> None:
    with ProcessPool(["bench.checkpoint_rows.rank"]) as pool:
        rows = transfer.read(pool, 3 << 20, 1, judged=False)
    assert all(row.value for row in rows)


@pytest.mark.slow
def test_bench_fails_with_the_traceback_of_a_failing_rank() -> None:
    with ProcessPool(["bench.checkpoint_rows.rank"]) as pool, pytest.raises(RankFailed, match="ZeroDivisionError"):
        pool.run(divmod, [(1, 0), (1, 1)])
