"""Check every change of a job's state against the table of allowed transitions."""

from __future__ import annotations

from everstep.vocabulary import JobState
from everstep_controller.core.effects import AppendToEventLog, DeleteJob, PutJob
from everstep_controller.core.records import JOB_TRANSITIONS
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.stored_records import StoredRecords
from tests.sim.cluster.observations import BatchWritten, LeaderDecided, LeaderStarted

STATE_BY_LOG_KIND = {
    "job.created": JobState.FORMING,
    "generation": JobState.RUNNING,
    "job.paused": JobState.PAUSED,
    "job.finished": JobState.FINISHED,
    "job.failed": JobState.FAILED,
    "job.stopped": JobState.FAILED,
}
"""The state that each kind of log entry gives its job. One event may give a job several states in turn."""


class JobStates(Checker):
    """Compare the states of each job in the event log and in its record."""

    name = "job_states"

    def __init__(self) -> None:
        self._states: dict[str, JobState] = {}
        self._records = StoredRecords()

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            LeaderStarted: self._on_leader,
        }

    def _on_write(self, write: BatchWritten) -> None:
        self._records.note(write.batch)

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._states = {name: record.status.state for name, record in self._records.jobs().items()}

    def _on_decision(self, decision: LeaderDecided) -> None:
        for effect in decision.effects:
            if (
                isinstance(effect, AppendToEventLog)
                and effect.entry.job is not None
                and effect.entry.kind in STATE_BY_LOG_KIND
            ):
                self._enter(effect.entry.job, STATE_BY_LOG_KIND[effect.entry.kind])
            elif isinstance(effect, DeleteJob):
                self._states.pop(effect.job, None)
        for effect in decision.effects:
            if isinstance(effect, PutJob) and effect.doc.status.state is not self._states.get(effect.job):
                raise Violation(
                    self.name,
                    f"{effect.job} is {effect.doc.status.state}, the event log says {self._states.get(effect.job)}",
                )

    def _enter(self, job: str, state: JobState) -> None:
        before = self._states.get(job)
        allowed = JOB_TRANSITIONS[before] if before is not None else {JobState.FORMING}
        if state not in allowed:
            raise Violation(self.name, f"{job} became {state} while it was {before}")
        self._states[job] = state
