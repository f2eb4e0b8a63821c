"""The page that is left when the demonstration is over: one file, no scripts, no network."""

from __future__ import annotations

import math
from pathlib import Path

import jinja2
from markupsafe import Markup

from everstep.receipts.page import STYLE
from examples.demo.story import FaultRecord, Run
from examples.demo.verify import Verified

WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT = 1080, 400, 66, 48, 14
MARK_RADIUS = 9
MARK_ROWS = 3
"""Rows of numbers above the curve: faults may be few steps apart."""
TOP = MARK_ROWS * (2 * MARK_RADIUS + 3) + 12
DIFFERENCE_HEIGHT = 150
LAYOUTS = {
    "ddp": "Every rank holds the whole model, so the ranks vote on their parameters.",
    "fsdp2": "Every rank holds a shard of its own, of which another node's vault has a copy; no two ranks can vote.",
}

FOLDER = Path(__file__).parent


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


class _Scale:
    """From (step, value) to points of a picture.

    Args:
        top, bottom: of the plotted area, in points from above.
    """

    def __init__(self, steps: int, low: float, high: float, top: float, bottom: float) -> None:
        self._steps, self._low, self._high = max(steps, 2), low, max(high, low + 1e-12)
        self.top, self.bottom = top, bottom

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (step - 1) / (self._steps - 1)

    def y(self, value: float) -> float:
        return self.top + (self.bottom - self.top) * (self._high - value) / (self._high - self._low)


def _curve(points: list[tuple[int, float]], scale: _Scale, style: str) -> str:
    path = " ".join(f"{scale.x(step):.1f},{scale.y(value):.1f}" for step, value in points)
    return f'<polyline fill="none" {style} points="{path}"/>'


def _axes(scale: _Scale, steps: int, marks: list[tuple[float, str]], title: str) -> list[str]:
    """Grid, numbers and titles of both axes; ``marks`` are the vertical axis' values with their texts."""
    parts = []
    for value, text in marks:
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    for index in range(5):
        step = 1 + round((steps - 1) * index / 4)
        parts.append(f'<text x="{scale.x(step):.1f}" y="{scale.bottom + 18:.1f}" text-anchor="middle">{step}</text>')
    middle = (scale.top + scale.bottom) / 2
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{scale.bottom + 36:.0f}" text-anchor="middle">step</text>')
    parts.append(f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{title}</text>')
    return parts


def mark_rows(places: list[float]) -> list[int]:
    """Return the row of each mark, so that no two marks of a row overlap; the last row takes what fits nowhere."""
    free = [float("-inf")] * MARK_ROWS
    rows = []
    for x in places:
        row = next((row for row in range(MARK_ROWS) if x >= free[row]), min(range(MARK_ROWS), key=free.__getitem__))
        free[row] = x + 2 * MARK_RADIUS + 2
        rows.append(row)
    return rows


def _marks(scale: _Scale, faults: list[FaultRecord]) -> list[str]:
    parts = []
    places = [scale.x(max(1, fault.step)) for fault in faults]
    for number, (x, row) in enumerate(zip(places, mark_rows(places), strict=True), 1):
        y = scale.top - 12 - MARK_RADIUS - row * (2 * MARK_RADIUS + 3)
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{y + MARK_RADIUS:.1f}" y2="{scale.bottom:.1f}"/>'
            f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="{MARK_RADIUS}"/>'
            f'<text class="number" x="{x:.1f}" y="{y + 4:.1f}" text-anchor="middle">{number}</text>'
        )
    return parts


def loss_picture(run: Run, reference: Run, faults: list[FaultRecord]) -> str:
    """The loss curve over the uninterrupted run's, as SVG, with a numbered mark at each fault.

    The uninterrupted run is dashed above this one's line: where both are equal, the colours alternate.
    """
    ours = sorted((number, step.loss) for number, step in run.standing().items())
    theirs = sorted((number, step.loss) for number, step in reference.standing().items())
    losses = [loss for _, loss in ours + theirs] or [0.0, 1.0]
    low, high, steps = min(losses), max(losses), max([number for number, _ in ours + theirs], default=2)
    scale = _Scale(steps, low, high, TOP, HEIGHT - BOTTOM)
    marks = [(low + (high - low) * index / 4, f"{low + (high - low) * index / 4:.2f}") for index in range(5)]
    parts = [
        *_axes(scale, steps, marks, "loss (nats)"),
        *_marks(scale, faults),
        _curve(ours, scale, 'class="ours"'),
        _curve(theirs, scale, 'class="theirs"'),
    ]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss by step">{"".join(parts)}</svg>'


SMALLEST = 1e-8
"""Differences below this are drawn on the bottom line, which stands for equality to the last bit."""


def difference_picture(run: Run, reference: Run) -> str:
    """The absolute difference of each step's loss from the uninterrupted run's, on a logarithmic axis."""
    ours, theirs = run.standing(), reference.standing()
    both = sorted(ours.keys() & theirs.keys())
    exponents = [
        (step, math.log10(max(SMALLEST, abs(ours[step].loss - theirs[step].loss))))
        for step in both
        if math.isfinite(ours[step].loss - theirs[step].loss)
    ]
    low, high = math.log10(SMALLEST), max([value for _, value in exponents] + [-5.0])
    scale = _Scale(max(both, default=2), low, high, 10, DIFFERENCE_HEIGHT - BOTTOM)
    marks = [(low, "equal")] + [(float(power), f"1e{power}") for power in range(-6, math.floor(high) + 1, 2)]
    parts = [*_axes(scale, max(both, default=2), marks, "difference"), _curve(exponents, scale, 'class="ours"')]
    size = f"0 0 {WIDTH} {DIFFERENCE_HEIGHT}"
    return f'<svg viewBox="{size}" role="img" aria-label="difference of the loss by step">{"".join(parts)}</svg>'


def write_report(
    path: Path,
    *,
    layout: str,
    run: Run,
    reference: Run,
    faults: list[FaultRecord],
    verified: Verified | None,
    timeline: list[tuple[float, str, str]],
    problems: list[str],
    wall_s: float,
) -> None:
    """Writes the page to ``path``. ``timeline`` is (seconds since start, kind, sentence)."""
    cards = [("result", "all well" if not problems else "not as it must be"), ("wall time", f"{wall_s:.0f} s")]
    if verified is not None:
        cards += [
            ("steps", str(verified.steps)),
            ("final loss", f"{verified.final:.6f}"),
            ("uninterrupted", f"{verified.uninterrupted_final:.6f}"),
            ("largest difference", f"{verified.max_abs_difference:.1e}"),
            ("equal to the bit through step", str(verified.exact_through)),
            ("samples seen / repeated / skipped", f"{verified.seen} / {verified.repeated} / {verified.skipped}"),
        ]
    pages = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined
    )
    pages.filters["seconds"] = _seconds
    page = pages.get_template("report.html.jinja").render(
        style=Markup(STYLE.read_text() + (FOLDER / "report.css").read_text()),
        lead=LAYOUTS[layout],
        cards=cards,
        problems=problems,
        loss=Markup(loss_picture(run, reference, faults)),
        difference=Markup(difference_picture(run, reference)),
        faults=faults,
        timeline=timeline,
    )
    path.write_text(page + "\n")
