"""The page that is left when the demonstration is over: one file, no scripts, no network."""

from __future__ import annotations

from html import escape
from pathlib import Path

from examples.demo.story import FaultRecord, Run
from examples.demo.verify import Verified

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 1080, 360, 56, 34, 30
MARK_RADIUS = 10
LAYOUTS = {
    "ddp": "Every rank holds the whole model, so the ranks vote on their parameters.",
    "fsdp2": "Every rank holds a shard of its own, of which another node's vault has a copy; there is nobody to vote.",
}

STYLE = Path(__file__).with_name("report.css")


def _seconds(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


class _Scale:
    """From (step, loss) to points of the picture."""

    def __init__(self, steps: int, low: float, high: float) -> None:
        self._steps, self._low, self._high = max(steps, 2), low, max(high, low + 1e-6)

    def x(self, step: float) -> float:
        return LEFT + (WIDTH - LEFT - 12) * (step - 1) / (self._steps - 1)

    def y(self, loss: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (self._high - loss) / (self._high - self._low)


def _curve(points: list[tuple[int, float]], scale: _Scale, style: str) -> str:
    path = " ".join(f"{scale.x(step):.1f},{scale.y(loss):.1f}" for step, loss in points)
    return f'<polyline fill="none" {style} points="{path}"/>'


def _axes(scale: _Scale, steps: int, low: float, high: float) -> list[str]:
    parts = []
    for index in range(5):
        loss = low + (high - low) * index / 4
        y = scale.y(loss)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e8ebf0"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss:.2f}</text>')
        step = 1 + round((steps - 1) * index / 4)
        parts.append(f'<text x="{scale.x(step):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{step}</text>')
    return parts


def _marks(scale: _Scale, faults: list[FaultRecord]) -> list[str]:
    parts, label = [], 0.0
    for number, fault in enumerate(faults, 1):
        x = scale.x(max(1, fault.step))
        label = max(x, label + 2 * MARK_RADIUS)  # faults may be few steps apart
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#dc2626" '
            f'stroke-dasharray="3 4"/>'
            f'<circle cx="{label:.1f}" cy="{TOP - 12}" r="{MARK_RADIUS}" fill="#dc2626"/>'
            f'<text x="{label:.1f}" y="{TOP - 8}" text-anchor="middle" style="fill:#fff;font-weight:600">'
            f"{number}</text>"
        )
    return parts


def loss_picture(run: Run, reference: Run, faults: list[FaultRecord]) -> str:
    """The loss curve over the uninterrupted run's, as SVG, with a numbered mark at each fault."""
    ours = sorted((number, step.loss) for number, step in run.standing().items())
    theirs = sorted((number, step.loss) for number, step in reference.standing().items())
    losses = [loss for _, loss in ours + theirs] or [0.0, 1.0]
    low, high, steps = min(losses), max(losses), max([number for number, _ in ours + theirs], default=2)
    scale = _Scale(steps, low, high)
    parts = [
        *_axes(scale, steps, low, high),
        _curve(theirs, scale, 'stroke="#f59e0b" stroke-width="6" stroke-opacity="0.45" stroke-linejoin="round"'),
        _curve(ours, scale, 'stroke="#2563eb" stroke-width="1.8" stroke-linejoin="round"'),
        *_marks(scale, faults),
    ]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loss by step">{"".join(parts)}</svg>'


def _fault_rows(faults: list[FaultRecord]) -> str:
    rows = []
    for number, fault in enumerate(faults, 1):
        verdict = '<b class="ok">recovered</b>' if fault.ok else f'<b class="no">{escape(fault.problem or "no")}</b>'
        rows.append(
            f"<tr><td class=n>{number}</td>"
            f"<td>{escape(fault.title)}<br><span class=why>{escape(fault.sentence)}</span></td>"
            f"<td class=n>{fault.step}</td><td class=n>{_seconds(fault.since(fault.found_at))}</td>"
            f"<td class=n>{_seconds(fault.since(fault.decided_at))}</td>"
            f"<td class=n>{_seconds(fault.since(fault.first_step_at))}</td><td class=n>{fault.steps_lost}</td>"
            f"<td>{escape(fault.evicted_node or '–')}</td><td>{verdict}</td></tr>"
        )
    return "".join(rows)


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
    card_html = "".join(f'<div class="card"><span>{escape(k)}</span><b>{escape(v)}</b></div>' for k, v in cards)
    lines = "".join(
        f"<tr><td class=n>{at:.3f} s</td><td>{escape(kind)}</td><td>{escape(sentence)}</td></tr>"
        for at, kind, sentence in timeline
    )
    wrong = "".join(f'<p class="no">{escape(problem)}</p>' for problem in problems)
    head = "<th class=n>#</th><th>what was done</th><th class=n>step</th><th class=n>found</th><th class=n>decided</th>"
    head += "<th class=n>next step</th><th class=n>steps again</th><th>evicted</th><th></th>"
    path.write_text(
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Everstep demo</title>"
        f"<style>{STYLE.read_text()}</style>"
        f"<h1>A training run that would not stop</h1>"
        f"<p class=lead>Four nodes and a spare on one machine; the faults are real signals to real processes. "
        f"{LAYOUTS[layout]}</p>"
        f"<div class=cards>{card_html}</div>{wrong}"
        f"<h2>Loss</h2><p class=why><span style='color:var(--ours)'>■</span> this run &nbsp; "
        f"<span style='color:var(--theirs)'>■</span> the same seed, uninterrupted &nbsp; "
        f"<span style='color:var(--bad)'>●</span> a fault</p>{loss_picture(run, reference, faults)}"
        f"<h2>Recoveries</h2><table><tr>{head}</tr>{_fault_rows(faults)}</table>"
        f"<h2>Timeline</h2><table>{lines}</table></html>\n"
    )
