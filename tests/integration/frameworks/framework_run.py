"""Run a training script of this folder under the launcher, and return the step logs of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.processes.launcher import launched
from tests.support.ranks.exact_training import Fault, read_step_logs


def run_training(
    folder: Path, script: str, until: int, *faults: Fault, ranks: int, options: Sequence[str] = (), **environment: str
) -> tuple[list[dict[str, Any]], str]:
    """Run ``script`` to the step ``until`` through the faults, in ``folder``, and expect that it ends well.

    Args:
        folder: Directory of the step logs and, below ``s``, of the launcher's state.
        script: Name of a module in this folder.
        until: Last step.
        faults: Deaths of ranks. Each makes one generation more.
        ranks: Number of ranks.
        options: Further options of the launcher.
        environment: Variables of the script.

    Returns:
        The rows of the step logs, those of later generations last, and what the launcher printed.
    """
    folder.mkdir(exist_ok=True)
    argv = ["--nproc-per-node", str(ranks), "--standby-delay-s", "0.1", "--hang-threshold-s", "60"]
    argv += ["--state-dir", str(folder / "s"), *options]
    argv += ["-m", f"tests.integration.frameworks.scripts.{script}", str(folder), str(until), *map(str, faults)]
    with launched(folder, *argv, **environment) as launcher:  # type: ignore[arg-type]
        assert launcher.wait() == 0, launcher.err
    printed = launcher.err + launcher.out
    rows = sorted(read_step_logs(folder), key=lambda row: int(row["generation"]))
    assert {row["generation"] for row in rows} == {*range(1, len(faults) + 2)}, printed
    return rows, printed
