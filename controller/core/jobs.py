"""A job's life: launchers join, it forms, its ranks step, it ends."""

from __future__ import annotations

from controller.core.blocks import contradiction
from controller.core.checkpoints import NOTHING, expect_commit, let_go
from controller.core.generations import (
    Cause,
    boundary_crossed,
    consider_growth,
    hand_on,
    own_numbers,
    regroup,
)
from controller.core.membership import ENDED, is_seated, least_nodes, most_nodes, next_seats, seats_of
from controller.core.priorities import consider_taking
from controller.core.records import JobRecord, LauncherRecord
from controller.core.signals import is_untold, send_generation, send_stop
from controller.core.state import JobLive
from controller.core.stragglers import check_pace, watch_pace
from controller.core.turn import Turn
from controller.core.wording import named, nodes
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.directives import NewGeneration, StopJob
from everstep.wire.v1.training import GenerationSpec, LauncherJoined, RankFinished, Resumed, UserError

INHERITED_LOOK_S = 1.0
"""Between looks at how far a generation is that had not resumed when this controller began."""
RAISED_CHARS = 200
"""Of an exception's text, by which it is known again."""

__all__ = [
    "ENDED",
    "check_job",
    "consider_forming",
    "fail",
    "launcher_joined",
    "look_again",
    "offer_to_jobs",
    "rank_finished",
    "rank_resumed",
    "resize",
    "stop",
    "user_error",
]


# --- joining -----------------------------------------------------------------------------------------------------


def launcher_joined(turn: Turn, node: str, report: LauncherJoined) -> None:
    """Takes a node's offer: a new job, a spare, a catching up after a reconnect, or a launcher's new life."""
    job = turn.state.jobs.get(report.job)
    if why := contradiction(report.spec):
        _refuse(turn, node, report, f"job {report.job} cannot be: {why}")
        return
    if job is None:
        job = _create(turn, report)
    elif job.state in ENDED:
        if report.launcher <= int(job.since * 1000):
            turn.send(node, StopJob(job=job.job, ok=job.state is JobState.FINISHED, reason=job.sentence[:4096]))
            return
        _start_over(turn, job, report)
    if report.spec != job.spec and not _take_spec(turn, job, node, report):
        return
    before = job.launchers.get(node)
    if before is not None and report.launcher < before.incarnation:
        turn.ignore("launcher_joined.stale")
        return
    restarted = before is not None and report.launcher > before.incarnation
    new_agent = before is not None and not before.confirmed
    _note_launcher(turn, job, node, report)
    _catch_up(turn, job, node, report, restarted=restarted, new_agent=new_agent)


def _create(turn: Turn, report: LauncherJoined) -> JobRecord:
    if len(turn.entropy) < 64:
        raise AssertionError("a job's secret needs 64 hex digits of entropy with its first report")
    job = JobRecord(job=report.job, spec=report.spec, secret=turn.entropy, created_at=turn.now, since=turn.now)
    job.sentence = "waits for its launchers"
    if report.generation:
        job.last_number = own_numbers(turn.state, report.generation)
    turn.state.jobs[job.job] = job
    turn.state.live_jobs[job.job] = JobLive()
    turn.audit("job.created", f"job {job.job} asked for by its first launcher", job=job.job)
    turn.job_changed(job.job)
    return job


def _start_over(turn: Turn, job: JobRecord, report: LauncherJoined) -> None:
    """A launcher younger than the job's end: the same name, run once more. Generation numbers go on."""
    job.spec, job.state, job.since, job.created_at = report.spec, JobState.FORMING, turn.now, turn.now
    job.sentence, job.trace = "waits for its launchers, to run once more", turn.trace
    job.generation, job.leaving, job.launchers, job.resumed_at = None, None, {}, None
    job.ceiling, job.retries, job.raised, job.finished = NOTHING, 0, {}, []
    job.losses, job.excluded, job.former, job.slow, job.homes = {}, {}, [], {}, None
    turn.state.live_jobs[job.job] = JobLive()
    turn.audit("job.created", f"job {job.job} is run once more", job=job.job)
    turn.job_changed(job.job)


def _take_spec(turn: Turn, job: JobRecord, node: str, report: LauncherJoined) -> bool:
    """A different specification: accepted from the only launcher there is, refused beside others."""
    if any(other != node for other in job.launchers):
        reason = f"the launcher on {node} asks for another shape of job {job.job} than those before it: "
        reason += "start all launchers with the same options"
        _refuse(turn, node, report, reason)
        return False
    job.spec = report.spec
    turn.job_changed(job.job)
    return True


