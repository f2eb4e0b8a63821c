"""A job's bounds, its deadlines and its end."""

from __future__ import annotations

from controller.core.checkpoints import let_go
from controller.core.generations import (
    Cause,
    consider_growth,
    hand_on,
    regroup,
    restate_waiting,
)
from controller.core.job_index import job_ended
from controller.core.joining import consider_forming
from controller.core.membership import ENDED, most_nodes, seats_of
from controller.core.priorities import consider_taking
from controller.core.records import JobRecord
from controller.core.resuming import check_resumed
from controller.core.signals import send_stop
from controller.core.stragglers import check_pace
from controller.core.turn import Turn
from controller.core.wording import nodes
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.training import RankFinished, UserError

RAISED_CHARS = 200
"""Of an exception's text, by which it is known again."""


def look_again(turn: Turn) -> None:
    """The database is back: what waited for it goes on."""
    for job in list(turn.state.jobs.values()):
        if job.state not in ENDED:
            turn.wake(turn.now, "job", job.job)


def user_error(turn: Turn, job: JobRecord, node: str, report: UserError) -> None:
    """The training function's own exception: no hardware is blamed.

    The job retries as often as it asked to, unless another node raised the same before: then it is no passing trouble.
    """
    running = job.leaving or job.generation
    if running is None or job.state is not JobState.RUNNING or report.generation != running.number:
        turn.ignore("user_error.stale")
        return
    if not running.has(node, report.rank):
        turn.ignore("user_error.not_a_member")
        return
    sentence = f"the training function raised on rank {report.rank} ({node}) at step {report.step}: {report.error}"
    data = {"rank": str(report.rank), "error": report.error, "traceback": report.traceback}
    turn.audit("user_error", sentence, node=node, job=job.job, generation=report.generation, data=data)
    before = job.raised.setdefault(report.error[:RAISED_CHARS], node)
    if job.spec.max_user_retries and before != node:
        job.ended_step = report.step
        fail(turn, job, f"{sentence}; {before} raised the same before, so another try would raise it again")
    elif job.retries < job.spec.max_user_retries:
        job.retries += 1
        words = f"{sentence}; retry {job.retries} of {job.spec.max_user_retries}"
        regroup(turn, job, Cause(reason=GenerationReason.RANK_LOST, sentence=words[:4000], trace=turn.trace))
    else:
        job.ended_step = report.step
        fail(turn, job, sentence)


def fail(turn: Turn, job: JobRecord, sentence: str) -> None:
    """Ends the job as failed and tells everybody why."""
    _end(turn, job, JobState.FAILED, sentence)


def _end(turn: Turn, job: JobRecord, state: JobState, sentence: str) -> None:
    live = turn.state.live_jobs[job.job]
    if live.committed is not None:  # where no rank's report says how far it came
        job.ended_step = max(job.ended_step, live.committed.step)
    job.state, job.since, job.sentence, job.trace = state, turn.now, sentence, turn.trace
    live.pending = None
    turn.audit(f"job.{state}", sentence, job=job.job, generation=job.last_number)
    send_stop(turn, job)
    let_go(turn, job)
    job.leaving = None
    job_ended(turn.state, job)
    turn.job_changed(job.job)
    hand_on(turn, job)


def rank_finished(turn: Turn, job: JobRecord, node: str, report: RankFinished) -> None:
    """A training function returned; when all have, the job is done."""
    running = job.leaving or job.generation
    if running is None or job.state is not JobState.RUNNING or report.generation != running.number:
        turn.ignore("rank_finished.stale")
        return
    if not running.has(node, report.rank):
        turn.ignore("rank_finished.not_a_member")
        return
    job.ended_step = max(job.ended_step, report.step)
    if report.rank not in job.finished:
        job.finished.append(report.rank)
        turn.job_changed(job.job)
    if len(job.finished) == running.world_size:
        _end(turn, job, JobState.FINISHED, f"all {running.world_size} rank(s) finished at step {report.step}")


def stop(turn: Turn, job: JobRecord, actor: str, reason: str) -> None:
    """An operator's end of the job."""
    because = f": {reason}" if reason else ""
    fail(turn, job, f"stopped by {actor}{because}")


def resize(turn: Turn, job: JobRecord, size: int, actor: str) -> None:
    """An operator's bound on nodes; a running job follows at its next boundary."""
    job.size = size
    turn.job_changed(job.job)
    sentence = f"{actor} bounds the job to {nodes(most_nodes(job))}"
    turn.audit("job.resized", sentence, job=job.job)
    if job.state is JobState.FORMING:
        consider_forming(turn, job)
    elif job.state is JobState.RUNNING and len(seats_of(job.generation)) > most_nodes(job):
        cause = Cause(reason=GenerationReason.OPERATOR, sentence=sentence, trace=turn.trace, boundary=True)
        regroup(turn, job, cause)
    else:
        consider_growth(turn, job)


def check_job(turn: Turn, job: JobRecord) -> None:
    """What deadlines of a job, other than pending regroupings and boundaries, may have come."""
    if job.state is JobState.FORMING:
        consider_forming(turn, job)
    elif job.state is JobState.RUNNING:
        check_resumed(turn, job)
        check_pace(turn, job)
        consider_growth(turn, job)
    elif job.state is JobState.PAUSED:
        consider_growth(turn, job)
        consider_taking(turn, job)
        if job.state is JobState.PAUSED:
            restate_waiting(turn, job)
