"""The plot: effective training time by size and way of recovery, and where the lost hours went."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from bench.goodput.recovery_model import GPUS_PER_NODE
from bench.goodput.runs import Outcome

OURS, THEIRS, PUBLISHED = "#2a6f97", "#b0b7bf", "#d98e04"
CAUSES_SHOWN = 9


def draw(path: Path, outcomes: list[Outcome], restart: dict[int, float], published: dict[str, float]) -> None:
    """Writes a PNG with both halves."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), gridspec_kw={"width_ratios": (1, 1.25)})
    _ratios(left, outcomes, restart, published)
    _losses(right, outcomes)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _ratios(axes: Axes, outcomes: list[Outcome], restart: dict[int, float], published: dict[str, float]) -> None:
    places = range(len(outcomes))
    ours = [100 * outcome.ratio for outcome in outcomes]
    theirs = [100 * restart[outcome.nodes] for outcome in outcomes]
    for offset, values, colour, name in ((-0.2, ours, OURS, "Everstep"), (0.2, theirs, THEIRS, "restart all")):
        bars = axes.bar([place + offset for place in places], values, 0.38, color=colour, label=name)
        axes.bar_label(bars, fmt="%.1f", padding=2)
    for (name, value), style in zip(published.items(), (":", "--"), strict=False):
        axes.axhline(100 * value, color=PUBLISHED, linestyle=style, linewidth=1.2, label=name)
    axes.set_xticks(list(places), [f"{outcome.nodes * GPUS_PER_NODE:,} GPUs" for outcome in outcomes])
    axes.set_ylabel("effective training time, %")
    axes.set_ylim(0, 112)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncol=2, fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _losses(axes: Axes, outcomes: list[Outcome]) -> None:
    """Lost GPU-hours by cause, as a share of all, one row a cause."""
    largest = outcomes[-1]
    causes = list(largest.lost)[:CAUSES_SHOWN][::-1]
    height = 0.8 / len(outcomes)
    for index, outcome in enumerate(outcomes):
        total = outcome.days * 24 * outcome.nodes * GPUS_PER_NODE
        shares = [100 * outcome.lost.get(cause, 0.0) / total for cause in causes]
        places = [place - 0.4 + height * (index + 0.5) for place in range(len(causes))]
        label = f"{outcome.nodes * GPUS_PER_NODE:,} GPUs, {outcome.days:g} days"
        axes.barh(places, shares, height, color=(THEIRS, OURS)[index % 2], label=label)
    axes.set_yticks(range(len(causes)), [cause.replace("_", " ") for cause in causes])
    axes.set_xlabel("GPU-hours lost, % of all")
    axes.legend(fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
