"""torchtitan's own Trainer on ranks that are killed: it continues in memory, from the last step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_training import Fault, read_diaries
from tests.support.launched import launched

pytest.importorskip("torchtitan")

STEPS, WORLD = 8, 2
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


def trained(folder: Path, *faults: Fault, until: int = STEPS, options: str = "") -> tuple[list[dict[str, Any]], str]:
    """The diaries of ranks in a folder of their own, and what rank 0 had at the end."""
    folder.mkdir(exist_ok=True)
    argv = ["--nproc-per-node", str(WORLD), "--standby-delay-s", "0.1", "--hang-threshold-s", "60"]
    argv += ["--preload", "everstep_trainer.integrations.torchtitan", "--state-dir", str(folder / f"s{until}")]
    argv += ["-m", "tests.support.torchtitan_training", str(folder), str(until), *map(str, faults)]
    with launched(folder, *argv, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", TITAN_OPTIONS=options) as launcher:
        assert launcher.wait() == 0, launcher.err
    assert "not alike on all ranks" not in launcher.err + launcher.out
    return read_diaries(folder), (folder / "final").read_text()


def last_of_each(rows: list[dict[str, Any]]) -> dict[tuple[int, int], dict[str, Any]]:
    """What counted of a rank's step: that of the last generation that computed it."""
    ordered = sorted(rows, key=lambda row: int(row["generation"]))
    return {(row["step"], row["rank"]): {k: v for k, v in row.items() if k != "generation"} for row in ordered}


@pytest.mark.parametrize("degree", [1, 2], ids=["fsdp", "tensor-parallel"])
def test_killed_ranks_change_no_loss_and_parameter(short_path: Path, degree: int) -> None:
    """A rank dies between two microbatches, in a backward pass, and after the update."""
    options = f"--parallelism.tensor_parallel_degree {degree}"
    undisturbed, final = trained(short_path / "u", options=options)
    faults = [Fault(1, 3, "forward"), Fault(0, 5, "backward"), Fault(1, 6, "updated")]
    killed, final_killed = trained(short_path / "k", *faults, options=options)
    assert {row["generation"] for row in killed} <= {1, 2, 3, 4}
    assert max(row["generation"] for row in killed) == 4, "every fault has struck"
    assert last_of_each(killed) == last_of_each(undisturbed)
    assert len(last_of_each(killed)) == WORLD * STEPS
    assert final_killed == final
