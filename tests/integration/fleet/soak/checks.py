"""Checks after a soak from outside: on step logs, the controller's events, and the logs of all processes."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from everstep.wire.v1.operator import Event
from examples.demo.story import Run
from examples.demo.verify import Verified, verify

RELATIVE_TOLERANCE = 1e-4
SUSPICIOUS = re.compile(
    r"Traceback \(most recent call last\)|NotRestorable|Fatal Python error|was never (awaited|retrieved)|AssertionError"
)
LINES_SHOWN = 25


def generations_rise(events: Iterable[Event]) -> list[str]:
    """Check that each new generation's number is above the one before."""
    numbers = [event.generation for event in events if event.kind == "generation" and event.generation is not None]
    return [
        f"generation {later} came after {earlier}" for earlier, later in itertools.pairwise(numbers) if later <= earlier
    ]


def processes_go_forward(folder: Path) -> list[str]:
    """Check that no process returns to an earlier generation, and that each finishes its steps in order."""
    problems = []
    for path in sorted(folder.glob("*.jsonl")):
        rows = [row for row in map(_row, path.read_text().splitlines()) if row and row["event"] == "finished"]
        for before, after in itertools.pairwise(rows):
            if after["generation"] < before["generation"]:
                problems.append(
                    f"{path.stem} went back from generation {before['generation']} to {after['generation']}"
                )
            if after["generation"] == before["generation"] and after["step"] != before["step"] + 1:
                problems.append(f"{path.stem} finished step {after['step']} after {before['step']} in one generation")
    return problems


def _row(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except json.JSONDecodeError:  # cut short by a SIGKILL
        return {}


def evictions_have_a_cause(events: Iterable[Event], evictable: set[str]) -> list[str]:
    """Check that only nodes with a GPU fault were evicted."""
    return [e.sentence for e in events if e.kind == "verdict.evict" and e.node not in evictable]


def logs_are_calm(folder: Path) -> list[str]:
    """Return suspicious log lines that no fault explains, with the lines after them."""
    problems = []
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        found = [number for number, line in enumerate(lines) if SUSPICIOUS.search(line)]
        problems += ["\n    ".join([f"{path.name}:", *lines[n : n + LINES_SHOWN]]) for n in found[:3]]
    return problems


def as_undisturbed(run: Run, reference: Run, last: int) -> tuple[Verified | None, list[str]]:
    """Check that every sample was used once, and that losses match: exactly at full world size, otherwise nearly."""
    try:
        verified = verify(run, reference, last)
    except ValueError as error:
        return None, [str(error)]
    ours, theirs = run.standing(), reference.standing()
    off = [
        (abs(ours[step].loss - theirs[step].loss) / abs(theirs[step].loss), step)
        for step in range(1, last + 1)
        if not abs(ours[step].loss - theirs[step].loss) <= RELATIVE_TOLERANCE * abs(theirs[step].loss)
    ]
    problems = (
        [f"the loss of step {off[0][1]} is off by {off[0][0]:.2g} of itself, and of {len(off) - 1} more"] if off else []
    )
    return verified, problems + verified.problems


def recoveries_s(run: Run) -> list[float]:
    """Return the seconds from a generation's last finished step to the first one of the next generation."""
    gaps = []
    for earlier, later in itertools.pairwise(sorted(run.finished, key=lambda step: step.at)):
        if later.generation != earlier.generation:
            gaps.append(later.at - earlier.at)
    return gaps
