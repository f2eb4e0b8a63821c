"""From a generation to its first steps: who has resumed, and who has not in time."""

from __future__ import annotations

from controller.core.checkpoints import expect_commit
from controller.core.generations import (
    Cause,
    boundary_crossed,
    consider_growth,
    regroup,
    resume_patience_s,
)
from controller.core.records import JobRecord
from controller.core.signals import send_generation
from controller.core.state import JobLive
from controller.core.stragglers import watch_pace
from controller.core.turn import Turn
from controller.core.wording import named
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.training import GenerationSpec, Resumed

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
    live.resume_due = turn.now + resume_patience_s(turn, live)
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
