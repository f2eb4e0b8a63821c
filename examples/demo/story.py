"""What the demonstration tells: the faults with their times, and the steps that were finished."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class FaultRecord:
    """One fault's way. Times are wall seconds; None until it happened. ``expected_eviction``: the node to lose, or "".

    ``found_at``: first line in the controller's log; ``decided_at``: the generation (or finding) that answers it;
    ``first_step_at``: the next step that every rank finished.
    """

    kind: str
    title: str
    victim: str
    expected_eviction: str = ""
    step: int = 0
    injected_at: float = 0.0
    found_at: float | None = None
    decided_at: float | None = None
    first_step_at: float | None = None
    steps_lost: int = 0
    generation: int = 0
    evicted_node: str = ""
    trace: str = ""
    sentence: str = ""
    problem: str = ""

    def since(self, moment: float | None) -> float | None:
        """Seconds from the injection to ``moment``."""
        return None if moment is None else round(moment - self.injected_at, 4)

    @property
    def ok(self) -> bool:
        return not self.problem and self.first_step_at is not None and self.evicted_node == self.expected_eviction

    def summary(self) -> dict[str, object]:
        """Its row in summary.json."""
        return {
            "kind": self.kind,
            "step": self.step,
            "detected_s": self.since(self.found_at),
            "decided_s": self.since(self.decided_at),
            "first_step_s": self.since(self.first_step_at),
            "steps_lost": self.steps_lost,
            "generation": self.generation,
            "evicted_node": self.evicted_node or None,
            "trace": self.trace,
            "ok": self.ok,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Row:
    """One line of a rank's log: what it brings to a step (with loss and samples), or that the step is finished."""

    event: str
    generation: int
    step: int
    rank: int
    world: int
    at: float
    loss: float = 0.0
    samples: tuple[int, ...] = ()


def read_rows(folder: Path) -> Iterator[Row]:
    """Rows of all logs in ``folder``; a line cut short by a SIGKILL is skipped."""
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            yield Row(**{**row, "samples": tuple(row.get("samples", ()))})


@dataclass(frozen=True)
class Step:
    """A step in which every rank of its generation had its part; the loss is the mean over the global batch."""

    generation: int
    step: int
    world: int
    at: float
    loss: float
    samples: tuple[int, ...]


@dataclass
class Run:
    """The steps of a run in order of (generation, step).

    ``begun``: all ranks had brought their samples; ``finished``: all ranks had finished it. A rank may die between the
    two, when the others (and their vaults) have the step already.
    """

    begun: list[Step] = field(default_factory=list)
    finished: list[Step] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Run:
        by_step: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
        for row in read_rows(folder):
            by_step[row.event, row.generation, row.step].append(row)
        steps = {key: _joined(rows) for key, rows in sorted(by_step.items()) if len(rows) == rows[0].world}
        return cls(
            [step for key, step in steps.items() if key[0] == "samples"],
            [step for key, step in steps.items() if key[0] == "finished"],
        )

    def standing(self) -> dict[int, Step]:
        """Step number -> what stands of it: the newest generation that computed it counts."""
        return {step.step: step for step in self.begun}

    def lost(self) -> Counter[int]:
        """How many finished steps each generation had to compute again, by the generation that did."""
        computed: dict[int, int] = {}
        again: Counter[int] = Counter()
        for step in self.finished:
            if step.step in computed and computed[step.step] != step.generation:
                again[step.generation] += 1
            computed[step.step] = step.generation
        return again

    def first_after(self, generation: int) -> Step | None:
        """The first finished step of ``generation`` or a later one."""
        later = [step for step in self.finished if step.generation >= generation]
        return min(later, key=lambda step: step.at, default=None)


def _joined(rows: list[Row]) -> Step:
    rows = sorted(rows, key=lambda row: row.rank)  # the loss is added in one order, whatever the files are called
    count = max(1, sum(len(row.samples) for row in rows))
    first = rows[0]
    loss = sum(row.loss * len(row.samples) for row in rows) / count
    samples = tuple(sample for row in rows for sample in row.samples)
    return Step(first.generation, first.step, first.world, max(row.at for row in rows), loss, samples)
