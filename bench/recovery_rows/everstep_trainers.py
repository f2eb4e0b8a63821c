"""Shared parts of training scripts around other frameworks' Trainers: the log of finished steps, and the fault."""

from __future__ import annotations

import os

from torch import nn

from bench.recovery_rows.workload import Fault, StepLog
from everstep_trainer.run import Run


class Diary:
    """Writes down each finished step, and lets the victim die before its step begins."""

    def __init__(self, run: Run, model: nn.Module) -> None:
        self._run = run
        self._log = StepLog(os.environ["BENCH_FOLDER"], f"rank{run.rank}")
        self._fault = Fault(run.rank, self._log, model)

    def step_ends(self, step: int) -> None:
        """Log that ``step`` had its update."""
        self._log.write("step", step, world=self._run.world_size, generation=self._run.generation)

    def step_begins(self, step: int) -> None:
        """Strike where the forward pass of ``step`` is to be struck."""
        self._fault.before_step(step)
