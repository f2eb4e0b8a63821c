"""A job passes from one generation to the next when its ranks do: not by what is said of one that is over, not a step
before the boundary that was named, and it counts as stepping when each of its ranks has."""

from __future__ import annotations

from collections import defaultdict

import msgspec
from everstep_controller.core.effects import Audit, DeleteJob, PutGeneration, PutJob
from everstep_controller.core.events import ReportArrived
from everstep_controller.core.records import JobRecord

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
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.stored import Stored
from tests.sim.facts import Violation

OF_RANKS = (CollectiveFailed, RankStalled, RankUnresponsive, VersionSealed, UserError, RankLost)
"""Reports by which a job may lose its generation."""
BY_RANKS = (
    GenerationReason.RANK_LOST,
    GenerationReason.RANK_HUNG,
    GenerationReason.COLLECTIVE_FAILED,
    GenerationReason.NODE_LOST,
    GenerationReason.CORRUPTION,
)


class _JobDoc(msgspec.Struct):
    """The part of a job's record that this checker compares."""

    state: JobState = JobState.FORMING
    generation: GenerationSpec | None = None
    leaving: GenerationSpec | None = None
    resumed_at: float | None = None

    @staticmethod
    def of(record: JobRecord) -> _JobDoc:
        return _JobDoc(record.status.state, record.generation, record.outgoing_generation, record.progress.resumed_at)


class Passages(Checker):
    """Compares what is decided with what processes did."""

    name = "passages"

    def __init__(self) -> None:
        self._jobs: dict[str, _JobDoc] = {}
        self._stored = Stored()
        self._entered: set[tuple[str, int]] = set()
        self._stepped: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
        self._over: dict[str, str] = {}

    def watches(self) -> Watches:
        return {
            facts.Entered: self._enter,
            facts.Stepped: self._step,
            facts.Decided: self._handled,
            facts.TookOver: self._took_over,
            facts.Durable: self._durable,
        }

    def _enter(self, fact: facts.Entered) -> None:
        self._entered.add((fact.spec.job, fact.spec.number))

    def _step(self, fact: facts.Stepped) -> None:
        self._stepped[fact.job, fact.generation][fact.rank] = fact.step

    def _durable(self, fact: facts.Durable) -> None:
        self._stored.note(fact.batch)

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._jobs = {name: _JobDoc.of(record) for name, record in self._stored.jobs().items()}
        self._over.clear()

    def _handled(self, fact: facts.Decided) -> None:
        event = fact.event
        if isinstance(event, ReportArrived) and isinstance(event.body, OF_RANKS):
            self._note_what_is_over(event)
        for effect in fact.effects:
            if isinstance(effect, PutGeneration) and effect.spec.reason in BY_RANKS:
                self._by_what_is_over(effect.spec.job, f"generation {effect.spec.number}", effect.spec.trace)
            elif isinstance(effect, Audit) and effect.entry.kind == "user_error":
                self._by_what_is_over(effect.entry.job or "", "an error", effect.entry.trace)
            elif isinstance(effect, PutJob):
                self._changed(effect.job, _JobDoc.of(effect.doc))
            elif isinstance(effect, DeleteJob):
                self._jobs.pop(effect.job, None)

    # --- what is over ------------------------------------------------------------------------------------------------

    def _note_what_is_over(self, event: ReportArrived) -> None:
        """That a launcher has no replacement is so in whatever generation it was found out."""
        body, job = event.body, self._jobs.get(event.body.job)  # type: ignore[union-attr]
        if job is None or (isinstance(body, RankLost) and not body.has_replacement):
            return
        assert isinstance(body, OF_RANKS)
        if body.generation not in [spec.number for spec in (job.generation, job.leaving) if spec is not None]:
            self._over[event.trace] = f"{type(body).__name__} of generation {body.generation}, which was over"

    def _by_what_is_over(self, job: str, what: str, trace: str) -> None:
        if trace in self._over:
            raise Violation(self.name, f"{job}: {what} follows from {self._over[trace]}")

    # --- what ranks did ----------------------------------------------------------------------------------------------

    def _changed(self, name: str, job: _JobDoc) -> None:
        before, self._jobs[name] = self._jobs.get(name, _JobDoc()), job
        spec = job.generation
        if spec is None or job.state is not JobState.RUNNING:
            return
        if before.generation is None or before.generation.number != spec.number:
            before = _JobDoc()
        if before.leaving is not None and job.leaving is None:
            self._crossed(name, before.leaving, spec)
        if before.resumed_at is None and job.resumed_at is not None:
            self._resumed(name, spec)

    def _crossed(self, name: str, left: GenerationSpec, spec: GenerationSpec) -> None:
        newest = max(self._stepped[name, left.number].values(), default=0)
        if newest < (spec.after_step or 0) and (name, spec.number) not in self._entered:
            words = f"{left.number} counts as over, whose boundary is step {spec.after_step}"
            raise Violation(self.name, f"{name}: generation {words}: nobody has finished more than {newest}")

    def _resumed(self, name: str, spec: GenerationSpec) -> None:
        if missing := set(range(spec.world_size)) - self._stepped[name, spec.number].keys():
            words = f"generation {spec.number} counts as stepping, and ranks {sorted(missing)} have finished no step"
            raise Violation(self.name, f"{name}: {words} in it")
