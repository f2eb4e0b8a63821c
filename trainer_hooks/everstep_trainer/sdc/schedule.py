"""Choose how often each audit runs, so that its cost stays within its share of a step.

All ranks must audit in the same steps. So they agree on what an audit costs by one all-reduce of what each has
measured, and all derive the same intervals from it. Between two agreements the intervals are fixed.

Work and waits are measured apart. A step is as slow as its slowest rank, so an audit's work is that of the rank on
which it takes longest. A wait in an audit's collective is mostly no cost: the rank would wait for the same slower one
in training's next collective. What the rank that came last has waited is the cost of the collective itself.

Where ranks wait for cores, an audit takes its time from every rank of its core: the step counts as so much shorter.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean, median

from everstep.vocabulary import AuditKind
from everstep_trainer.base.core_contention import CoreContention
from everstep_trainer.sdc.cost_meter import StepCost
from everstep_trainer.sdc.presets import MAX_INTERVAL, AuditOptions

FIRST_INTERVAL = 8
"""Interval until costs are known."""
FIRST_AGREEMENT_STEP = 40
"""Steps of a generation until the first agreement: each audit has then been due five times."""
AGREEMENT_STEPS = 256
"""Steps from one agreement to the next. One costs a small all-reduce."""
WARMUP_STEPS = 3
"""First steps of a generation that are not measured: they allocate memory and compile."""
REMEMBERED = 64
"""Last values that count."""
TRIMMED = 10
"""One in so many audits is left out at either end when their costs are averaged."""
UNKNOWN = -math.inf
"""Stands for what was not measured, in numbers of which the largest one is taken."""


def _trimmed_mean(values: Collection[float]) -> float:
    """Return the mean without the extremes. A median would know only one of the costs of cheap and dear parts."""
    out = max(1, len(values) // TRIMMED) if len(values) > 2 else 0
    return fmean(sorted(values)[out : len(values) - out])


class _AuditCost:
    """One audit's interval, and its costs in the last steps."""

    def __init__(self, options: AuditOptions) -> None:
        self.options = options
        self.interval = options.interval or FIRST_INTERVAL
        self.since = 0  # update from which the interval counts
        self._due_s = deque[float](maxlen=REMEMBERED)
        self._waits = [UNKNOWN] * REMEMBERED  # negated, each at the place of its audit: the same on all ranks
        self._audits = 0

    def record(self, cost: StepCost) -> None:
        self._due_s.append(cost.work_s)
        self._waits[self._audits % REMEMBERED] = -cost.wait_s
        self._audits += 1

    def measures(self) -> list[float]:
        """Return the work of an audit, and the negated wait in each of the last audits."""
        return [_trimmed_mean(self._due_s) if self._due_s else UNKNOWN, *self._waits]

    def choose(self, measures: Sequence[float], step_s: float) -> int:
        """Return the smallest interval within the share: cost / interval <= share * step."""
        work_s, *rest = measures
        waits_s = [-wait for wait in rest if wait != UNKNOWN]
        if self.options.interval is not None or work_s == UNKNOWN or not waits_s or step_s <= 0.0:
            return self.interval
        audit_s, allowed_s = work_s + median(waits_s), self.options.share * step_s
        return min(MAX_INTERVAL, max(1, math.ceil(audit_s / allowed_s)))


class AuditSchedule:
    """The intervals of one generation, in updates: steps without an update do not count.

    Args:
        options: Of each audit.
        first_update: The number of the first update.
        contention: Of the node's ranks; None where audits take no cores, as on a GPU.
    """

    def __init__(
        self,
        options: Mapping[AuditKind, AuditOptions],
        first_update: int,
        contention: CoreContention | None = None,
    ) -> None:
        self._first_update, self._contention = first_update, contention
        self._costs = {kind: _AuditCost(option) for kind, option in options.items()}
        for number, cost in enumerate(self._costs.values()):
            # Not the first update, whose end is the end of a recovery, and not all audits at the same one.
            cost.since = first_update + 1 + number
        self._steps_s = deque[float](maxlen=REMEMBERED)

    def due_audits(self, update: int) -> list[AuditKind]:
        """Return the kinds of audit that are due at this update; the same on all ranks."""
        return [
            kind
            for kind, cost in self._costs.items()
            if update >= cost.since and (update - cost.since) % cost.interval == 0
        ]

    def interval(self, kind: AuditKind) -> int:
        """Return the updates from one audit of ``kind`` to the next."""
        return self._costs[kind].interval

    def record_step(
        self, update: int, seconds: float, costs: Mapping[AuditKind, StepCost], due: Collection[AuditKind]
    ) -> None:
        """Record a finished step.

        Args:
            update: Its update.
            seconds: Its whole time.
            costs: What the audits that were called took of it.
            due: The kinds that were due in it.
        """
        if update < self._first_update + WARMUP_STEPS:
            return
        self._steps_s.append(seconds - sum(cost.work_s for cost in costs.values()))
        for kind in due:
            self._costs[kind].record(costs[kind])

    def is_agreement_due(self, update: int) -> bool:
        """Return whether the ranks agree on new intervals at this update."""
        done = update - self._first_update
        return done == FIRST_AGREEMENT_STEP or (done > 0 and done % AGREEMENT_STEPS == 0)

    def measures(self) -> list[float]:
        """Return what this rank has measured, for the largest value of all ranks at each place.

        The time of a step is negated: the smallest one counts, as steps end together on all ranks and differ by noise.
        """
        step_s = median(self._steps_s) if self._steps_s else 0.0
        if self._contention is not None and self._contention.is_crowded():
            step_s /= self._contention.ranks_per_core
        return [-step_s, *(measure for cost in self._costs.values() for measure in cost.measures())]

    def adopt(self, largest: Sequence[float], update: int) -> list[int]:
        """Choose and return the intervals of all audits at this update from the largest measures of all ranks."""
        step_s, each = -largest[0], (len(largest) - 1) // len(self._costs)
        for number, cost in enumerate(self._costs.values()):
            interval = cost.choose(largest[1 + number * each : 1 + (number + 1) * each], step_s)
            if interval != cost.interval:
                cost.interval, cost.since = interval, update + 1 + number % interval
        return [cost.interval for cost in self._costs.values()]