def _refuse(turn: Turn, node: str, report: LauncherJoined, reason: str) -> None:
    turn.audit("launcher.refused", reason, node=node, job=report.job)
    turn.send(node, StopJob(job=report.job, ok=False, reason=reason))


def _note_launcher(turn: Turn, job: JobRecord, node: str, report: LauncherJoined) -> None:
    before = job.launchers.get(node)
    same_life = before is not None and before.incarnation == report.launcher
    if before is not None and same_life:
        before.store, before.generation = report.store, report.generation
        before.able, before.confirmed, before.why_not = True, True, ""
    else:
        job.launchers.pop(node, None)
        job.launchers[node] = LauncherRecord(
            node=node,
            incarnation=report.launcher,
            store=report.store,
            generation=report.generation,
        )
        job.excluded.pop(node, None)
        job.losses.pop(node, None)
        job.slow.pop(node, None)
        turn.audit("launcher.joined", f"the launcher on {node} offers it to {job.job}", node=node, job=job.job)
    turn.state.live_nodes[node].jobs[job.job] = None
    turn.job_changed(job.job)


def _catch_up(
    turn: Turn, job: JobRecord, node: str, report: LauncherJoined, *, restarted: bool, new_agent: bool
) -> None:
    """``new_agent``: it has forgotten the generation that its ranks are in, and its vault will ask it for that."""
    if report.generation > job.last_number:
        sentence = f"ranks on {node} are in generation {report.generation}, the records end at {job.last_number}"
        job.last_number = own_numbers(turn.state, report.generation)
        turn.audit("job.records_behind", sentence, node=node, job=job.job)
    if job.state is JobState.FORMING:
        consider_forming(turn, job)
        return
    if job.generation is None:
        return
    if job.state is JobState.RUNNING and job.last_number > job.generation.number:
        sentence = f"ranks on {node} are ahead of the records"
        regroup(turn, job, Cause(reason=GenerationReason.FORMED, sentence=sentence, trace=turn.trace))
        return
    if job.state is JobState.RUNNING and is_seated(job, node) and restarted:
        sentence = f"the launcher on {node} started anew"
        regroup(turn, job, Cause(reason=GenerationReason.RANK_LOST, sentence=sentence, trace=turn.trace))
        return
    spec = job.leaving if is_untold(turn, job) else job.generation
    if job.state is JobState.RUNNING and spec is not None and (new_agent or report.generation < spec.number):
        turn.send(node, NewGeneration(spec=spec))
    consider_growth(turn, job)


def offer_to_jobs(turn: Turn, node: str) -> None:
    """A node became able: that may be what a forming, paused or small job of its launchers waits for."""
    for name in turn.state.live_nodes[node].jobs:
        job = turn.state.jobs[name]
        if job.state is JobState.FORMING:
            consider_forming(turn, job)
        else:
            consider_growth(turn, job)


def consider_forming(turn: Turn, job: JobRecord) -> None:
    """Opens the first generation: with all nodes asked for, or with enough of them when waiting is over.

    Not while the database is away: nobody else would know of it.
    """
    if turn.state.store_away:
        return
    most, least = most_nodes(job), least_nodes(job)
    due = job.created_at + job.spec.join_wait_s
    if turn.now < due and len(job.launchers) < most:
        turn.wake(due, "job", job.job)
        return
    seats = len(next_seats(turn.state, job))
    if seats >= most or (seats >= least and turn.now >= due):
        sentence = f"{seats} of {nodes(most)} asked for have joined"
        regroup(turn, job, Cause(reason=GenerationReason.FORMED, sentence=sentence, trace=turn.trace))
    elif turn.now < due:
        turn.wake(due, "job", job.job)
    elif seats < least:
        consider_taking(turn, job)


def look_again(turn: Turn) -> None:
    """The database is back: what waited for it goes on."""
    for job in list(turn.state.jobs.values()):
        if job.state not in ENDED:
            turn.wake(turn.now, "job", job.job)


# --- stepping ----------------------------------------------------------------------------------------------------


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
    expect_commit(turn, job)
    watch_pace(turn, job)
    turn.job_changed(job.job)


