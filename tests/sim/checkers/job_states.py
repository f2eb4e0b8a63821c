"""Check every change of a job's state against the table of allowed transitions."""

from __future__ import annotations

from everstep_controller.core.effects import Audit, DeleteJob, PutJob
from everstep_controller.core.records import JOB_TRANSITIONS

from everstep.vocabulary import JobState
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.stored import Stored
from tests.sim.facts import Violation

STATE_BY_AUDIT = {
    "job.created": JobState.FORMING,
    "generation": JobState.RUNNING,
    "job.paused": JobState.PAUSED,
    "job.finished": JobState.FINISHED,
    "job.failed": JobState.FAILED,
    "job.stopped": JobState.FAILED,
}
"""State into which each entry of the audit log puts its job. One event may put a job into several states."""


class JobStates(Checker):
    """The states of each job, as the audit log and the records show them."""

    name = "job states"

    def __init__(self) -> None:
        self._states: dict[str, JobState] = {}
        self._stored = Stored()

    def watches(self) -> Watches:
        return {facts.Decided: self._decided, facts.Durable: self._durable, facts.TookOver: self._took_over}

    def _durable(self, fact: facts.Durable) -> None:
        self._stored.note(fact.batch)

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._states = {name: record.status.state for name, record in self._stored.jobs().items()}

    def _decided(self, fact: facts.Decided) -> None:
        for effect in fact.effects:
            if isinstance(effect, Audit) and effect.entry.job is not None and effect.entry.kind in STATE_BY_AUDIT:
                self._enter(effect.entry.job, STATE_BY_AUDIT[effect.entry.kind])
            elif isinstance(effect, DeleteJob):
                self._states.pop(effect.job, None)
        for effect in fact.effects:
            if isinstance(effect, PutJob) and effect.doc.status.state is not self._states.get(effect.job):
                raise Violation(
                    self.name,
                    f"{effect.job} is {effect.doc.status.state}, the audit log says {self._states.get(effect.job)}",
                )

    def _enter(self, job: str, state: JobState) -> None:
        before = self._states.get(job)
        allowed = JOB_TRANSITIONS[before] if before is not None else {JobState.FORMING}
        if state not in allowed:
            raise Violation(self.name, f"{job} became {state} while it was {before}")
        self._states[job] = state
