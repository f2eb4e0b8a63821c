"""Choose how often each link audits, so that its cost stays within its share of a step.

All ranks must audit in the same steps. So each proposes an interval from the costs it has measured, and all take the
largest one. Between two agreements the interval is fixed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median

from everstep.vocabulary import AuditLink
from everstep_trainer.sdc.presets import MAX_INTERVAL, LinkOptions

FIRST_INTERVAL = 8
"""Interval until costs are known."""
FIRST_AGREEMENT_STEP = 40
"""Steps of a generation until the first agreement: each link has then been due five times."""
AGREEMENT_STEPS = 256
"""Steps from one agreement to the next. One costs a small all-reduce."""
WARMUP_STEPS = 3
"""First steps of a generation that are not measured: they allocate memory and compile."""
REMEMBERED = 64
"""Last values of which the median is taken."""


class _LinkCost:
    def __init__(self, options: LinkOptions) -> None:
        self.options = options
        self.interval = options.interval or FIRST_INTERVAL
        self.since = 0  # step from which the interval counts
        self.due_s = deque[float](maxlen=REMEMBERED)
        self.idle_s = deque[float](maxlen=REMEMBERED)

    def proposal(self, step_s: float) -> int:
        """Return the smallest interval within the share: cost(due) / n + cost(idle) <= share * step."""
        if self.options.interval is not None or not self.due_s or step_s <= 0.0:
            return self.interval
        idle_s = median(self.idle_s) if self.idle_s else 0.0
        allowed_s = self.options.share * step_s - idle_s
        if allowed_s <= 0.0:
            return MAX_INTERVAL
        return min(MAX_INTERVAL, max(1, math.ceil(max(0.0, median(self.due_s) - idle_s) / allowed_s)))


class AuditSchedule:
    """The intervals of one generation. ``first_step``: its first step."""

    def __init__(self, options: Mapping[AuditLink, LinkOptions], first_step: int) -> None:
        self._first_step = first_step
        self._costs = {link: _LinkCost(one) for link, one in options.items()}
        for number, cost in enumerate(self._costs.values()):
            cost.since = first_step + number  # so that not all links are due in the same step
        self._steps_s = deque[float](maxlen=REMEMBERED)

    def is_due(self, link: AuditLink, step: int) -> bool:
        """Return whether ``link`` audits in ``step``; the same on all ranks."""
        cost = self._costs[link]
        return step >= cost.since and (step - cost.since) % cost.interval == 0

    def interval(self, link: AuditLink) -> int:
        """Return the steps from one audit of ``link`` to the next."""
        return self._costs[link].interval

    def record_step(self, step: int, seconds: float, costs_s: Mapping[AuditLink, float]) -> None:
        """Record the whole time of a finished step, and what each link took of it."""
        if step < self._first_step + WARMUP_STEPS:
            return
        self._steps_s.append(seconds - sum(costs_s.values()))
        for link, taken_s in costs_s.items():
            cost = self._costs[link]
            (cost.due_s if self.is_due(link, step) else cost.idle_s).append(taken_s)

    def is_agreement_due(self, step: int) -> bool:
        """Return whether the ranks agree on new intervals in ``step``."""
        done = step - self._first_step
        return done == FIRST_AGREEMENT_STEP or (done > 0 and done % AGREEMENT_STEPS == 0)

    def proposals(self) -> list[int]:
        """Return this rank's interval for each link, in the order of the options."""
        step_s = median(self._steps_s) if self._steps_s else 0.0
        return [cost.proposal(step_s) for cost in self._costs.values()]

    def adopt(self, intervals: list[int], step: int) -> None:
        """Take the intervals that all ranks agreed on in ``step``."""
        for number, (cost, interval) in enumerate(zip(self._costs.values(), intervals, strict=True)):
            if interval != cost.interval:
                cost.interval, cost.since = interval, step + 1 + number % interval
