"""The checkpoint bench in a size that takes seconds: real vaults and ranks, nothing left behind. Times are its own."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from everstep_controller.core.checkpoints.placement import FailureDomains, place_replicas

from bench.checkpoint_rows import four, gpu_rows, losses, reading
from bench.checkpoint_rows.processes import Crew, RankFailed
from bench.checkpoint_rows.state import Size
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
DEADLINE_S = 60.0


def _segments(pid: int) -> set[Path]:
    """Of the bench that runs as this process; others may run on the machine."""
    return set(MEMORY.glob(f"everstep-bench-{pid}-*"))


@pytest.mark.slow
def test_a_slot_is_read_from_a_peer() -> None:
    with Crew() as crew:
        rows = reading.read(crew, 3 << 20, 1, judged=False)
    assert all(row.value for row in rows)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_bench_gpu_rows_are_empty_without_a_gpu() -> None:
    with Crew() as crew:
        rows = gpu_rows.rows(crew, Size(3, 64 << 10), 1, judged=True)
    assert [(row.value, row.against, row.met) for row in rows] == [(None, "no GPU on this machine", "aim")] * 2


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_bench_measures_and_restores_gpu_snapshots() -> None:
    with Crew() as crew:
        rows = gpu_rows.rows(crew, Size(4, 1 << 20), 2, judged=False)
    assert all(row.value is not None for row in rows)


@pytest.mark.slow
@pytest.mark.nightly
def test_bench_restores_shards_on_three_ranks_after_node_loss() -> None:
    with Crew() as crew:
        rows = {row.name: row for row in four.shards(crew, Size(3, 64 << 10, "shards"), 1, judged=False)}
    assert (rows["memory, r = 2: most over what the vaults state"].value or 2) <= 1
    lost = next(row for name, row in rows.items() if name.endswith("a lost node's shard from a peer"))
    assert lost.value is not None
    assert rows["4 FSDP2 shards of 0 MiB: a spare's first restore from a peer"].value is not None
    assert "remote" in next(row.against for name, row in rows.items() if name.endswith("4 ranks to 3"))


@pytest.mark.slow
@pytest.mark.nightly
def test_double_kills_lose_data_only_with_two_replicas() -> None:
    assert losses.double_kills(2, 3).lost == []
    two = losses.double_kills(4, 2)
    copies = place_replicas(losses.NODES, {node: FailureDomains(rack=node) for node in losses.NODES}, 2)
    together = [(a, b) for a, b in two.killed if b in copies[a] or a in copies[b]]
    assert two.lost == together
    assert 0 < len(together) < len(two.killed), "take a seed that has both"


@pytest.mark.slow
@pytest.mark.nightly
def test_parity_survives_any_double_kill_without_replicas() -> None:
    assert losses.double_kills(2, 1, parity=losses.PARITY).lost == []


@pytest.mark.slow
def test_bench_fails_with_the_traceback_of_a_failing_rank() -> None:
    with Crew() as crew, pytest.raises(RankFailed, match="ZeroDivisionError"):
        crew.run(divmod, [(1, 0), (1, 1)])


@pytest.mark.slow
@pytest.mark.nightly
def test_terminated_bench_releases_vault_memory() -> None:
    bench = subprocess.Popen([sys.executable, "-m", "bench.checkpoint", "--quick", "--only", "slot to"], cwd=ROOT)
    try:
        begun = until(lambda: _segments(bench.pid), "vaults begin", DEADLINE_S)
        bench.send_signal(signal.SIGTERM)
        assert bench.wait(DEADLINE_S) == 128 + signal.SIGTERM
    finally:
        bench.kill()
        bench.wait()
    assert not [path for path in begun if path.exists()]
