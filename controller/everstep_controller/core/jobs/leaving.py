"""Let launchers that received a signal end in order.

A launcher says that it is leaving, passes the signal on, and waits until its ranks have ended or their grace time is
over. Until then the job neither regroups nor replaces or kills a rank: ranks may save, and leave in the same step.
Afterwards the job continues without these nodes, or is paused. Meanwhile the newest committed version goes to storage.
"""

from __future__ import annotations

from collections.abc import Callable

from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.directives import StopJob
from everstep.wire.v1.training import (
    CollectiveFailed,
    GenerationSpec,
    LauncherLeaving,
    RankFinished,
    RankLost,
    RankStalled,
    RankUnresponsive,
    UserError,
)
from everstep_controller.core.checkpoints.subscriptions import JobMilestone, publish
from everstep_controller.core.jobs import ending, generations
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.jobs.notifications import recipients
from everstep_controller.core.records import JobRecord, LauncherRecord, LeavingLauncher
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import join_names

GRACE_MARGIN_S = 5.0
"""Seconds after a launcher's grace time in which it kills what is left and says so."""
RankEnd = RankFinished | UserError | CollectiveFailed | RankLost | RankStalled | RankUnresponsive
"""Reports that say how a rank fares; while launchers are leaving, they are expected."""


def handle_launcher_leaving(transition: Transition, job: JobRecord, node: str, report: LauncherLeaving) -> None:
    """Save the newest version, and wait for the ranks of a launcher that ends."""
    launcher = job.membership.launchers.get(node)
    if launcher is None or report.launcher != launcher.incarnation or job.is_ended:
        transition.count_ignored("launcher_leaving.stale")
        return
    if report.is_notice:
        transition.log_event(
            "launcher.notified", f"the launcher on {node} received {report.cause}", node=node, job=job.job
        )
        publish(transition, job, JobMilestone.JOB_MAY_STOP)
        return
    leaving = launcher.leaving or _begin(transition, job, launcher, report)
    leaving.ranks_ended = leaving.ranks_ended or report.ranks_ended
    transition.mark_job_changed(job.job)
    if not _can_go_on(transition, job):
        publish(transition, job, JobMilestone.JOB_MAY_STOP)
    settle(transition, job)


def _begin(
    transition: Transition, job: JobRecord, launcher: LauncherRecord, report: LauncherLeaving
) -> LeavingLauncher:
    """Note that the launcher is leaving: its node gets no seat any more."""
    until = transition.now + report.grace_s + GRACE_MARGIN_S
    launcher.leaving = LeavingLauncher(cause=report.cause, until=until)
    launcher.usable, launcher.unusable_reason = False, f"its launcher is ending ({report.cause})"
    transition.schedule_job(until, job.job)
    sentence = f"the launcher on {launcher.node} ends ({report.cause}); its ranks have {report.grace_s:g} s"
    transition.log_event("launcher.leaving", sentence, node=launcher.node, job=job.job)
    return launcher.leaving


def _can_go_on(transition: Transition, job: JobRecord) -> bool:
    return len(generations.current_roster(transition, job)) >= job.min_seats


def leaving_launchers(job: JobRecord) -> list[LauncherRecord]:
    """Return the launchers that are leaving a seat of the running job."""
    launchers = job.membership.launchers.values() if job.is_running else ()
    return [launcher for launcher in launchers if launcher.leaving is not None and job.is_seated(launcher.node)]


def absorb_rank_report(transition: Transition, job: JobRecord, report: RankEnd) -> bool:
    """Handle a rank's report in a job that launchers are leaving; return False if it is to be handled as usual."""
    running = job.running_generation
    if not leaving_launchers(job) or running is None or report.generation != running.number:
        return False
    if isinstance(report, RankFinished) and _is_complete(transition, job, report):
        return False
    if not isinstance(report, RankFinished | UserError):
        transition.count_ignored("rank_report.launcher_leaving")
        return True
    if report.rank not in job.progress.finished_ranks:
        job.progress.finished_ranks.append(report.rank)
        job.progress.ended_step = max(job.progress.ended_step, report.step)
        transition.mark_job_changed(job.job)
    if len(job.progress.finished_ranks) == running.world_size:
        _interrupt(transition, job, running)
    return True


def _is_complete(transition: Transition, job: JobRecord, report: RankFinished) -> bool:
    """Return whether the rank returned because it had made all steps, and not because of the signal."""
    progress = transition.state.job_runtime[job.job].progress.by_rank.get(report.rank)
    return progress is not None and 0 < progress.until_step <= report.step


def settle(transition: Transition, job: JobRecord) -> None:
    """Continue without the leaving nodes, or pause, once all their ranks have ended or their time is over."""
    leaving = leaving_launchers(job)
    if not leaving or ending.finish_if_all_returned(transition, job):
        return
    states = [launcher.leaving for launcher in leaving if launcher.leaving is not None]
    if not all(state.ranks_ended or transition.now >= state.until for state in states):
        transition.schedule_job(min(state.until for state in states if not state.ranks_ended), job.job)
        return
    stored = job.generation is not None and job.generation.store_node in [launcher.node for launcher in leaving]
    reason = GenerationReason.STORE_LOST if stored else GenerationReason.NODE_LOST
    generations.regroup(transition, job, RegroupCause(reason, _describe(job), transition.trace))
    if job.status.state is JobState.PAUSED:
        publish(transition, job, JobMilestone.JOB_MAY_STOP)


def _describe(job: JobRecord) -> str:
    by_cause: dict[str, list[str]] = {}
    for launcher in leaving_launchers(job):
        by_cause.setdefault(launcher.leaving.cause if launcher.leaving is not None else "", []).append(launcher.node)
    return "; ".join(f"{join_names(nodes)} received {cause}" for cause, nodes in by_cause.items())


def _interrupt(transition: Transition, job: JobRecord, running: GenerationSpec) -> None:
    """Pause a job all of whose ranks returned because of the signal, and let their processes end."""
    sentence = f"{_describe(job)}, and all {running.world_size} rank(s) returned at step {job.progress.ended_step}"
    nodes = recipients(job, [*job.all_seats])
    for launcher in job.membership.launchers.values():
        if launcher.usable:
            launcher.usable, launcher.unusable_reason = False, "its ranks have returned"
    job.status.paused_for = sentence
    generations.enter_pause(transition, job, sentence, transition.trace, spills=True)
    for node in nodes:
        record = job.membership.launchers.get(node)
        incarnation = record.incarnation if record is not None else 0
        stop = StopJob(job=job.job, ok=True, reason=sentence[:4096], launcher=incarnation, keeps_checkpoints=True)
        transition.send(node, stop)


def unless_leaving(handle: Callable[..., None]) -> Callable[[Transition, JobRecord, str, RankEnd], None]:
    """Return ``handle``, which is not called for what is expected while launchers are leaving."""

    def handle_unless_leaving(transition: Transition, job: JobRecord, node: str, report: RankEnd) -> None:
        if not absorb_rank_report(transition, job, report):
            handle(transition, job, node, report)

    return handle_unless_leaving
