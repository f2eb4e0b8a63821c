"""The part of docs/how-to/gpu.md that bench.gpu writes: its figures, between two markers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_steps.sheet import NOT_RUN

BEGIN, END = "<!-- figures: written by make gpu -->", "<!-- figures: end -->"
COLUMNS = ("what", "value", "unit", "floor", "aim", "against", "met")


def section(result: Mapping[str, Any]) -> str:
    """The figures of a run, as its JSON has them, in Markdown."""
    rows = result["rows"]
    measured = [row for row in rows if not row["against"].startswith(NOT_RUN)]
    left_out = [row for row in rows if row["against"].startswith(NOT_RUN)]
    lines = [_heading(result), "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [_table_row(row) for row in measured]
    if left_out:
        lines += ["", "Not run there:", ""]
        lines += [f"* {row['name']}: {_cell(row['against'].removeprefix(NOT_RUN))}" for row in left_out]
    return "\n".join(lines)


def _heading(result: Mapping[str, Any]) -> str:
    machine, versions = result["machine"], result["versions"]
    gpus: Sequence[str] = machine.get("gpus", [])
    what = f"{len(gpus)} x {gpus[0]}" if gpus else "no GPU"
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    seconds = sum(step["seconds"] for step in result["steps"])
    return (
        f"`make gpu`, {result['date']}: {what}{driver}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / (1 << 30):.0f} GiB, Python {versions['python']}, "
        f"torch {versions.get('torch', '?')}. "
        f"{len(result['steps'])} steps in {seconds:.0f} s."
    )


def _table_row(row: Mapping[str, Any]) -> str:
    judged = row["floor"] is not None or row["aim"] is not None
    numbers = {name: _number(row[name]) for name in ("value", "floor", "aim")}
    cells = {**row, **numbers, "what": row["name"], "met": row["met"] if judged else ""}
    return "| " + " | ".join(_cell(str(cells[column])) for column in COLUMNS) + " |"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _cell(text: str) -> str:
    """On one line, and without what would end the cell."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def write(document: Path, result: Mapping[str, Any]) -> None:
    """Replace the figures in ``document``. Raises ValueError where the markers are not there, once and in order."""
    text = document.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in after:
        raise ValueError(f"{document} must have the lines {BEGIN} and {END} once each, in this order")
    document.write_text(f"{before}{BEGIN}\n\n{section(result)}\n\n{END}{after}")


def write_from(path: Path, document: Path) -> None:
    """The same, of a run whose JSON was kept."""
    write(document, json.loads(path.read_text()))
