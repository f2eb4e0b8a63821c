"""End a job: all ranks finished, ranks finished unevenly, an operator stopped it, or it failed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from everstep.ids import Rank
from everstep.vocabulary import JobState
from everstep.wire.v1.training import RankFinished
from everstep_controller.core.checkpoints.storage import awaits_last_spill
from everstep_controller.core.checkpoints.subscriptions import JobMilestone, publish
from everstep_controller.core.jobs.notifications import send_stop
from everstep_controller.core.records import JobRecord
from everstep_controller.core.seats.job_index import close_ended_job, wake_competing_jobs
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import ranks_named

UNEQUAL_STEPS_RECHECK_S = 0.25
"""Seconds between checks whether others have begun a later step than the ranks that have returned."""


def fail_job(transition: Transition, job: JobRecord, sentence: str) -> None:
    """End the job as failed and send the reason to all its nodes."""
    _end(transition, job, JobState.FAILED, sentence)


def stop_job(transition: Transition, job: JobRecord, sentence: str) -> None:
    """End the job by an operator's order, and send the reason to all its nodes."""
    _end(transition, job, JobState.FAILED, sentence, is_stopped=True)


def _end(transition: Transition, job: JobRecord, state: JobState, sentence: str, *, is_stopped: bool = False) -> None:
    live = transition.state.job_runtime[job.job]
    if live.commits.committed_version is not None:  # used if no rank reports its last step
        job.progress.ended_step = max(job.progress.ended_step, live.commits.committed_version.step)
    job.status.enter(state, sentence, trace=transition.trace, now=transition.now, is_stopped=is_stopped)
    live.regroup.pending = None
    transition.log_event(
        "job.stopped" if is_stopped else f"job.{state}", sentence, job=job.job, generation=job.progress.last_number
    )
    send_stop(transition, job)
    publish(transition, job, JobMilestone.JOB_ENDED)
    job.outgoing_generation = None
    close_ended_job(transition.state, job)
    transition.mark_job_changed(job.job)
    wake_competing_jobs(transition, job)


def handle_rank_finished(transition: Transition, job: JobRecord, node: str, report: RankFinished) -> None:
    """Record that a training function returned; the job is finished once all have."""
    running = job.running_generation
    if running is None or not job.is_running or report.generation != running.number:
        transition.count_ignored("rank_finished.stale")
        return
    if not running.has_rank_on(node, report.rank):
        transition.count_ignored("rank_finished.not_a_member")
        return
    job.progress.ended_step = max(job.progress.ended_step, report.step)
    if report.rank not in job.progress.finished_ranks:
        if _has_unequal_end(transition, job, report):
            return
        job.progress.finished_ranks.append(report.rank)
        job.progress.last_begun = report.started_step
        if report.collectives is not None:
            job.progress.returned_collectives[report.rank] = report.collectives
        _record_loss(job, report)
        transition.mark_job_changed(job.job)
    if not fail_if_steps_differ(transition, job):
        finish_if_all_returned(transition, job)


def finish_if_all_returned(transition: Transition, job: JobRecord) -> bool:
    """Finish a job whose ranks have all returned, once its newest version is on storage; return whether they have."""
    running = job.running_generation
    if running is None or len(job.progress.finished_ranks) < running.world_size:
        return False
    if not awaits_last_spill(transition, job):
        sentence = f"all {running.world_size} rank(s) finished at step {job.progress.ended_step}"
        _end(transition, job, JobState.FINISHED, sentence)
    return True


def _record_loss(job: JobRecord, report: RankFinished) -> None:
    """Keep the last step's loss of the lowest rank that reports one, so that equal runs end with equal losses."""
    known = job.progress.ended_loss
    if report.loss is not None and (known is None or report.rank <= known[0]):
        job.progress.ended_loss = report.rank, report.loss


def _has_unequal_end(transition: Transition, job: JobRecord, report: RankFinished) -> bool:
    """Fail the job if the rank's last step differs from that of ranks that returned before."""
    finished, last, begun = job.progress.finished_ranks, job.progress.last_begun, report.started_step
    if not finished or last is None or begun is None or begun == last:
        return False
    if begun > last:
        _fail_unequal_steps(transition, job, finished, last, {report.rank: begun})
    else:
        _fail_unequal_steps(transition, job, [report.rank], begun, dict.fromkeys(finished, last))
    return True


def fail_if_steps_differ(
    transition: Transition, job: JobRecord, begun: Mapping[Rank, int] = MappingProxyType({})
) -> bool:
    """Fail the job, and return True, if some ranks have returned and another has begun a later step.

    Ranks that returned began the same last step. Others may take any time in or after that step (evaluation, saving),
    but can never complete a later one, because the returned ranks are missing in its collectives. ``begun`` has last
    begun steps that were just reported; heartbeats report those of all ranks, but later.
    """
    running, finished, last = job.running_generation, job.progress.finished_ranks, job.progress.last_begun
    if running is None or not finished or last is None or len(finished) == running.world_size:
        return False
    further = transition.read_ranks_beyond(job.job, last) | {rank: step for rank, step in begun.items() if step > last}
    if further:
        _fail_unequal_steps(transition, job, finished, last, further)
        return True
    transition.schedule_job(transition.now + UNEQUAL_STEPS_RECHECK_S, job.job)
    return False


def _fail_unequal_steps(
    transition: Transition, job: JobRecord, returned_ranks: list[Rank], last: int, further: dict[Rank, int]
) -> None:
    sentence = (
        f"{ranks_named(returned_ranks)} returned from the training function after step {last}, but "
        f"{ranks_named(further)} began step {max(further.values())}. All ranks must run the same steps: base the "
        "decision to stop on a value that is equal on all ranks, such as run.mean(loss), and give all ranks the same "
        "number of steps"
    )
    fail_job(transition, job, sentence)
