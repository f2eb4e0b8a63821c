"""An example script with ranks that die where told.

python -m everstep_trainer.launch -m tests.support.killed_example FOLDER SCRIPT FAULTS [ARGUMENT ...]

FAULTS: RANK:STEP:POINT with commas between; the POINT is ``updated``, when the step is finished and not yet stored.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from everstep_trainer.run import Run

from tests.support.exact_training import Fault, Faults


def main(folder: str, script: str, faults: str, *arguments: str) -> None:
    finish = Run.step_finished

    def step_finished(run: Run) -> None:
        dying = Faults([*map(Fault.parse, filter(None, faults.split(",")))], Path(folder), run.rank)
        dying.step = run.last_finished_step + 1
        dying.at("updated")
        finish(run)

    Run.step_finished = step_finished  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