def _seen_to_step(turn: Turn, job: JobRecord, live: JobLive, spec: GenerationSpec) -> bool:
    """Whether a generation steps of which an earlier controller took acknowledgements, which are not said again.

    A rank that has finished two more steps in it had the others in the second of them, so each has finished the first.
    """
    step = turn.stride(job.job).step
    if step is not None and live.first_step is None:
        live.first_step = step
    if step is None or live.first_step is None or step < live.first_step + 2:
        turn.wake(turn.now + INHERITED_LOOK_S, "job", job.job)
        return False
    _steps(turn, job, live)
    sentence = f"all {spec.world_size} rank(s) of generation {spec.number} step: one has finished step {step}"
    turn.audit("resumed", sentence, job=job.job, generation=spec.number, trace=spec.trace, data={"step": str(step)})
    consider_growth(turn, job)
    return True


def check_resumed(turn: Turn, job: JobRecord) -> None:
    """At the deadline: whoever has not even entered the generation is left out; who is inside gets more time."""
    live, spec = turn.state.live_jobs[job.job], job.generation
    if spec is None or job.resumed_at is not None or job.leaving is not None:
        return
    if live.inherited and _seen_to_step(turn, job, live, spec):
        return
    if turn.now < live.resume_due:
        return
    entered = turn.entered(job.job)
    absent = {spec.node_of(rank) for rank in range(spec.world_size) if rank not in entered}
    present = {spec.node_of(rank) for rank in entered} - absent
    live.resume_attempts += 1
    if absent and present:
        _leave_out(turn, job, sorted(absent), spec)
        return
    who = "nobody has entered it" if absent else "all have entered it, not all have stepped"
    sentence = f"generation {spec.number} is past its deadline: {who}; waiting on"
    turn.audit("generation.overdue", sentence, job=job.job, generation=spec.number, trace=spec.trace)
    patience = turn.policy.resume_deadline_s * 2.0**live.resume_attempts
    live.resume_due = turn.now + min(turn.policy.resume_deadline_max_s, patience)
    turn.wake(live.resume_due, "job", job.job)
    if absent:
        send_generation(turn, job, ())


def _leave_out(turn: Turn, job: JobRecord, absent: list[str], spec: GenerationSpec) -> None:
    for node in absent:
        if node in job.launchers:
            job.launchers[node].able = False
            job.launchers[node].why_not = f"its ranks never entered generation {spec.number}"
    sentence = f"{named(absent)} did not enter generation {spec.number} in time"
    regroup(turn, job, Cause(reason=GenerationReason.NODE_LOST, sentence=sentence, trace=spec.trace))


# --- ending ------------------------------------------------------------------------------------------------------


def user_error(turn: Turn, job: JobRecord, node: str, report: UserError) -> None:
    """The training function's own exception: no hardware is blamed.

    The job retries as often as it asked to, unless another node raised the same before: then it is no passing trouble.
    """
    running = job.leaving or job.generation
    if running is None or job.state is not JobState.RUNNING or report.generation != running.number:
        turn.ignore("user_error.stale")
        return
    sentence = f"the training function raised on rank {report.rank} ({node}) at step {report.step}: {report.error}"
    data = {"rank": str(report.rank), "error": report.error, "traceback": report.traceback}
    turn.audit("user_error", sentence, node=node, job=job.job, generation=report.generation, data=data)
    before = job.raised.setdefault(report.error[:RAISED_CHARS], node)
    if job.spec.max_user_retries and before != node:
        fail(turn, job, f"{sentence}; {before} raised the same before, so another try would raise it again")
    elif job.retries < job.spec.max_user_retries:
        job.retries += 1
        words = f"{sentence}; retry {job.retries} of {job.spec.max_user_retries}"
        regroup(turn, job, Cause(reason=GenerationReason.RANK_LOST, sentence=words[:4000], trace=turn.trace))
    else:
        fail(turn, job, sentence)


def fail(turn: Turn, job: JobRecord, sentence: str) -> None:
    """Ends the job as failed and tells everybody why."""
    _end(turn, job, JobState.FAILED, sentence)


def _end(turn: Turn, job: JobRecord, state: JobState, sentence: str) -> None:
    live = turn.state.live_jobs[job.job]
    job.state, job.since, job.sentence, job.trace = state, turn.now, sentence, turn.trace
    live.pending = None
    turn.audit(f"job.{state}", sentence, job=job.job, generation=job.last_number)
    send_stop(turn, job, state is JobState.FINISHED, sentence)
    let_go(turn, job)
    job.leaving = None
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
