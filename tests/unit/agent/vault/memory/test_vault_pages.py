"""Pages of slots: huge if the file system has huge pages, and near the rank if there is a choice."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from everstep_agent.vault.memory.shared_memory import MPOL_DEFAULT, MPOL_PREFERRED, has_huge_pages, prefer_numa_node

MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
tmpfs /dev/shm tmpfs rw,relatime,size=24684084k 0 0
tmpfs /dev/shm/big\\040slots tmpfs rw,relatime,huge=advise 0 0
tmpfs /mnt/always tmpfs rw,huge=always 0 0
tmpfs /mnt/never tmpfs rw,huge=never 0 0
"""
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}


@pytest.mark.parametrize(
    ("directory", "huge"),
    [
        ("/dev/shm/everstep", False),
        ("/dev/shm/big slots/everstep", True),
        ("/dev/shm/big", False),
        ("/mnt/always", True),
        ("/mnt/never/x", False),
        ("/mnt/alwaysnot", False),
    ],
)
def test_innermost_mount_decides_whether_pages_are_huge(directory: str, huge: bool) -> None:
    assert has_huge_pages(Path(directory), MOUNTS, "") is huge


HUGE_SEGMENT = """
import os, pathlib, sys
from everstep_agent.vault.memory.segments import SegmentKey, SegmentStore
segment = SegmentStore(pathlib.Path(sys.argv[1]), "n1", None).open(SegmentKey("job", "own", 0), 2 << 20, 4)
lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
found = segment.path.stat()
print(found.st_size, found.st_blocks * 512, *[s.split()[1] for s in lines if s.startswith("ShmemHugePages")])
"""


def test_segment_uses_huge_pages_on_a_mount_with_huge_option(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o huge=advise,size=64m t {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, HUGE_SEGMENT], capture_output=True, text=True, timeout=60
    )
    if done.returncode in (1, 32) and "ermission" in done.stderr + done.stdout:
        pytest.skip("mounting a file system needs root")
    assert done.returncode == 0, done.stderr
    size, made, huge_kib = map(int, done.stdout.split())
    assert made >= size > 8 << 20
    assert huge_kib >= 8 << 10


def policy() -> tuple[int, int]:
    """Return this thread's memory mode and nodes."""
    mode, nodes = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(GET_MEMPOLICY[platform.machine()])
    asked = libc.syscall(number, ctypes.byref(mode), nodes, ctypes.c_ulong(1024), None, ctypes.c_ulong(0))
    if asked != 0:
        pytest.skip(f"this kernel does not tell: {os.strerror(ctypes.get_errno())}")
    return mode.value, nodes[0]


@pytest.mark.skipif(platform.machine() not in GET_MEMPOLICY, reason="the system call's number is not known here")
def test_pages_are_allocated_near_the_named_numa_node() -> None:
    before = policy()
    with prefer_numa_node(0):
        assert policy() == (MPOL_PREFERRED, 1)
    assert policy() == before == (MPOL_DEFAULT, 0)
    with prefer_numa_node(None):
        assert policy() == before


def test_missing_numa_node_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), prefer_numa_node(1000):
        pass
    assert "NUMA node 1000" in caplog.text
