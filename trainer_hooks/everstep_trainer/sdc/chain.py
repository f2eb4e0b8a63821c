"""Run the links of the chain against silent corruption in the steps of one generation.

Each link checks another part of a step's work (`everstep.vocabulary.AuditLink`). The chain calls the links at fixed
points of each step, keeps their cost within the preset's share, and reports what they find. The controller judges.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter

import torch
import torch.distributed as dist

from everstep.vocabulary import AuditLink
from everstep_trainer.sdc.audit import Audit, AuditSetup
from everstep_trainer.sdc.presets import LinkOptions
from everstep_trainer.sdc.schedule import AuditSchedule

log = logging.getLogger(__name__)


class AuditChain:
    """The audits of one rank in one generation.

    Args:
        audits: The links, in the order in which they are called.
        options: Their options.
        setup: The generation.
        first_step: The next step.
        on_clean: Called with a step: every part of this rank's work was checked once in the steps after it.
    """

    def __init__(
        self,
        audits: Sequence[Audit],
        options: Mapping[AuditLink, LinkOptions],
        setup: AuditSetup,
        first_step: int,
        on_clean: Callable[[int], None],
    ) -> None:
        self._audits, self._setup, self._on_clean = list(audits), setup, on_clean
        self._schedule = AuditSchedule({audit.link: options[audit.link] for audit in self._audits}, first_step)
        self._rotations = {
            audit.link: _Rotation(audit.rounds, first_step - 1) for audit in self._audits if audit.rounds
        }
        self._clean_since = first_step - 1
        self._costs_before: dict[AuditLink, float] = {}
        self._step_began = 0.0
        self._updated_step = 0
        self._mismatch_step = 0

    def begin_step(self, step: int) -> None:
        """Prepare the audits of ``step``. No collective."""
        self._step_began = perf_counter()
        self._costs_before = {audit.link: audit.cost_s for audit in self._audits}
        for audit in self._audits:
            with audit.cost():
                audit.begin_step(step, due=self._schedule.is_due(audit.link, step))

    def before_update(self, step: int) -> None:
        """Check after the backward pass; only the first call of a step counts. A collective."""
        if self._updated_step == step:
            return
        self._updated_step = step
        for audit in self._audits:
            with audit.cost():
                audit.before_update(step, due=self._schedule.is_due(audit.link, step))
        if self._schedule.is_agreement_due(step):
            self._agree(step)

    def step_finished(self, step: int) -> None:
        """Check after all updates of ``step``. A collective."""
        if self._updated_step != step:  # no update: the gradients were accumulated or skipped, on all ranks
            return
        for audit in self._audits:
            due = self._schedule.is_due(audit.link, step)
            with audit.cost():
                audit.after_update(step, due=due)
            if due and audit.link in self._rotations and step != self._mismatch_step:
                self._rotations[audit.link].record(step)
        costs_s = {audit.link: audit.cost_s - self._costs_before.get(audit.link, 0.0) for audit in self._audits}
        self._schedule.record_step(step, perf_counter() - self._step_began, costs_s)
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

    def _report_clean(self) -> None:
        if not self._rotations:
            return
        clean_since = min(rotation.clean_since for rotation in self._rotations.values())
        if clean_since > self._clean_since:
            self._clean_since = clean_since
            self._on_clean(clean_since)

    def _agree(self, step: int) -> None:
        proposals = torch.tensor(self._schedule.proposals(), dtype=torch.int64, device=self._setup.device)
        if self._setup.world_size > 1:
            dist.all_reduce(proposals, op=dist.ReduceOp.MAX)
        agreed = proposals.tolist()
        self._schedule.adopt(agreed, step)
        if self._setup.rank == 0:
            described = ", ".join(
                f"{audit.link} every {each}" for audit, each in zip(self._audits, agreed, strict=True)
            )
            log.debug("audits by steps: %s", described)


class _Rotation:
    """The progress of one link through all parts of a rank's work. ``clean_since``: the step after which the last whole
    rotation began."""

    def __init__(self, rounds: int, begin: int) -> None:
        self._rounds = rounds
        self._audited: list[int] = []
        self.clean_since = begin

    def record(self, step: int) -> None:
        self._audited.append(step)
        if len(self._audited) > self._rounds:
            del self._audited[0]
        if len(self._audited) == self._rounds:
            self.clean_since = max(self.clean_since, self._audited[0] - 1)

    def spoil(self) -> None:
        self._audited.clear()
