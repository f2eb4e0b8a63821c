"""Read memory of control groups (a container, a Slurm job, a service): what they leave, and kills by the kernel.

Pages of a memory file system are charged to the group of the process that makes them, the vault. Beyond the group's
limit the kernel kills in that group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUP_FILE = Path("/proc/self/cgroup")
UNLIMITED_BYTES = 1 << 60
"""Limits from here on mean no limit: version 1 writes nearly 2^63 where version 2 writes ``max``."""


class _CgroupFiles(NamedTuple):
    """File names of a control group version, and the prefix of the counters that include groups below."""

    limits: tuple[str, ...]
    used: str
    prefix: str


_CGROUP_V1 = _CgroupFiles(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
_CGROUP_V2 = _CgroupFiles(("memory.max", "memory.high"), "memory.current", "")


def cgroup_available_bytes(cgroups: Path = CGROUP_ROOT, own_cgroup_file: Path = OWN_CGROUP_FILE) -> int | None:
    """Return the fewest bytes left in a group around this process, cached pages included; None without limits."""
    found = (_cgroup_available(group, files) for group, files in _enclosing_cgroups(cgroups, own_cgroup_file))
    return min((available for available in found if available is not None), default=None)


def _enclosing_cgroups(cgroups: Path, own: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield this process's group and those around it; in a container whose path is the machine's, only the root."""
    try:
        entries = [line.split(":", 2)[1:] for line in own.read_text().splitlines() if line.count(":") > 1]
    except OSError:
        return
    paths = {name: path for names, path in entries for name in names.split(",")}
    root, files = (cgroups / "memory", _CGROUP_V1) if "memory" in paths else (cgroups, _CGROUP_V2)
    path = PurePosixPath(paths.get("memory", paths.get("", "/")))
    inside = () if ".." in path.parts else path.parts[1:]
    for depth in range(len(inside), -1, -1):
        yield root.joinpath(*inside[:depth]), files


def _cgroup_available(group: Path, files: _CgroupFiles) -> int | None:
    try:
        limits = ((group / name).read_text().strip() for name in files.limits)
        limit = min(UNLIMITED_BYTES if text == "max" else int(text) for text in limits)
        used = int((group / files.used).read_text())
        counters = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(counters.get(f"{files.prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    except (OSError, ValueError):
        return None
    return None if limit >= UNLIMITED_BYTES else limit - used + cached


def process_group(cgroups: Path, cgroup_file: Path) -> Path | None:
    """Return the innermost group of the process with this file that is visible here; None if there is none."""
    groups = (group for group, _ in _enclosing_cgroups(cgroups, cgroup_file))
    return next((group for group in groups if oom_kill_count(group) is not None), None)


def oom_kill_count(group: Path) -> int | None:
    """Return how many processes of the group the kernel has killed for want of memory; None if it does not tell."""
    for name in ("memory.events", "memory.oom_control"):  # version 2, version 1
        try:
            lines = (group / name).read_text().splitlines()
        except OSError:
            continue
        counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
        if counts.get("oom_kill", "").isdigit():
            return int(counts["oom_kill"])
    return None


def memory_limit_bytes(group: Path) -> int | None:
    """Return the group's own limit in bytes; None without one."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            text = (group / name).read_text().strip()
        except OSError:
            continue
        return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else None
    return None
