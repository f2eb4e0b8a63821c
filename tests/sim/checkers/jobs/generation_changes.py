"""Check that a job changes to its next generation together with its ranks.

Reports about a finished generation change nothing. No boundary counts as crossed before a rank has reached it. No
generation counts as resumed before all of its ranks have finished a step.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.training import (
    CollectiveFailed,
    GenerationSpec,
    RankLost,
    RankStalled,
    RankUnresponsive,
    UserError,
    VersionSealed,
)
from everstep_controller.core.effects import AppendToEventLog, DeleteJob, PutGeneration, PutJob
from everstep_controller.core.events import ReportArrived
from everstep_controller.core.records import JobRecord
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.stored_records import StoredRecords
from tests.sim.cluster.observations import (
    BatchWritten,
    GenerationEntered,
    LeaderDecided,
    LeaderStarted,
    StepFinished,
)

GENERATION_REPORTS = (CollectiveFailed, RankStalled, RankUnresponsive, VersionSealed, UserError, RankLost)
"""Reports that may end a job's generation."""
REPORTED_REASONS = (
    GenerationReason.RANK_LOST,
    GenerationReason.RANK_HUNG,
    GenerationReason.COLLECTIVE_FAILED,
    GenerationReason.NODE_LOST,
    GenerationReason.CORRUPTION,
)
"""Reasons of generations that follow from a report."""


class _JobProgress(msgspec.Struct):
    """The part of a job's record that this checker compares."""

    state: JobState = JobState.FORMING
    generation: GenerationSpec | None = None
    outgoing_generation: GenerationSpec | None = None
    resumed_at: float | None = None

    @staticmethod
    def of(record: JobRecord) -> _JobProgress:
        resumed_at = record.progress.resumed_at
        return _JobProgress(record.status.state, record.generation, record.outgoing_generation, resumed_at)


class GenerationChanges(Checker):
    """Compare the controller's decisions with the steps of processes."""

    name = "generation_changes"

    def __init__(self) -> None:
        self._jobs: dict[str, _JobProgress] = {}
        self._records = StoredRecords()
        self._entered: set[tuple[str, int]] = set()
        self._finished_steps: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        self._stale_reports: dict[str, str] = {}

    def handlers(self) -> Handlers:
        return {
            GenerationEntered: self._on_entry,
            StepFinished: self._on_step,
            LeaderDecided: self._on_decision,
            LeaderStarted: self._on_leader,
            BatchWritten: self._on_write,
        }

    def _on_entry(self, entry: GenerationEntered) -> None:
        self._entered.add((entry.spec.job, entry.spec.number))

    def _on_step(self, finished: StepFinished) -> None:
        self._finished_steps[finished.job, finished.generation][finished.rank] = finished.step

    def _on_write(self, write: BatchWritten) -> None:
        self._records.note(write.batch)

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._jobs = {name: _JobProgress.of(record) for name, record in self._records.jobs().items()}
        self._stale_reports.clear()

    def _on_decision(self, decision: LeaderDecided) -> None:
        event = decision.event
        if isinstance(event, ReportArrived) and isinstance(event.body, GENERATION_REPORTS):
            self._note_stale_report(event)
        for effect in decision.effects:
            if isinstance(effect, PutGeneration) and effect.spec.reason in REPORTED_REASONS:
                self._check_cause(effect.spec.job, f"generation {effect.spec.number}", effect.spec.trace)
            elif isinstance(effect, AppendToEventLog) and effect.entry.kind == "user_error":
                self._check_cause(effect.entry.job or "", "an error", effect.entry.trace)
            elif isinstance(effect, PutJob):
                self._check_job(effect.job, _JobProgress.of(effect.doc))
            elif isinstance(effect, DeleteJob):
                self._jobs.pop(effect.job, None)

    def _note_stale_report(self, event: ReportArrived) -> None:
        """Note a report about a finished generation.

        A report that a launcher has no replacement for a rank is no such report, since it stays true.
        """
        body, job = event.body, self._jobs.get(event.body.job or "")  # type: ignore[union-attr]
        if job is None or (isinstance(body, RankLost) and not body.has_replacement):
            return
        assert isinstance(body, GENERATION_REPORTS)
        generations = (job.generation, job.outgoing_generation)
        if body.generation not in [spec.number for spec in generations if spec is not None]:
            self._stale_reports[event.trace] = (
                f"{type(body).__name__} of generation {body.generation}, which was finished"
            )

    def _check_cause(self, job: str, effect: str, trace: str) -> None:
        if trace in self._stale_reports:
            raise Violation(self.name, f"{job}: {effect} follows from {self._stale_reports[trace]}")

    def _check_job(self, name: str, job: _JobProgress) -> None:
        before, self._jobs[name] = self._jobs.get(name, _JobProgress()), job
        spec = job.generation
        if spec is None or job.state is not JobState.RUNNING:
            return
        if before.generation is None or before.generation.number != spec.number:
            before = _JobProgress()
        if before.outgoing_generation is not None and job.outgoing_generation is None:
            self._check_boundary(name, before.outgoing_generation, spec)
        if before.resumed_at is None and job.resumed_at is not None:
            self._check_resumed(name, spec)

    def _check_boundary(self, name: str, outgoing: GenerationSpec, spec: GenerationSpec) -> None:
        newest = max(self._finished_steps[name, outgoing.number].values(), default=0)
        if newest < (spec.after_step or 0) and (name, spec.number) not in self._entered:
            detail = f"counts as finished at step {spec.after_step}, and its ranks have reached step {newest}"
            raise Violation(self.name, f"{name}: generation {outgoing.number} {detail}")

    def _check_resumed(self, name: str, spec: GenerationSpec) -> None:
        if missing := set(range(spec.world_size)) - self._finished_steps[name, spec.number].keys():
            detail = f"generation {spec.number} counts as resumed, and ranks {sorted(missing)} have finished no step"
            raise Violation(self.name, f"{name}: {detail} in it")
