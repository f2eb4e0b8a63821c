"""A container's limit is not the machine's memory: slots are refused that the kernel would kill for."""

from __future__ import annotations

from pathlib import Path

import pytest
from everstep_agent.vault.memory import shared_memory
from everstep_agent.vault.memory.shared_memory import MemoryBudget

from everstep.errors import OutOfSlotMemory


@pytest.mark.promise("memory-fits")
def test_request_over_group_limit_is_refused_with_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = MemoryBudget(tmp_path, None)
    monkeypatch.setattr(shared_memory, "cgroup_available_bytes", lambda: 70_000)
    assert budget.free_bytes() == 70_000
    with (
        pytest.raises(OutOfSlotMemory, match=r"needs 70001 bytes; .* has 70000 free .*: raise the memory limit of the"),
        budget.reserve(tmp_path / "slots", 70_001, "five slots"),
    ):
        pass
    monkeypatch.setattr(shared_memory, "cgroup_available_bytes", lambda: -5)
    assert budget.free_bytes() == 0
