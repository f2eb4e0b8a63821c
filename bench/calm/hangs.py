"""Measure after how many seconds a hanging rank is named."""

from __future__ import annotations

import re
from pathlib import Path

from bench.calm.hang_programs import Hang
from bench.calm.harm import last_line
from bench.calm.launched_run import Evidence, run_program
from bench.table import Row

NOTICES = ("job.created", "launcher.joined", "generation", "resumed")
"""Kinds of events that name ranks without a judgement."""
WORKS = re.compile(r"\bworks alone\b")
"""Words of a sentence that names a rank, and takes it for one that works."""


def measure(hang: Hang, logs: Path) -> list[Row]:
    """Run a program that hangs, and return its row."""
    (evidence,) = run_program(hang.program, logs)
    seconds, sentence = named_after(hang, evidence)
    end = f"status {evidence.status} after {evidence.seconds:.0f} s"
    against = f"{sentence or 'not named'} ({end})"
    return [Row(f"hang/{hang.program.name}", seconds, "s", hang.floor_s, hang.aim_s, against[:400])]


def named_after(hang: Hang, evidence: Evidence) -> tuple[float | None, str]:
    """Return the seconds from the hang to the first sentence that names its rank, and the sentence.

    The seconds are None if no sentence did. A job's last sentence is read from its receipt, since the event log may end
    before it.
    """
    began = min((note["at"] for note in evidence.of_kind("hang")), default=None)
    if began is None:
        return None, f"the program did not hang: {last_line(evidence)}"
    said = [(event.at, event.sentence) for event in evidence.events if not event.kind.startswith(NOTICES)]
    if evidence.receipt is not None and evidence.receipt.result == "failed":
        said.append((evidence.receipt.ended_at, evidence.receipt.sentence))
    for at, sentence in said:
        is_named = any(re.search(pattern, sentence) for pattern in hang.names)
        if at >= began and is_named and not WORKS.search(sentence):
            return at - began, sentence
    return None, last_line(evidence)
