"""Growth of the controller's cost with its fleet, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

Point = tuple[int, dict[str, Any]]
COLOURS = ("#1f6f8b", "#c2571a", "#5b7f3a")


def draw(path: Path, points: list[Point], interval_s: float) -> None:
    """Three small plots over the number of nodes: processor, processor per heartbeat, memory."""
    panels = (
        ("controller CPU", "cores", 0.6, 0.3),
        ("controller CPU per heartbeat", "microseconds", 48.0, 24.0),
        ("resident memory", "MiB", 600.0, 300.0),
    )
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), constrained_layout=True)
    nodes = [place for place, _ in points]
    for axis, (name, unit, floor, aim), colour in zip(axes, panels, COLOURS, strict=True):
        found = [values[name] for _, values in points]
        axis.plot(nodes, found, marker="o", color=colour, linewidth=2)
        axis.axhline(floor, color="#999999", linestyle=":", linewidth=1)
        axis.axhline(aim, color="#999999", linestyle="--", linewidth=1)
        axis.annotate("floor", (0.01, floor), xycoords=("axes fraction", "data"), va="bottom", color="#777777")
        axis.annotate("aim", (0.01, aim), xycoords=("axes fraction", "data"), va="bottom", color="#777777")
        axis.set(
            title=name,
            xlabel="nodes (eight GPUs each)",
            ylabel=unit,
            ylim=(0, max(floor, *found) * 1.15),
            xlim=(0, None),
        )
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"One controller, one heartbeat per node every {interval_s:g} s")
    figure.savefig(path, dpi=110)
    plt.close(figure)
