"""What a container, a Slurm job or a service may still take of the machine's memory.

Pages of a memory file system are charged to the control group of whoever makes them: the vault. Where it makes more
than its group may have, the kernel kills in that group, however much memory the machine has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
UNLIMITED = 1 << 60
"""And more: version 1 writes nearly 2^63 where version 2 writes ``max``."""


class _Files(NamedTuple):
    """Of a group. ``limits``: beyond which the kernel kills, or holds up whoever wants more for as long as it can.
    ``prefix``: of the counters in ``memory.stat`` that count groups below in."""

    limits: tuple[str, ...]
    used: str
    prefix: str


_VERSION_1 = _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")
_VERSION_2 = _Files(("memory.max", "memory.high"), "memory.current", "")


def group_left_bytes(cgroups: Path = CGROUPS, own: Path = OWN) -> int | None:
    """The least that any of the groups around this process has left; what it has cached of files counts as left.

    None where nothing limits it, or nobody says. Negative where the limit was lowered below what is in use.
    """
    found = (_left_in(group, files) for group, files in _groups(cgroups, own))
    return min((left for left in found if left is not None), default=None)


def _groups(cgroups: Path, own: Path) -> Iterator[tuple[Path, _Files]]:
    """This process's group and those around it. A container that sees its own at the root may be told a path that only
    the machine has: then the root is all there is."""
    try:
        said = [line.split(":", 2)[1:] for line in own.read_text().splitlines() if line.count(":") > 1]
    except OSError:
        return
    paths = {name: path for names, path in said for name in names.split(",")}
    root, files = (cgroups / "memory", _VERSION_1) if "memory" in paths else (cgroups, _VERSION_2)
    path = PurePosixPath(paths.get("memory", paths.get("", "/")))
    inside = () if ".." in path.parts else path.parts[1:]
    for depth in range(len(inside), -1, -1):
        yield root.joinpath(*inside[:depth]), files


def _left_in(group: Path, files: _Files) -> int | None:
    try:
        limit = min(_limit(group / name) for name in files.limits)
        used = int((group / files.used).read_text())
        counters = dict(line.split(maxsplit=1) for line in (group / "memory.stat").read_text().splitlines())
        cached = sum(int(counters.get(f"{files.prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    except (OSError, ValueError):
        return None
    return None if limit >= UNLIMITED else limit - used + cached


def _limit(file: Path) -> int:
    text = file.read_text().strip()
    return UNLIMITED if text == "max" else int(text)
