"""Run an example script, and kill its ranks at requested steps.

    everstep-launch -m tests.integration.documents.killed_example FOLDER SCRIPT FAULTS [ARGUMENT ...]

FAULTS: comma-separated RANK:STEP:POINT. The POINT is ``updated``, after the step and before its snapshot.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from everstep_trainer.run import Run
from tests.support.ranks.exact_training import Fault, FaultInjector


def main(folder: str, script: str, faults: str, *arguments: str) -> None:
    finish = Run.step_finished

    def step_finished(run: Run) -> None:
        injector = FaultInjector([*map(Fault.parse, filter(None, faults.split(",")))], Path(folder), run.rank)
        injector.step = run.last_finished_step + 1
        injector.at("updated")
        finish(run)

    Run.step_finished = step_finished  # type: ignore[assignment, method-assign]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
