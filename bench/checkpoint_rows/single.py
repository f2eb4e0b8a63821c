"""Rows of one rank alone on its node: a snapshot's stall, a restore from its own slot, the cost of many tensors."""

from __future__ import annotations

from statistics import median

from bench.checkpoint_rows.rank import Restores, Stalls, restores, snapshots
from bench.checkpoint_rows.state import Size
from bench.checkpoint_rows.vault_nodes import Fleet
from bench.processes import ProcessPool
from bench.table import Row, marks
from everstep.ids import Version

MIB = 1 << 20
NODE = "n1"
COMPUTE_TIMES = 8
"""Factor by which a step during a copy is longer than a memcpy."""
MEMCPY_BYTES_PER_S = 15e9


def alone(pool: ProcessPool, size: Size, repeats: int, *, restore: bool = True) -> tuple[Stalls, Restores | None]:
    """Snapshots of a rank, and restores of the last one in a new process."""
    compute_s = max(0.05, COMPUTE_TIMES * size.nbytes / MEMCPY_BYTES_PER_S)
    with Fleet([NODE]) as fleet:
        spec, warm = fleet.generation([NODE], 1), str(fleet.warm)
        socket = fleet.vaults[NODE].socket
        stalls: Stalls = pool.one(snapshots, spec, 0, socket, warm, size, repeats, compute_s)
        if not restore:
            return stalls, None
        spec = fleet.generation([NODE], 1, floor=Version(spec.number, stalls.last))
        filled: Restores = pool.one(restores, spec, 0, socket, warm, size, repeats, stalls.last)
        return stalls, filled


def large(pool: ProcessPool, size: Size, repeats: int, judged: bool) -> list[Row]:
    """The state of one rank."""
    stalls, filled = alone(pool, size, repeats)
    assert filled is not None
    name = f"1 rank, {size.nbytes / MIB:.0f} MiB in {size.tensors} tensors"
    memcpy, back = median(stalls.memcpy), median(filled.memcpy)
    return [
        Row(f"{name}: memcpy to warm shared memory", memcpy * 1e3, "ms"),
        *stall_rows(name, stalls, memcpy, judged),
        Row(f"{name}: restored from its own slot", median(filled.fill) * 1e3, "ms"),
        Row(
            f"{name}: the same against memcpy",
            median(filled.fill) / back,
            "x",
            *marks(judged, 1.5, 1.1),
            f"memcpy back, {back * 1e3:.1f} ms",
        ),
    ]


def stall_rows(name: str, stalls: Stalls, memcpy: float, judged: bool) -> list[Row]:
    """Return rows of the training thread's blocked time, also as a multiple of a memcpy of the same bytes."""
    blocked, under = median(stalls.blocked), median(stalls.under)
    against = f"memcpy, {memcpy * 1e3:.1f} ms"
    return [
        Row(f"{name}: blocked by a snapshot", blocked * 1e3, "ms"),
        Row(f"{name}: the same against memcpy", blocked / memcpy, "x", *marks(judged, 1.2, 1.0), against),
        Row(f"{name}: copy under the next step", under / memcpy, "x", *marks(judged, 1.2, 0.05), against),
        Row(f"{name}: snapshots back to back, each", stalls.back_to_back * 1e3, "ms", against="copy, hash, seal"),
    ]


def small(pool: ProcessPool, tensors: int, repeats: int) -> list[Row]:
    """Measure the cost of a snapshot apart from its bytes."""
    stalls, _ = alone(pool, Size(tensors, 1024), repeats, restore=False)
    memcpy = median(stalls.memcpy)
    name = f"1 rank, {tensors} tensors of 1 KiB"
    blocked, against = median(stalls.blocked) - memcpy, f"less {memcpy * 1e3:.2f} ms of memcpy"
    return [Row(f"{name}: blocked by a snapshot, apart from bytes", blocked * 1e3, "ms", 5.0, 0.5, against)]
