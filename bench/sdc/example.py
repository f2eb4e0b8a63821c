"""Draw what one rank that computes wrongly does to a run, with and without the chain of audits.

One in 10,000 elements of its products has a wrong value, and with it the column it is in. Nothing else fails.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from bench.sdc.cells import MAIN, Measure
from bench.sdc.injection import Corruption, Shape, Site, draw
from bench.sdc.models import Config
from bench.sdc.ranks import Ranks
from bench.sdc.training import Story
from bench.table import Row

LIAR, ONSET, STEPS, SMOOTHED = 2, 120, 500, 15
FAULT = replace(
    draw("example", Site.GEMM_FORWARD, 0, 4),
    rank=LIAR,
    corruption=Corruption.VALUE,
    shape=Shape.COLUMN,
    positions=(1.0,),  # twice the largest value
    probability=1e-4,
    gate=0.0,
)
RIGHT, WRONG, OURS = "#b0b7bf", "#c0392b", "#2a6f97"


def show(ranks: Ranks, measures: Measure, path: Path, steps: int = STEPS) -> list[Row]:
    """Write the picture; return the figures under it."""
    config = Config.parse(MAIN)
    intervals = measures.intervals(config, "standard")
    right = ranks.call(config, "tell", None, {}, ONSET, steps)
    without = ranks.call(config, "tell", FAULT, {}, ONSET, steps)
    audited = ranks.call(config, "tell", FAULT, intervals, ONSET, steps)
    draw_losses(path, right[0], without[0], audited[0])
    return rows_of(right[0], without[0], audited[0])


def rows_of(right: Story, without: Story, audited: Story) -> list[Row]:
    """Return the figures of the three runs."""
    judgements = [one for report in audited.reports for one in report.judgements]
    named = ", ".join(f"rank {one.rank} {one.outcome} by {one.link}" for one in judgements) or "nobody"
    reported = audited.reports[0].step if audited.reports else 0
    replaced = ", ".join(f"rank {rank}" for rank in audited.replaced) or "nobody"
    last = max(right.losses)
    is_equal = audited.digests == right.digests
    return [
        Row("loss without the fault", _smooth(right)[last], ""),
        Row("loss with the fault, no chain", _smooth(without)[last], ""),
        Row("loss with the fault and the chain", _smooth(audited)[last], "", against="equal bits" if is_equal else ""),
        Row("steps from the fault to its first report", max(0, reported - ONSET), "steps", against=named),
        Row("replaced nodes", len(audited.replaced), "", against=replaced),
        Row("steps computed again", sum(one.step - one.back_at for one in audited.reports), "steps"),
    ]


def _smooth(story: Story) -> dict[int, float]:
    """Return the mean over the last steps, by step."""
    smooth = {}
    for step in story.losses:
        some = [story.losses[one] for one in range(max(1, step - SMOOTHED + 1), step + 1)]
        smooth[step] = sum(some) / len(some)
    return smooth


def draw_losses(path: Path, right: Story, without: Story, audited: Story) -> None:
    """Write a PNG with the losses of the three runs."""
    figure, axes = plt.subplots(figsize=(8, 4))
    for story, colour, width, label in (
        (without, WRONG, 1.4, "a rank computes wrongly, nobody looks"),
        (audited, OURS, 2.6, "the same, with audits"),
        (right, "black", 0.8, "no fault"),
    ):
        smooth = _smooth(story)
        axes.plot(list(smooth), list(smooth.values()), color=colour, linewidth=width, label=label)
    marks = [(ONSET, RIGHT, "the fault begins ", "right")]
    if audited.replaced:
        marks.append((max(audited.replaced.values()), OURS, " found and undone", "left"))
    for step, colour, text, side in marks:
        axes.axvline(step, color=colour, linestyle=":")
        axes.annotate(text, (step, axes.get_ylim()[1]), fontsize=8, va="top", ha=side)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss")
    axes.legend(frameon=False, fontsize=9, loc="upper center", bbox_to_anchor=(0.5, 1.14), ncol=3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
