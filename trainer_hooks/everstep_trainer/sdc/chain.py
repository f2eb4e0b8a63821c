"""Run the audits of the chain against silent corruption in the steps of one generation.

Each audit checks another part of a step's work (`everstep.vocabulary.AuditKind`). The chain calls the audits at fixed
points of each step, keeps their cost within the preset's share, and reports what they find. The controller judges.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist

from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import AuditKind
from everstep_trainer.base.core_contention import CoreContention
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.cost_meter import StepReading
from everstep_trainer.sdc.coverage import Coverage
from everstep_trainer.sdc.presets import AuditOptions
from everstep_trainer.sdc.schedule import AuditSchedule

log = logging.getLogger(__name__)

ROTATIONS_UNTIL_CLEAN = 3
"""Audits of each part of a rank's work after which the steps before them count as clean. A fault that is seldom active
is missed by many audits, so more rotations vouch for more. But a conviction undoes all steps that are not clean yet."""


class AuditChain:
    """The audits of one rank in one generation.

    Args:
        audits: In the order in which they are called.
        options: Their options.
        setup: The generation.
        first_step: The next step.
        on_clean: Called with a step: every part of this rank's work was checked often enough in the steps after it.
        rotations: How often is enough.
        coverage: Says what the audits leave out; None: nothing does.
    """

    def __init__(
        self,
        audits: Sequence[Audit],
        options: Mapping[AuditKind, AuditOptions],
        setup: AuditSetup,
        first_step: int,
        on_clean: Callable[[int], None],
        rotations: int = ROTATIONS_UNTIL_CLEAN,
        coverage: Coverage | None = None,
    ) -> None:
        self._coverage = coverage
        self._audits, self._setup, self._on_clean = list(audits), setup, on_clean
        contention = None if setup.device.type == "cuda" else CoreContention(setup.ranks_on_node, SYSTEM_CLOCK)
        chosen = {audit.kind: options[audit.kind] for audit in self._audits}
        self._schedule = AuditSchedule(chosen, first_step, contention)
        self._rotations = {
            audit.kind: _Rotation(audit, first_step - 1, rotations) for audit in self._audits if audit.rounds
        }
        self._clean_since = first_step - 1
        # Number of the next update. The schedule counts updates: where gradients are accumulated over several steps, a
        # due audit stays due until the step with the update, since it might otherwise never be due in one.
        self._update_number = first_step
        self._due: Collection[AuditKind] = ()  # in the running step
        self._called: Sequence[Audit] = ()  # in the running step: most steps call none, which would cost time
        self._finished: deque[_MeasuredStep] = deque()  # steps whose costs a GPU has not told yet
        self._step_began = 0.0
        self._unmeasured: tuple[int, dict[AuditKind, StepReading]] | None = None  # until the next step begins
        self._updated_step = first_step - 1
        self._mismatch_step = 0
        self._say_coverage()

    def begin_step(self, step: int) -> None:
        """Prepare the audits of ``step``. No collective."""
        now = perf_counter()
        if self._unmeasured is not None:  # a GPU computes on while the host has finished a step
            finished, readings = self._unmeasured
            self._finished.append(_MeasuredStep(finished, now - self._step_began, self._due, readings))
            self._unmeasured = None
            self._record_costs()
        self._step_began = now
        due = self._due = self._schedule.due_audits(self._update_number)
        self._called = [audit for audit in self._audits if audit.kind in due or audit.is_needed(step)]
        for audit in self._called:
            audit.meter.take()  # of steps without an update
            with audit.cost():
                audit.begin_step(step, due=audit.kind in due)

    def before_update(self, step: int) -> None:
        """Check after the backward pass; only the first call of a step counts. A collective."""
        if self._updated_step == step:
            return
        previous, self._updated_step = self._updated_step, step
        for audit in self._called:
            audit.previous_update = previous
            with audit.cost():
                audit.before_update(step, due=audit.kind in self._due)
        if self._schedule.is_agreement_due(self._update_number):
            self._agree()

    def update_refused(self, step: int) -> None:
        """Check in place of ``before_update``: on all ranks the guard refused the update of ``step``. A collective."""
        for audit in self._audits:
            with audit.cost():
                audit.update_refused(step)

    def step_finished(self, step: int) -> None:
        """Check after all updates of ``step``. A collective."""
        if self._updated_step != step:  # no update: the gradients were accumulated or skipped, on all ranks
            return
        for audit in self._called:
            due = audit.kind in self._due
            with audit.cost():
                audit.after_update(step, due=due)
            if due and audit.kind in self._rotations and step != self._mismatch_step:
                self._rotations[audit.kind].record(step)
        self._unmeasured = self._update_number, {audit.kind: audit.meter.take() for audit in self._called}
        self._update_number += 1
        if self._due:
            self._report_clean()

    def close(self) -> None:
        """Remove all hooks."""
        for audit in self._audits:
            audit.close()

    def record_mismatch(self) -> None:
        """Start all rotations anew: nothing before this counts as clean, and nothing of this step."""
        self._mismatch_step = self._updated_step
        for rotation in self._rotations.values():
            rotation.spoil()

    def _record_costs(self) -> None:
        """Record the costs of finished steps as far as they are known."""
        while self._finished:
            number, seconds, due, readings = self._finished[0]
            costs = {kind: cost for kind, reading in readings.items() if (cost := reading.cost()) is not None}
            if len(costs) < len(readings):
                return
            self._finished.popleft()
            self._schedule.record_step(number, seconds, costs, due)

    def _report_clean(self) -> None:
        found = [rotation.clean_since for rotation in self._rotations.values() if rotation.parts]
        if not found:
            return
        clean_since = min(found)
        if clean_since > self._clean_since:
            self._clean_since = clean_since
            self._on_clean(clean_since)

    def _say_coverage(self) -> None:
        if self._coverage is not None:
            self._coverage.say()

    def _agree(self) -> None:
        self._say_coverage()  # audits find out at their first turns what they cannot check
        measures = torch.tensor(self._schedule.measures(), dtype=torch.float64, device=self._setup.device)
        if self._setup.world_size > 1:
            dist.all_reduce(measures, op=dist.ReduceOp.MAX)
        agreed = self._schedule.adopt(measures.tolist(), self._update_number)
        if self._setup.rank == 0:
            described = ", ".join(
                f"{audit.kind} every {each}" for audit, each in zip(self._audits, agreed, strict=True)
            )
            log.debug("audits by steps: %s", described)


class _MeasuredStep(NamedTuple):
    """A step with an update, its whole time, the audits that were due in it, and what was measured of those called."""

    update_number: int
    seconds: float
    due: Collection[AuditKind]
    readings: Mapping[AuditKind, StepReading]


class _Rotation:
    """The progress of one audit through all parts of a rank's work. ``clean_since``: the step after which each part was
    audited ``times`` times; parts that cannot be audited are left out."""

    def __init__(self, audit: Audit, begin: int, times: int) -> None:
        self._audit, self._rounds, self._times = audit, audit.rounds, times
        self._audits = 0
        # The last steps in which each part was audited.
        self._audited: defaultdict[int, deque[int]] = defaultdict(lambda: deque(maxlen=times))
        self.clean_since = begin

    @property
    def parts(self) -> set[int]:
        return set(range(self._rounds)).difference(self._audit.left_out)

    def record(self, step: int) -> None:
        """Record the due audit of ``step``, unless it compared nothing."""
        part = self._audit.compared_part(self._audits % self._rounds)
        if part is not None:
            self._audits += 1
            self._audited[part].append(step)
        steps = [self._audited[part] for part in self.parts]
        if steps and all(len(part_steps) == self._times for part_steps in steps):
            self.clean_since = max(self.clean_since, min(part_steps[0] for part_steps in steps) - 1)

    def spoil(self) -> None:
        self._audited.clear()
