"""From a generation to its first steps: who has resumed, and who has not in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from controller.core.checkpoints import expect_commit
from controller.core.generations import (
    Cause,
    boundary_crossed,
    consider_growth,
    regroup,
    resume_patience_s,
)
from controller.core.records import JobRecord
from controller.core.signals import note_replaced, send_generation, send_kill
from controller.core.state import JobLive
from controller.core.stragglers import watch_pace
from controller.core.turn import Turn
from controller.core.wording import named
from everstep.ids import Rank
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.training import GenerationSpec, Member, Resumed

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
    _end(turn, job, missing, spec, sentence)
    regroup(turn, job, Cause(reason=GenerationReason.NODE_LOST, sentence=sentence, trace=spec.trace))


def _restart(turn: Turn, job: JobRecord, missing: Sequence[Member], spec: GenerationSpec) -> None:
    """There is no node to go on without: the same try again, with other processes in place of those that never came."""
    sentence = f"{_how_far(missing, spec)}, deadline after deadline (generation {spec.number}): these are restarted"
    _end(turn, job, missing, spec, sentence)
    regroup(turn, job, Cause(reason=GenerationReason.RANK_HUNG, sentence=sentence, trace=spec.trace))


def _end(turn: Turn, job: JobRecord, missing: Sequence[Member], spec: GenerationSpec, sentence: str) -> None:
    for member in missing:
        if member.node in turn.state.reachable:
            send_kill(turn, job, member, spec.number, sentence, spec.trace)
            note_replaced(turn, job, member.node, member.local_rank)
