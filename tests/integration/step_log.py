"""The file ``steps`` of a training script, with a line of numbers for each step of a rank."""

from __future__ import annotations

from pathlib import Path


def rows(folder: Path) -> list[tuple[int, ...]]:
    """Return the numbers of each finished line of ``steps`` in a folder, in the order of time."""
    path = folder / "steps"
    text = path.read_text() if path.exists() else ""
    return [tuple(map(int, line.split())) for line in text.splitlines(True) if line.endswith("\n")]


def set_goal(folder: Path, step: int) -> None:
    """Write the step at which the script ends to ``goal`` in a folder, at once and whole."""
    draft = folder / "draft"
    draft.write_text(str(step))
    draft.rename(folder / "goal")
