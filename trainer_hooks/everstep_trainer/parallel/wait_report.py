"""Tell once how long the training thread waits in a step for gradients that are added in the order of ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

from everstep_trainer.launch.output.marks import keep_line

log = logging.getLogger(__name__)

SKIPPED_STEPS = 5
"""Steps before the measured ones: the first ones compile, and wait for ranks that begin later."""
MEASURED_STEPS = 20

_has_told = False


class WaitReport:
    """Sums the waits of some steps and logs their share of a step, once per process."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._steps = 0
        self._began_at = self._waited_s = 0.0

    def add(self, seconds: float) -> None:
        """Count a wait of the running step."""
        self._waited_s += seconds

    def step_finished(self) -> None:
        """Count a step, and log what was measured after the last one that is."""
        global _has_told
        self._steps += 1
        if self._steps == SKIPPED_STEPS:
            self._began_at, self._waited_s = self._clock(), 0.0
        if self._steps != SKIPPED_STEPS + MEASURED_STEPS or _has_told or not self._waited_s:
            return
        _has_told = True
        elapsed_s = self._clock() - self._began_at
        text = (
            f"a step of {1e3 * elapsed_s / MEASURED_STEPS:.1f} ms waits {1e3 * self._waited_s / MEASURED_STEPS:.1f} ms "
            f"({100 * self._waited_s / elapsed_s:.0f} %) for gradients of other ranks, which are added in the order of "
            "ranks. run.replicate(model, exact=False) may wait less, and its bits change with a regroup; see "
            "https://everstep.readthedocs.io/how-to/exact-mode/"
        )
        # No warning: plain DistributedDataParallel waits for its gradients and for slower ranks as well.
        if not keep_line(text):
            log.info("%s", text)
