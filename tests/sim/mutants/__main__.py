"""``python -m tests.sim.mutants``: play the default worlds with every mutant, and print which checker detects it."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys

from rich.console import Console
from rich.progress import track

from tests.sim.mutants.all_mutants import MUTANTS
from tests.sim.mutants.detection import Detection, detect


def main() -> int:
    context = multiprocessing.get_context("fork")
    with context.Pool(os.cpu_count()) as pool:
        results = pool.imap(_detect_by_index, range(len(MUTANTS)))
        console = Console(stderr=True)
        tracked = track(results, "mutants", total=len(MUTANTS), console=console, disable=not sys.stderr.isatty())
        detections = list(tracked)
    for detection in detections:
        if detection.outcome is None:
            result = "NO CHECKER DETECTED IT"
        else:
            result = f"seed {detection.outcome.seed}, {detection.outcome.sentence}"
        print(f"{detection.mutant}: {result[:160]} ({detection.worlds} worlds)")
    missed = sum(1 for detection in detections if detection.outcome is None)
    print(f"{len(detections) - missed} of {len(detections)} mutants are detected")
    return 1 if missed else 0


def _detect_by_index(index: int) -> Detection:
    logging.disable(logging.CRITICAL)
    return detect(MUTANTS[index])


if __name__ == "__main__":
    sys.exit(main())
