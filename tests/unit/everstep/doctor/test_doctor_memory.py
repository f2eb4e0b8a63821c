"""The memory for checkpoints is checked against the machine, a container's default and a model's state."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from everstep.doctor.memory import MemoryFacts, check_memory, read_memory, slot_bytes
from everstep.doctor.results import Status

GIB = 1 << 30


def statuses(state_bytes: int | None = None, nodes: int = 1, **changed: Any) -> dict[str, tuple[Status, str]]:
    known = {"shm_size": 32 * GIB, "shm_free": 32 * GIB, "total": 64 * GIB, "available": 60 * GIB, "group_left": None}
    results = check_memory(MemoryFacts(**known | changed), state_bytes, nodes)
    return {one.check: (one.status, one.sentence) for one in results}


def test_half_of_the_memory_is_enough_shared_memory() -> None:
    assert {name: status for name, (status, _) in statuses().items()} == {
        "shared memory": Status.OK,
        "memory limit": Status.OK,
    }


@pytest.mark.parametrize(("size", "status"), [(64 << 20, Status.FAIL), (8 * GIB, Status.WARN), (16 * GIB, Status.OK)])
def test_small_shared_memory_is_reported(size: int, status: Status) -> None:
    assert statuses(shm_size=size, shm_free=size)["shared memory"][0] is status


def test_slots_are_summed_as_the_tuning_page_says() -> None:
    """docs/how-to/tune.md: the examples per node."""
    assert round(slot_bytes(33_600_000, 1, 5) / 1e6) == 336
    assert round(slot_bytes(33_600_000, 4, 5) / 1e6) == 112
    assert round(slot_bytes(84_000_000_000, 4, 5) / 1e9) == 280
    assert round(slot_bytes(84_000_000_000, 16, 5) / 1e9) == 56


@pytest.mark.parametrize(
    ("state", "nodes", "status", "words"),
    [
        (2 * GIB, 1, Status.OK, "5 slots need 20.0 GiB"),
        (5 * GIB, 1, Status.WARN, r"2 slots \(20.0 GiB\) are kept"),
        (5 * GIB, 4, Status.OK, "5 slots need 16.7 GiB"),
        (20 * GIB, 1, Status.FAIL, "even 2 slots need 80.0 GiB"),
    ],
)
def test_model_is_compared_with_free_memory(state: int, nodes: int, status: Status, words: str) -> None:
    found, sentence = statuses(state, nodes)["checkpoint memory"]
    assert found is status
    assert re.search(words, sentence)


def test_control_group_limits_checkpoints() -> None:
    found = statuses(2 * GIB, group_left=10 * GIB)
    assert found["memory limit"][1] == "a control group leaves 10.0 GiB of memory to this process"
    assert found["checkpoint memory"][0] is Status.WARN


def test_machines_memory_is_read(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 2048 kB\nMemAvailable:  1024 kB\nHugePages_Total: 0\n")
    facts = read_memory(tmp_path, tmp_path / "meminfo")
    assert (facts.total, facts.available) == (2 << 20, 1 << 20)
    assert facts.shm_size >= facts.shm_free > 0
