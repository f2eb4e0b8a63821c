"""Check the memory that holds checkpoints: the file system /dev/shm, the machine's memory, and control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from everstep.doctor.results import CheckResult, fail, ok, warn
from everstep.host.cgroups import cgroup_available_bytes
from everstep.layout.slots import SLOTS_PER_RANK

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory is the point
REPLICAS = 2
"""Default of --replicas."""
FEWEST_SLOTS = 2
CONTAINER_DEFAULT_BYTES = 64 << 20
"""Size of /dev/shm in a container whose runtime was not told another one."""
FREE_SHARE = 0.75
"""Share of the free memory that slots may take; the rest is left to training."""


class MemoryFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the memory file system and of the machine. ``group_left``: None without a limit."""

    shm_size: int
    shm_free: int
    total: int
    available: int
    group_left: int | None = None


def read_memory(shm: Path = SHARED_MEMORY, meminfo: Path = Path("/proc/meminfo")) -> MemoryFacts:
    """Return this machine's facts. Raises OSError."""
    found = os.statvfs(shm)
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    kib = {name: int(text.split()[0]) for name, text in lines.items()}
    return MemoryFacts(
        shm_size=found.f_blocks * found.f_frsize,
        shm_free=found.f_bavail * found.f_frsize,
        total=kib["MemTotal"] << 10,
        available=kib["MemAvailable"] << 10,
        group_left=cgroup_available_bytes(),
    )


def check_memory(facts: MemoryFacts, state_bytes: int | None, nodes: int) -> Iterator[CheckResult]:
    """Check the memory of one node. ``state_bytes``: parameters and optimizer state of the whole job, if known."""
    yield _check_size(facts)
    if facts.group_left is None:
        yield ok("memory limit", "no control group limits the memory of this process")
    elif facts.group_left < facts.available:
        yield ok("memory limit", f"a control group leaves {_gib(facts.group_left)} of memory to this process")
    else:
        yield ok("memory limit", f"the control group's limit is above the machine's free {_gib(facts.available)}")
    if state_bytes is not None:
        yield _check_slots(facts, state_bytes, nodes)


def _check_size(facts: MemoryFacts) -> CheckResult:
    sizes = (
        f"{SHARED_MEMORY} has {_gib(facts.shm_size)}, {_gib(facts.shm_free)} of it free, of {_gib(facts.total)} memory"
    )
    if facts.shm_size <= CONTAINER_DEFAULT_BYTES:
        return fail(
            "shared memory",
            f"{sizes}: that is a container's default; give it more (docker run --shm-size, or an emptyDir with medium "
            "Memory)",
        )
    if facts.shm_size < facts.total // 4:
        return warn("shared memory", f"{sizes}: checkpoints are kept there; enlarge it to half of the memory")
    return ok("shared memory", sizes)


def slot_bytes(state_bytes: int, nodes: int, slots: int) -> int:
    """Return the bytes of a node's slots with two replicas, with room for the loss of a node if all slots fit."""
    share = slots * REPLICAS * state_bytes / nodes
    return int(share * nodes / (nodes - 1)) if nodes > 1 and slots > FEWEST_SLOTS else int(share)


def _check_slots(facts: MemoryFacts, state_bytes: int, nodes: int) -> CheckResult:
    limits = [facts.shm_free, facts.available, *(() if facts.group_left is None else (facts.group_left,))]
    left = min(limits)
    all_slots, fewest = (slot_bytes(state_bytes, nodes, slots) for slots in (SLOTS_PER_RANK, FEWEST_SLOTS))
    where = f"{_gib(left)} are free for checkpoints on this node"
    if all_slots <= min(facts.shm_free, FREE_SHARE * left):
        return ok("checkpoint memory", f"{where}, and {SLOTS_PER_RANK} slots need {_gib(all_slots)}")
    if fewest <= left:
        return warn(
            "checkpoint memory",
            f"{where}, and {SLOTS_PER_RANK} slots need {_gib(all_slots)} with a quarter of the memory left: "
            f"{FEWEST_SLOTS} slots ({_gib(fewest)}) are kept, and a loss costs the steps since the last commit. Free "
            "memory, or add nodes",
        )
    return fail(
        "checkpoint memory",
        f"{where}, and even {FEWEST_SLOTS} slots need {_gib(fewest)}: ranks would train without checkpoints. Enlarge "
        f"{SHARED_MEMORY}, add nodes, or take --replicas 1",
    )


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
