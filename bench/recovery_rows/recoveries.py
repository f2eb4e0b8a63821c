"""Read the step logs of the workload: how long each fault kept the survivors from finishing a step."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Recovered:
    """One fault: seconds until every survivor had finished a step in the membership that followed (None: never).

    ``steps_lost``: steps that every rank had finished before the fault and that were computed again after it.
    """

    step: int
    seconds: float | None
    steps_lost: int


def read(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows by process; a last line cut short by SIGKILL is skipped."""
    logs: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        rows = []
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        logs[path.stem] = rows
    return logs


def recoveries(folder: Path, survivors: int) -> list[Recovered]:
    """One entry per fault in the logs of ``folder``, in order of time."""
    logs = read(folder)
    faults = sorted(
        (row["at"], process, row) for process, rows in logs.items() for row in rows if row["event"] == "fault"
    )
    moments = [at for at, _, _ in faults] + [float("inf")]
    return [
        _recovered(logs, victim, fault, moments[index + 1], survivors)
        for index, (_, victim, fault) in enumerate(faults)
    ]


def _recovered(
    logs: dict[str, list[dict[str, Any]]], victim: str, fault: dict[str, Any], until: float, survivors: int
) -> Recovered:
    """A step belongs to the new membership when its generation (where there is one) or world size is a new one.

    A step that was finished by all before the fault could only be logged late by a rank; it does not count.
    """
    at = fault["at"]
    before, first = [], []
    for process, rows in logs.items():
        steps = [row for row in rows if row["event"] == "step" and row["at"] < until]
        old = [row for row in steps if row["at"] <= at]
        if process != victim and not old:
            continue  # a replacement: not one of the survivors
        if old:
            before.append(max(row["step"] for row in old))
        if process == victim:
            continue
        membership = _membership(old[-1])
        new = [row for row in steps if row["at"] > at and _membership(row) != membership]
        if new:
            first.append(new[0])
    if len(first) < survivors:
        return Recovered(fault["step"], None, 0)
    done_by_all = min(before)
    again = max(0, done_by_all - min(row["step"] for row in first) + 1)
    return Recovered(fault["step"], max(row["at"] for row in first) - at, again)


def _membership(row: dict[str, Any]) -> tuple[object, object]:
    return row.get("generation"), row.get("world")


def step_seconds(folder: Path, skip: int = 20) -> list[float]:
    """Seconds between finished steps of rank 0."""
    rows = next(log for name, log in read(folder).items() if name.startswith("rank0-"))
    at = [row["at"] for row in rows if row["event"] == "step"]
    return [later - earlier for earlier, later in itertools.pairwise(at[skip:])]
