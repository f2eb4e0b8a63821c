"""Growth of stalls and restores with the state, the number of tensors and of ranks, as a picture."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from bench.checkpoint_rows.rank import Restores, Stalls, restores, snapshots
from bench.checkpoint_rows.state import Size
from bench.checkpoint_rows.vault_nodes import Fleet
from bench.processes import ProcessPool, RankFailed
from bench.table import Row
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK
from everstep_trainer.snapshot.slot_negotiation import CANDIDATE_ONLY_SLOTS

STATE_MIB = (16, 64, 256, 1024, 2048, 4096)
TENSORS = (10, 100, 1000, 10_000, 100_000)
RANKS = (1, 2, 4, 8)
OF_TENSORS_BYTES = 100_000 << 10
OF_RANKS_BYTES = 256 << 20
REPEATS, COMPUTE_S = 3, 0.05
STALL, RESTORE, MEMCPY = "#1f6f8b", "#c2571a", "#999999"


@dataclass
class Point:
    """Seconds at ``at`` (bytes, tensors or ranks) with ``slots`` a segment; ``why`` there are none."""

    at: int
    stall: float | None = None
    restore: float | None = None
    memcpy: float | None = None
    slots: int = SLOTS_PER_RANK
    why: str = ""


def curves(pool: ProcessPool, path: Path, quick: bool) -> list[Row]:
    """All three, drawn to ``path``."""
    states = [
        _point(pool, mib << 20, Size(64, (mib << 20) // 64), 1) for mib in (STATE_MIB[:3] if quick else STATE_MIB)
    ]
    tensors = [
        _point(pool, count, Size(count, OF_TENSORS_BYTES // count // 1024 * 1024), 1)
        for count in (TENSORS[:3] if quick else TENSORS)
    ]
    ranks = [
        _point(pool, world, Size(64, OF_RANKS_BYTES // 64, "shards" if world > 1 else "alone"), world)
        for world in (RANKS[:2] if quick else RANKS)
    ]
    panels = (
        ("state of one rank, 64 tensors", "MiB", [replace(point, at=point.at >> 20) for point in states]),
        (f"tensors, {OF_TENSORS_BYTES >> 20} MiB in all", "tensors", tensors),
        (f"nodes of one rank, {OF_RANKS_BYTES >> 20} MiB of FSDP2 state", "ranks", ranks),
    )
    draw(path, panels)
    return [row for name, unit, points in panels for point in points for row in _rows(name, unit, point)]


def _point(pool: ProcessPool, at: int, size: Size, world: int) -> Point:
    """Measure ``world`` ranks on as many nodes: the median over rounds of the slowest rank."""
    nodes = [f"n{number}" for number in range(world)]
    slots = SLOTS_PER_RANK if _fit(size.nbytes) else CANDIDATE_ONLY_SLOTS
    try:
        with Fleet(nodes) as fleet:
            spec, warm = fleet.generation(nodes, 1), str(fleet.warm)
            each = enumerate(fleet.sockets(nodes))
            stalls: list[Stalls] = pool.run(
                snapshots, [(spec, rank, socket, warm, size, REPEATS, COMPUTE_S, None, slots) for rank, socket in each]
            )
            last = stalls[0].last
            spec = fleet.generation(nodes, 1, floor=Version(spec.number, last))
            each = enumerate(fleet.sockets(nodes))
            filled: list[Restores] = pool.run(
                restores, [(spec, rank, socket, warm, size, REPEATS, last) for rank, socket in each]
            )
    except RankFailed as error:
        return Point(at, why=str(error).strip().splitlines()[-1][:160])
    return Point(
        at,
        _slowest([stall.blocked for stall in stalls]),
        _slowest([fill.fill for fill in filled]),
        _slowest([stall.memcpy for stall in stalls]),
        slots,
    )


def _fit(nbytes: int) -> bool:
    """Whether this machine has room for all slots of such a state, the state, and what a memcpy fills."""
    return (SLOTS_PER_RANK + 2) * nbytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _slowest(rounds: list[list[float]]) -> float:
    slowest: float = median(max(values) for values in zip(*rounds, strict=True))
    return slowest


def _rows(name: str, unit: str, point: Point) -> list[Row]:
    where = f"{name}: {point.at} {unit}" + (f", {point.slots} slots" if point.slots != SLOTS_PER_RANK else "")
    if point.stall is None or point.restore is None or point.memcpy is None:
        return [Row(f"{where}, stall and restore", None, "ms", against=point.why)]
    return [
        Row(f"{where}, stall", point.stall * 1e3, "ms", against=f"memcpy {point.memcpy * 1e3:.2f} ms"),
        Row(f"{where}, restore", point.restore * 1e3, "ms"),
    ]


def _short(number: int) -> str:
    return f"{number // 1000}k" if number % 1000 == 0 else str(number)


def draw(path: Path, panels: tuple[tuple[str, str, list[Point]], ...]) -> None:
    """One panel for each of what grows, both axes logarithmic."""
    figure, axes = plt.subplots(1, len(panels), figsize=(14, 4.5), constrained_layout=True)
    for axis, (name, unit, points) in zip(axes, panels, strict=True):
        known = [p for p in points if p.stall is not None and p.restore is not None and p.memcpy is not None]
        for values, colour, label, style in (
            ([(p.restore or 0) * 1e3 for p in known], RESTORE, "restore from own slot", "-"),
            ([(p.stall or 0) * 1e3 for p in known], STALL, "training blocked by a snapshot", "-"),
            ([(p.memcpy or 0) * 1e3 for p in known], MEMCPY, "memcpy of what a rank stores", ":"),
        ):
            axis.plot(
                [p.at for p in known], values, marker="o", color=colour, label=label, linestyle=style, linewidth=2
            )
        axis.set(title=name, xlabel=unit, ylabel="milliseconds", xscale="log", yscale="log")
        axis.set_xticks([p.at for p in points], [_short(p.at) for p in points])
        axis.set_xlim(points[0].at / 1.6, points[-1].at * 1.6)
        axis.minorticks_off()
        axis.grid(alpha=0.25)
        for missing in (p for p in points if p not in known):
            axis.annotate(
                "did not fit", (missing.at, 0.03), xycoords=("data", "axes fraction"), rotation=90, ha="center"
            )
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle("Snapshot and restore, no compute beside them")
    figure.savefig(path, dpi=110)
    plt.close(figure)
