"""The checker of job states, fed by hand."""

from __future__ import annotations

import pytest
from everstep_controller.core.effects import Audit, AuditEntry, Effect, PutJob
from everstep_controller.core.events import Tick
from everstep_controller.core.records import JobRecord, JobStatus, RunProgress

from everstep.vocabulary import JobState
from everstep.wire.v1.training import JobSpec
from tests.sim import facts
from tests.sim.checkers.job_states import JobStates
from tests.sim.facts import Violation


def decide(checker: JobStates, *effects: Effect) -> None:
    checker.watches()[facts.Decided](facts.Decided("c1", 1, Tick(), list(effects), 0.0))


def log(kind: str) -> Audit:
    return Audit(AuditEntry(kind=kind, sentence="", at=0.0, trace="", job="a"))


def put(state: JobState) -> PutJob:
    spec = JobSpec(job="a", min_nodes=1, max_nodes=1)
    status, progress = JobStatus(state=state), RunProgress(created_at=0.0)
    return PutJob("a", JobRecord(job="a", spec=spec, secret="s" * 64, status=status, progress=progress))


def test_job_states_checker_follows_several_changes_in_one_event() -> None:
    checker = JobStates()
    decide(checker, log("job.created"), log("generation"), put(JobState.RUNNING))
    decide(checker, log("job.finished"), put(JobState.FINISHED))
    decide(checker, log("job.created"), log("generation"), put(JobState.RUNNING))


def test_job_states_checker_finds_forbidden_transition() -> None:
    checker = JobStates()
    decide(checker, log("job.created"), put(JobState.FORMING))
    with pytest.raises(Violation, match="a became paused while it was forming"):
        decide(checker, log("job.paused"))


def test_job_states_checker_finds_unlogged_change() -> None:
    checker = JobStates()
    decide(checker, log("job.created"), put(JobState.FORMING))
    with pytest.raises(Violation, match="a is failed, the audit log says forming"):
        decide(checker, put(JobState.FAILED))
