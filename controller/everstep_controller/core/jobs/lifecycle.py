"""A job's bounds, its deadlines and its end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from everstep.ids import Rank
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.training import GenerationSpec, Member, RankFinished, Resumed, UserError
from everstep_controller.core.checkpoints.commits import expect_commit, let_go
from everstep_controller.core.jobs.generations import (
    Cause,
    boundary_crossed,
    consider_growth,
    hand_on,
    regroup,
    restate_waiting,
    resume_patience_s,
)
from everstep_controller.core.jobs.job_index import job_ended
from everstep_controller.core.jobs.joining import consider_forming, consider_taking
from everstep_controller.core.jobs.membership import ENDED, most_nodes, seats_of
from everstep_controller.core.jobs.notifications import note_replaced, send_generation, send_kill, send_stop
from everstep_controller.core.jobs.stragglers import check_pace, watch_pace
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import JobLive
from everstep_controller.core.transition import Turn
from everstep_controller.core.wording import named, nodes, ranks_named

# ---- resuming
# From a generation to its first steps: who has resumed, and who has not in time.

RESTART_AFTER = 3
"""Deadlines in a row after which ranks that never entered are restarted where every node has some. Each is twice as
long as the one before: a first import from a slow file system is not to be begun anew."""
INHERITED_LOOK_S = 1.0
"""Between looks at how far a generation is that had not resumed when this controller began."""


def rank_resumed(turn: Turn, job: JobRecord, node: str, report: Resumed) -> None:
    """One rank's acknowledgement; with the last one the failure's way is at its end."""
    spec = job.generation
    if spec is None or report.generation != spec.number or job.state is not JobState.RUNNING:
        turn.ignore("resumed.stale")
        return
    if not spec.has(node, report.rank):
        turn.ignore("resumed.not_a_member")
        return
    live = turn.state.live_jobs[job.job]
    boundary_crossed(turn, job)
    live.pace.entered.add(report.rank)
    live.pace.seen(report.step, turn.now)
    live.resumed.add(report.rank)
    total = sum(report.phases_s.values())
    if live.slowest is None or total > live.slowest[0]:
        live.slowest = (total, report.rank, dict(report.phases_s))
    if len(live.resumed) == spec.world_size and job.resumed_at is None:
        _all_resumed(turn, job, spec, report)


def _all_resumed(turn: Turn, job: JobRecord, spec: GenerationSpec, last: Resumed) -> None:
    live = turn.state.live_jobs[job.job]
    _steps(turn, job, live)
    took = turn.now - job.opened_at
    start = f"version {last.restored}" if last.restored else spec.restore.storage or "scratch"
    _, rank, phases = live.slowest or (0.0, last.rank, {})
    data = {f"{phase}_s": f"{seconds:.4f}" for phase, seconds in phases.items()}
    data |= {"slowest_rank": str(rank), "took_s": f"{took:.4f}", "step": str(last.step)}
    if last.restored:
        data["restored"] = str(last.restored)
    turn.audit(
        "resumed",
        f"all {spec.world_size} rank(s) of generation {spec.number} step from {start}, {took:.2f} s after the decision",
        job=job.job,
        generation=spec.number,
        trace=spec.trace,
        data=data,
    )
    consider_growth(turn, job)


def _steps(turn: Turn, job: JobRecord, live: JobLive) -> None:
    job.resumed_at = turn.now
    live.resume_attempts = 0
    for node in job.generation.seats if job.generation is not None else ():
        if (launcher := job.launchers.get(node)) is not None:
            launcher.late = 0
    expect_commit(turn, job)
    watch_pace(turn, job)
    turn.job_changed(job.job)


def _seen_to_step(turn: Turn, job: JobRecord, live: JobLive, spec: GenerationSpec) -> bool:
    """Whether a generation steps of which an earlier controller took acknowledgements, which are not said again.

    A rank that has finished two more steps in it had the others in the second of them, so each has finished the first.
    It enters with the step at which it was interrupted, and is set to that of the version once: from the second step at
    which it is seen its steps count.
    """
    step = max(_counted(live, turn.steps(job.job)), default=None)
    if step is None:
        turn.wake(turn.now + INHERITED_LOOK_S, "job", job.job)
        return False
    _steps(turn, job, live)
    sentence = f"all {spec.world_size} rank(s) of generation {spec.number} step: one has finished step {step}"
    turn.audit("resumed", sentence, job=job.job, generation=spec.number, trace=spec.trace, data={"step": str(step)})
    consider_growth(turn, job)
    return True


def _counted(live: JobLive, steps: dict[Rank, int]) -> Iterator[int]:
    """Steps of the ranks that have finished two of this generation. Notes where each is seen first."""
    for rank, step in steps.items():
        first = live.first_steps.get(rank, ())
        if len(first) < 2 and step not in first:
            live.first_steps[rank] = (*first, step)
        elif len(first) == 2 and step >= first[1] + 2:
            yield step


def check_resumed(turn: Turn, job: JobRecord) -> None:
    """At the deadline: ranks that have not even entered the generation are replaced, and their nodes left out where
    others have entered with all of theirs; who is inside gets more time."""
    live, spec = turn.state.live_jobs[job.job], job.generation
    if spec is None or job.resumed_at is not None or job.leaving is not None:
        return
    if live.inherited and _seen_to_step(turn, job, live, spec):
        return
    if turn.now < live.resume_due:
        return
    entered = turn.entered(job.job)
    missing = [member for member in spec.roster if member.rank not in entered]
    absent = {member.node for member in missing}
    live.resume_attempts += 1
    if 0 < len(absent) < len(spec.seats):
        _leave_out(turn, job, missing, spec)
        return
    if missing and entered and live.resume_attempts >= RESTART_AFTER:
        _restart(turn, job, missing, spec)
        return
    sentence = f"generation {spec.number} is past its deadline: {_how_far(missing, spec)}; waiting on"
    turn.audit("generation.overdue", sentence, job=job.job, generation=spec.number, trace=spec.trace)
    live.resume_due = turn.now + resume_patience_s(turn, live)
    turn.wake(live.resume_due, "job", job.job)
    if missing:
        send_generation(turn, job, ())


def _how_far(missing: Sequence[Member], spec: GenerationSpec) -> str:
    if not missing:
        return "all have entered it, not all have stepped"
    if len(missing) == spec.world_size:
        return "nobody has entered it"
    return f"{len(missing)} of {spec.world_size} ranks have not entered it, on each node some"


def _leave_out(turn: Turn, job: JobRecord, missing: Sequence[Member], spec: GenerationSpec) -> None:
    """The job goes on without the nodes of these ranks, which are restarted: when others have their places the node is
    able again (``losses.rank_lost``)."""
    absent: dict[str, list[Member]] = {}
    for member in missing:
        absent.setdefault(member.node, []).append(member)
    for node, members in absent.items():
        if (launcher := job.launchers.get(node)) is None:
            continue
        ranks = named([str(member.rank) for member in members])
        launcher.able, launcher.late = False, launcher.late + 1
        launcher.missing = [member.local_rank for member in members]
        launcher.why_not = f"rank {ranks} on it did not enter generation {spec.number} in time"
    sentence = f"{named(sorted(absent))} did not enter generation {spec.number} in time"
    _end_missing_members(turn, job, missing, spec, sentence)
    regroup(turn, job, Cause(reason=GenerationReason.NODE_LOST, sentence=sentence, trace=spec.trace))


def _restart(turn: Turn, job: JobRecord, missing: Sequence[Member], spec: GenerationSpec) -> None:
    """There is no node to go on without: the same try again, with other processes in place of those that never came."""
    sentence = f"{_how_far(missing, spec)}, deadline after deadline (generation {spec.number}): these are restarted"
    _end_missing_members(turn, job, missing, spec, sentence)
    regroup(turn, job, Cause(reason=GenerationReason.RANK_HUNG, sentence=sentence, trace=spec.trace))


def _end_missing_members(
    turn: Turn, job: JobRecord, missing: Sequence[Member], spec: GenerationSpec, sentence: str
) -> None:
    for member in missing:
        if member.node in turn.state.reachable:
            send_kill(turn, job, member, spec.number, sentence, spec.trace)
            note_replaced(turn, job, member.node, member.local_rank)


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
