"""A job's bounds, its deadlines and its end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

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
from controller.core.wording import nodes, ranks_named
from everstep.ids import Rank
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.training import RankFinished, UserError

EVEN_LOOK_S = 0.25
"""Between looks at whether others have begun a later step than the ranks that have returned."""
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
        if _ends_uneven(turn, job, report):
            return
        job.finished.append(report.rank)
        job.last_begun = report.begun
        turn.job_changed(job.job)
    if check_even(turn, job):
        return
    if len(job.finished) == running.world_size:
        _end(turn, job, JobState.FINISHED, f"all {running.world_size} rank(s) finished at step {report.step}")


def _ends_uneven(turn: Turn, job: JobRecord, report: RankFinished) -> bool:
    """Fail the job where the rank's last step is another than that of ranks that have returned before."""
    if not job.finished or job.last_begun is None or report.begun is None or report.begun == job.last_begun:
        return False
    if report.begun > job.last_begun:
        _fail_uneven(turn, job, job.finished, job.last_begun, {report.rank: report.begun})
    else:
        _fail_uneven(turn, job, [report.rank], report.begun, dict.fromkeys(job.finished, job.last_begun))
    return True


def check_even(turn: Turn, job: JobRecord, begun: Mapping[Rank, int] = MappingProxyType({})) -> bool:
    """Fail the job, and return True, where some ranks have returned and another has begun a later step than they did.

    All ranks that have returned began the same last step. Ranks that are still in that step, or do something else after
    it (an evaluation, a save), may take as long as they like. A later step is one that the others can never make: the
    ranks that returned are missing in its collectives. Each rank counts the steps that it begins, so no ordinary end of
    training is ever mistaken for this, however far apart in time the ranks return.

    Args:
        turn: the turn under way.
        job: a job that runs.
        begun: what ranks have just reported as their last begun steps. Heartbeats tell those of all ranks, but later.
    """
    running = job.leaving or job.generation
    if running is None or not job.finished or job.last_begun is None or len(job.finished) == running.world_size:
        return False
    last = job.last_begun
    further = turn.beyond(job.job, last) | {rank: step for rank, step in begun.items() if step > last}
    if further:
        _fail_uneven(turn, job, job.finished, job.last_begun, further)
        return True
    turn.wake(turn.now + EVEN_LOOK_S, "job", job.job)
    return False


def _fail_uneven(turn: Turn, job: JobRecord, left: list[Rank], last: int, further: dict[Rank, int]) -> None:
    go_on = "goes on" if len(further) == 1 else "go on"
    fail(
        turn,
        job,
        f"{ranks_named(left)} left the training function after step {last} while {ranks_named(further)} {go_on} with "
        f"step {max(further.values())}: all ranks have to make the same steps. Let all ranks decide alike when to stop "
        "(on run.mean of the loss, say), and give all of them the same number of steps",
    )


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
        if check_even(turn, job):
            return
        check_resumed(turn, job)
        check_pace(turn, job)
        consider_growth(turn, job)
    elif job.state is JobState.PAUSED:
        consider_growth(turn, job)
        consider_taking(turn, job)
        if job.state is JobState.PAUSED:
            restate_waiting(turn, job)
