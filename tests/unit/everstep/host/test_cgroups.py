"""The memory that control groups leave is read from both versions of their files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from everstep.host.cgroups import cgroup_available_bytes

GIB = 1 << 30
NOTHING_CACHED = "anon 5\ninactive_file 0\nactive_file 0\n"
CACHED = "anon 5\ninactive_file 3000\nactive_file 200\nshmem 90\n"


def left(tmp_path: Path, own: str, files: Mapping[str, str]) -> int | None:
    """Return the memory left on a machine with these files under its groups' mount."""
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "own").write_text(own)
    return cgroup_available_bytes(tmp_path / "cgroup", tmp_path / "own")


def group(folder: str, limit: object, used: int, stat: str = NOTHING_CACHED, high: object = "max") -> dict[str, str]:
    files = {"memory.max": f"{limit}\n", "memory.high": f"{high}\n", "memory.current": f"{used}\n", "memory.stat": stat}
    return {f"{folder}/{name}" if folder else name: text for name, text in files.items()}


def test_container_group_at_the_root_limits_memory(tmp_path: Path) -> None:
    assert left(tmp_path, "0::/\n", group("", 8 * GIB, 5 * GIB)) == 3 * GIB


def test_cached_files_count_as_free_and_slots_do_not(tmp_path: Path) -> None:
    assert left(tmp_path, "0::/\n", group("", 10_000, 9_000, CACHED)) == 10_000 - 9_000 + 3_200


def test_tightest_enclosing_group_limits_memory(tmp_path: Path) -> None:
    files = group("slurm", 4 * GIB, 3 * GIB) | group("slurm/job1", "max", GIB) | group("slurm/job1/step", 3 * GIB, GIB)
    assert left(tmp_path, "0::/slurm/job1/step\n", files) == GIB


def test_cgroup_v1_beside_v2_limits_memory(tmp_path: Path) -> None:
    files = {
        "memory/docker/c/memory.limit_in_bytes": "5000\n",
        "memory/docker/c/memory.usage_in_bytes": "4500\n",
        "memory/docker/c/memory.stat": "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 20\n",
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "7\n",
        "memory/memory.stat": "total_inactive_file 100\n",
    }
    assert left(tmp_path, "4:memory:/docker/c\n1:cpu,cpuacct:/x\n0::/\n", files) == 620


@pytest.mark.parametrize("own", ["0::/a\n", "", "nonsense\n", "3:cpu:/a\n"])
def test_unlimited_or_unreadable_group_has_no_limit(tmp_path: Path, own: str) -> None:
    assert left(tmp_path, own, group("a", "max", 5)) is None
    assert cgroup_available_bytes(tmp_path, tmp_path / "not there") is None
