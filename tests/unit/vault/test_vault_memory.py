"""What a vault may still take of a node's memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.vault.memory import Budget
from everstep.errors import OutOfSlotMemory


def test_what_is_free_is_what_could_still_be_made_under_the_limit(tmp_path: Path) -> None:
    budget = Budget(tmp_path, 100_000)
    (tmp_path / "slots").write_bytes(bytes(60_000))
    assert budget.free_bytes() == 40_000
    with budget.admit(30_000, "a segment"):
        assert budget.free_bytes() == 10_000
        with pytest.raises(OutOfSlotMemory, match="10000 are free"), budget.admit(10_001, "another"):
            pass
    assert budget.free_bytes() == 40_000


def test_a_directory_that_holds_more_than_the_limit_has_nothing_free(tmp_path: Path) -> None:
    (tmp_path / "slots").write_bytes(bytes(60_000))
    assert Budget(tmp_path, 50_000).free_bytes() == 0


def test_without_a_limit_what_is_free_is_what_the_machine_has_left(tmp_path: Path) -> None:
    free = Budget(tmp_path, None).free_bytes()
    with Budget(tmp_path, None).admit(free // 2, "half of it"):
        pass
    with pytest.raises(OutOfSlotMemory, match="enlarge that file system"), Budget(tmp_path, None).admit(1 << 60, "all"):
        pass
