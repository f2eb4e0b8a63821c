"""Orbax's CheckpointManager with memory in front, in processes that are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.exact_training import Fault, read_diaries
from tests.support.launched import PATIENT, launched

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("jax", "orbax")]

WORLD = 2


def trained(folder: Path, until: int, *faults: Fault) -> list[dict[str, Any]]:
    """The diaries of ranks whose directory lies in ``folder``, too."""
    folder.mkdir(exist_ok=True)
    argv = ["--nproc-per-node", str(WORLD), "--standby-delay-s", "0.1", "--hang-threshold-s", "60"]
    argv += ["--state-dir", str(folder / f"s{until}"), "-m", "tests.support.orbax_training", str(folder), str(until)]
    with launched(folder, *argv, *map(str, faults), OMP_NUM_THREADS="1", **PATIENT) as launcher:
        assert launcher.wait() == 0, launcher.err
    return read_diaries(folder)


def rows_of(diaries: list[dict[str, Any]]) -> dict[int, str]:
    """Rank 0's numbers by step, which all other ranks and generations must have too."""
    rows: dict[int, str] = {}
    for row in (row for row in diaries if "rows" in row):
        assert rows.setdefault(row["step"], row["rows"]) == row["rows"]
    return rows


def test_orbax_restores_newest_step_from_memory(short_path: Path) -> None:
    undisturbed = rows_of(trained(short_path / "u", 15))
    diaries = trained(short_path / "k", 15, Fault(1, 6, "begun"), Fault(0, 11, "begun"))
    assert rows_of(diaries) == undisturbed
    newest = {(row["generation"], row["newest"], row["in_directory"]) for row in diaries if "newest" in row}
    assert newest == {(1, None, None), (2, 5, 4), (3, 10, 8)}, "newer than the directory's"
    assert {tuple(row["steps"]) for row in diaries if row["step"] == 14} == {(8, 12, 14)}


def test_orbax_directory_begins_a_new_job(short_path: Path) -> None:
    undisturbed = rows_of(trained(short_path / "u", 12))
    folder = short_path / "j"
    trained(folder, 10)
    for diary in folder.glob("diary-*"):
        diary.unlink()
    diaries = trained(folder, 12)
    assert {row["newest"] for row in diaries if "newest" in row} == {8}
    assert rows_of(diaries) == {step: rows for step, rows in undisturbed.items() if step > 8}
