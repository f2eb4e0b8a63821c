"""torchdata's StatefulDataLoader with worker processes, tracked by ranks that a launcher keeps and a test kills."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.integration.frameworks.scripts.stateful_training import SIZES, WORLD
from tests.support.processes.launcher import launched
from tests.support.ranks.exact_training import Fault, read_step_logs

STEPS = 12
pytestmark = pytest.mark.slow


@pytest.mark.promise("stateful-loader")
def test_rank_kills_mid_epoch_lose_and_repeat_no_sample(short_path: Path) -> None:
    """Map-style and iterable data over several epochs, which end at different steps."""
    faults = [Fault(1, 5, "forward"), Fault(0, 8, "begun")]
    argv = ["--nproc-per-node", str(WORLD), "--standby-delay-s", "0.1", "--hang-threshold-s", "60"]
    argv += [
        "--state-dir",
        str(short_path / "s"),
        "-m",
        "tests.integration.frameworks.scripts.stateful_training",
        str(short_path),
        str(STEPS),
        *map(str, faults),
    ]
    with launched(short_path, *argv, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo") as launcher:
        assert launcher.wait() == 0, launcher.err
    assert "not alike on all ranks" not in launcher.err + launcher.out
    rows = read_step_logs(short_path)
    assert {row["generation"] for row in rows} == {1, 2, 3}, "every fault has struck"
    last = {(row["rank"], row["step"]): row for row in sorted(rows, key=lambda row: row["generation"])}
    assert last.keys() == {(rank, step) for rank in range(WORLD) for step in range(1, STEPS + 1)}
    for kind, size in SIZES.items():
        differ = [r for r in rows if r[kind] != last[r["rank"], r["step"]][kind]]
        assert not differ, f"what is computed again has the same samples: {kind}"
        for rank in range(WORLD):
            seen = [sample for step in range(1, STEPS + 1) for sample in last[rank, step][kind]]
            epochs = [seen[at : at + size] for at in range(0, len(seen) - size + 1, size)]
            assert len(epochs) >= 3
            for epoch in epochs:
                assert Counter(epoch) == Counter(n * WORLD + rank for n in range(size)), f"{kind}, rank {rank}"
            if kind == "map":
                assert len(set(map(tuple, epochs))) == len(epochs), "each epoch has an order of its own"
