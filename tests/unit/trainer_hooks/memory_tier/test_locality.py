"""Which NUMA node a rank's slots should be near."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from everstep_trainer.memory_tier import vault_client
from everstep_trainer.memory_tier.vault_client import numa_node


def machine(root: Path, *cpulists: str) -> Path:
    for node, processors in enumerate(cpulists):
        folder = root / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(processors + "\n")
    return root


def with_gpu(root: Path, said: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = root / "bus/pci/devices/0000:4e:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(said + "\n")
    monkeypatch.setattr(vault_client, "_gpu_address", lambda: "0000:4e:00.0")
    return root


@pytest.mark.parametrize(
    ("allowed", "node"),
    [({4, 5}, 1), ({0, 3, 8}, 0), ({3, 4}, None), ({12}, None)],
    ids=["one", "both parts", "two", "no"],
)
def test_rank_belongs_to_the_numa_node_of_all_its_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], node: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    assert numa_node(machine(tmp_path, "0-3,8", "4-7", "")) == node


def test_machine_with_one_numa_node_has_no_preference(tmp_path: Path) -> None:
    assert numa_node(machine(tmp_path, f"0-{os.cpu_count()}")) is None


def test_gpu_locality_precedes_processor_affinity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert numa_node(with_gpu(machine(tmp_path, "0-3", "4-7"), "1", monkeypatch)) == 1


def test_gpu_without_firmware_locality_has_no_numa_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert numa_node(with_gpu(machine(tmp_path, "0-3", "4-7"), "-1", monkeypatch)) is None
