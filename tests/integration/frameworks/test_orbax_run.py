"""Orbax's CheckpointManager with memory in front, in processes that are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.processes.launcher import SLOW_RANKS, launched
from tests.support.ranks.exact_training import Fault, read_step_logs

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("jax", "orbax")]

WORLD = 2


def trained(folder: Path, until: int, *faults: Fault) -> list[dict[str, Any]]:
    """Return the step logs of ranks whose checkpoint directory is in ``folder``."""
    folder.mkdir(exist_ok=True)
    argv = ["--nproc-per-node", str(WORLD), "--standby-delay-s", "0.1", "--hang-threshold-s", "60"]
    argv += [
        "--state-dir",
        str(folder / f"s{until}"),
        "-m",
        "tests.integration.frameworks.scripts.orbax_training",
        str(folder),
        str(until),
    ]
    with launched(folder, *argv, *map(str, faults), OMP_NUM_THREADS="1", **SLOW_RANKS) as launcher:  # type: ignore[arg-type]
        assert launcher.wait() == 0, launcher.err
    return read_step_logs(folder)


def rows_of(log: list[dict[str, Any]]) -> dict[int, str]:
    """Rank 0's numbers by step, which all other ranks and generations must have too."""
    rows: dict[int, str] = {}
    for row in (row for row in log if "rows" in row):
        assert rows.setdefault(row["step"], row["rows"]) == row["rows"]
    return rows


def test_orbax_restores_newest_step_from_memory(short_path: Path) -> None:
    undisturbed = rows_of(trained(short_path / "u", 15))
    rows = trained(short_path / "k", 15, Fault(1, 6, "begun"), Fault(0, 11, "begun"))
    assert rows_of(rows) == undisturbed
    newest = {(row["generation"], row["newest"], row["in_directory"]) for row in rows if "newest" in row}
    assert newest == {(1, None, None), (2, 5, 4), (3, 10, 8)}, "newer than the directory's"
    assert {tuple(row["steps"]) for row in rows if row["step"] == 14} == {(8, 12, 14)}


def test_orbax_directory_begins_a_new_job(short_path: Path) -> None:
    undisturbed = rows_of(trained(short_path / "u", 12))
    folder = short_path / "j"
    trained(folder, 10)
    for step_log in folder.glob("steps-*"):
        step_log.unlink()
    rows = trained(folder, 12)
    assert {row["newest"] for row in rows if "newest" in row} == {8}
    assert rows_of(rows) == {step: rows for step, rows in undisturbed.items() if step > 8}
