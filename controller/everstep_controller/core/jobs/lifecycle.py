"""Handle a job's deadlines, resumption, progress, user errors, limits and failing copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from everstep.ids import Rank
from everstep.vocabulary import FindingKind, GenerationReason, JobState, Severity
from everstep.wire.v1.training import GenerationSpec, Member, RankProgress, Resumed, UserError
from everstep_controller.core.checkpoints.commits import start_commits
from everstep_controller.core.checkpoints.storage import note_resumed_step
from everstep_controller.core.jobs import ending, generations
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.jobs.hangs import judge_stalls
from everstep_controller.core.jobs.joining import consider_forming, consider_preemption
from everstep_controller.core.jobs.notifications import send_generation, send_kill
from everstep_controller.core.jobs.stragglers import start_straggler_windows, update_stragglers
from everstep_controller.core.records import JobRecord
from everstep_controller.core.state import FleetState, JobRuntime
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import format_node_count, join_names

RESTART_AFTER_DEADLINES = 3
"""Number of consecutive deadlines after which missing ranks are restarted if every node has some. The deadlines double,
since a first import from a slow file system must not start over."""
INHERITED_CHECK_S = 1.0
"""Seconds between checks of a generation that had not resumed when this controller started."""


def handle_resumed(transition: Transition, job: JobRecord, node: str, report: Resumed) -> None:
    """Record that a rank has resumed; the last one completes the recovery."""
    spec = job.generation
    if spec is None or report.generation != spec.number or not job.is_running:
        transition.count_ignored("resumed.stale")
        return
    if not spec.has_rank_on(node, report.rank):
        transition.count_ignored("resumed.not_a_member")
        return
    live = transition.state.job_runtime[job.job]
    generations.mark_boundary_crossed(transition, job)
    live.progress.entered_ranks.add(report.rank)
    live.progress.record_step(report.step, transition.now)
    live.resume.ranks.add(report.rank)
    total = sum(report.phases_s.values())
    if live.resume.slowest is None or total > live.resume.slowest[0]:
        live.resume.slowest = (total, report.rank, dict(report.phases_s))
    if len(live.resume.ranks) == spec.world_size and job.progress.resumed_at is None:
        _all_resumed(transition, job, spec, report)


def _all_resumed(transition: Transition, job: JobRecord, spec: GenerationSpec, last: Resumed) -> None:
    live = transition.state.job_runtime[job.job]
    _mark_resumed(transition, job, live)
    note_resumed_step(transition, job, last.step - 1)
    took = transition.now - job.progress.opened_at
    start = f"version {last.restored}" if last.restored else spec.restore.storage_url or "scratch"
    _, rank, phases = live.resume.slowest or (0.0, last.rank, {})
    data = {f"{phase}_s": f"{seconds:.4f}" for phase, seconds in phases.items()}
    data |= {"slowest_rank": str(rank), "took_s": f"{took:.4f}", "step": str(last.step)}
    if last.restored:
        data["restored"] = str(last.restored)
    sentence = f"all {spec.world_size} rank(s) of generation {spec.number} resumed from {start}, "
    sentence += f"{took:.2f} s after the decision"
    transition.log_event("resumed", sentence, job=job.job, generation=spec.number, trace=spec.trace, data=data)
    generations.consider_growth(transition, job)


def _mark_resumed(transition: Transition, job: JobRecord, live: JobRuntime) -> None:
    job.progress.resumed_at = transition.now
    live.resume.attempts = 0
    for node in job.generation.seats if job.generation is not None else ():
        if (launcher := job.membership.launchers.get(node)) is not None:
            launcher.late_generations = 0
    start_commits(transition, job)
    start_straggler_windows(transition, job)
    transition.mark_job_changed(job.job)


def _resume_inherited(transition: Transition, job: JobRecord, live: JobRuntime, spec: GenerationSpec) -> bool:
    """Return whether a generation inherited from an earlier controller steps; its acknowledgements are not sent again.

    A rank that finished two more steps had all others in the second, so each has finished the first. A rank enters with
    the step at which it was interrupted and jumps once to the version's step, so its steps count from the second one.
    """
    step = max(_counted_steps(live, transition.read_steps(job.job)), default=None)
    if step is None:
        transition.schedule_job(transition.now + INHERITED_CHECK_S, job.job)
        return False
    _mark_resumed(transition, job, live)
    sentence = (
        f"all {spec.world_size} rank(s) of generation {spec.number} have resumed: a rank has finished step {step}"
    )
    data = {"step": str(step)}
    transition.log_event("resumed", sentence, job=job.job, generation=spec.number, trace=spec.trace, data=data)
    generations.consider_growth(transition, job)
    return True


def _counted_steps(live: JobRuntime, steps: dict[Rank, int]) -> Iterator[int]:
    """Yield the steps of ranks that have finished two steps of this generation, and record each rank's first ones."""
    for rank, step in steps.items():
        first = live.resume.first_seen_steps.get(rank, ())
        if len(first) < 2 and step not in first:
            live.resume.first_seen_steps[rank] = (*first, step)
        elif len(first) == 2 and step >= first[1] + 2:
            yield step


def handle_late_ranks(transition: Transition, job: JobRecord) -> None:
    """At the deadline, replace ranks that have not entered the generation; ranks inside get more time."""
    live, spec = transition.state.job_runtime[job.job], job.generation
    if spec is None or job.progress.resumed_at is not None or job.outgoing_generation is not None:
        return
    if live.resume.is_inherited and _resume_inherited(transition, job, live, spec):
        return
    if transition.now < live.resume.due:
        return
    entered = transition.read_entered_ranks(job.job)
    missing = [member for member in spec.roster if member.rank not in entered]
    absent = {member.node for member in missing}
    live.resume.attempts += 1
    if 0 < len(absent) < len(spec.seats):
        _exclude_missing(transition, job, missing, spec)
        return
    if missing and entered and live.resume.attempts >= RESTART_AFTER_DEADLINES:
        sentence = f"{_describe_progress(missing, spec)}, after several deadlines (generation {spec.number}): "
        sentence += "these ranks are restarted"
        _kill_missing(transition, job, missing, spec, sentence)
        generations.regroup(transition, job, RegroupCause(GenerationReason.RANK_HUNG, sentence, spec.trace))
        return
    progress = _describe_progress(missing, spec)
    sentence = f"generation {spec.number} has not resumed by its deadline: {progress}; still waiting"
    transition.log_event("generation.overdue", sentence, job=job.job, generation=spec.number, trace=spec.trace)
    live.resume.due = transition.now + generations.resume_timeout_s(transition, live)
    transition.schedule_job(live.resume.due, job.job)
    if missing:
        send_generation(transition, job, ())


def _describe_progress(missing: Sequence[Member], spec: GenerationSpec) -> str:
    if not missing:
        return "all ranks have entered it, but not all have finished a step"
    if len(missing) == spec.world_size:
        return "no rank has entered it"
    return f"{len(missing)} of {spec.world_size} ranks have not entered it, some on every node"


def _exclude_missing(transition: Transition, job: JobRecord, missing: Sequence[Member], spec: GenerationSpec) -> None:
    """Restart the missing ranks and continue without their nodes until others have taken their places."""
    absent: dict[str, list[Member]] = {}
    for member in missing:
        absent.setdefault(member.node, []).append(member)
    for node, members in absent.items():
        if (launcher := job.membership.launchers.get(node)) is None:
            continue
        ranks = join_names([str(member.rank) for member in members])
        launcher.usable, launcher.late_generations = False, launcher.late_generations + 1
        launcher.missing_local_ranks = [member.local_rank for member in members]
        launcher.unusable_reason = f"rank {ranks} on it did not enter generation {spec.number} in time"
    sentence = f"{join_names(sorted(absent))} did not enter generation {spec.number} in time"
    _kill_missing(transition, job, missing, spec, sentence)
    generations.regroup(transition, job, RegroupCause(GenerationReason.NODE_LOST, sentence, spec.trace))


def _kill_missing(
    transition: Transition, job: JobRecord, missing: Sequence[Member], spec: GenerationSpec, sentence: str
) -> None:
    live = transition.state.job_runtime[job.job]
    for member in missing:
        if member.node in transition.state.liveness.reachable_nodes:
            send_kill(transition, job, member, spec.number, sentence, spec.trace)
            live.regroup.record_replaced_rank(member.node, member.local_rank, transition.now)


MAX_ERROR_CHARS = 200
"""Number of characters that identify an exception's text."""


def handle_user_error(transition: Transition, job: JobRecord, node: str, report: UserError) -> None:
    """Handle an exception of the training function: retry as the job asked, unless another node raised it too."""
    running = job.running_generation
    if running is None or not job.is_running or report.generation != running.number:
        transition.count_ignored("user_error.stale")
        return
    if not running.has_rank_on(node, report.rank):
        transition.count_ignored("user_error.not_a_member")
        return
    sentence = f"the training function raised on rank {report.rank} ({node}) {_describe_step(report)}: {report.error}"
    data = {"rank": str(report.rank), "error": report.error, "traceback": report.traceback}
    transition.log_event("user_error", sentence, node=node, job=job.job, generation=report.generation, data=data)
    before = job.failures.user_errors.setdefault(report.error[:MAX_ERROR_CHARS], node)
    if job.spec.max_user_retries and before != node:
        job.progress.ended_step = report.step
        why = f"{before} raised the same error before, so a retry would raise it again"
        ending.fail_job(transition, job, f"{sentence}; {why}")
    elif job.failures.user_retries < job.spec.max_user_retries:
        job.failures.user_retries += 1
        words = f"{sentence}; retry {job.failures.user_retries} of {job.spec.max_user_retries}"
        generations.regroup(transition, job, RegroupCause(GenerationReason.RANK_LOST, words[:4000], transition.trace))
    else:
        job.progress.ended_step = report.step
        ending.fail_job(transition, job, sentence)


def _describe_step(report: UserError) -> str:
    """Return the step that the script was in, which is one further than the last finished one."""
    if report.started_step is None:  # from an earlier release
        return f"at step {report.step}"
    if report.started_step > report.step:
        return f"in step {report.started_step}"
    return f"after step {report.step}" if report.step else "before its first step"


def resize_job(transition: Transition, job: JobRecord, size: int, actor: str) -> None:
    """Limit the job's nodes by an operator's order; a running job follows at its next boundary."""
    job.membership.node_limit = size
    transition.mark_job_changed(job.job)
    sentence = f"{actor} limits the job to {format_node_count(job.max_seats)}"
    transition.log_event("job.resized", sentence, job=job.job)
    if job.status.state is JobState.FORMING:
        consider_forming(transition, job)
    elif job.is_running and len(job.seats) > job.max_seats:
        cause = RegroupCause(GenerationReason.OPERATOR, sentence, transition.trace, at_boundary=True)
        generations.regroup(transition, job, cause)
    else:
        generations.consider_growth(transition, job)


def advance_job(transition: Transition, job: JobRecord) -> None:
    """Act on a job's deadlines, except those of pending regroups and boundaries."""
    if job.status.state is JobState.FORMING:
        consider_forming(transition, job)
    elif job.is_running:
        if ending.fail_if_steps_differ(transition, job) or ending.finish_if_all_returned(transition, job):
            return
        if judge_stalls(transition, job):
            return
        handle_late_ranks(transition, job)
        update_stragglers(transition, job)
        generations.consider_growth(transition, job)
    elif job.status.state is JobState.PAUSED:
        generations.consider_growth(transition, job)
        consider_preemption(transition, job)
        if job.status.state is JobState.PAUSED:
            generations.update_paused_reason(transition, job)


# Progress. Hot path: constant work per rank, no effects.


def record_progress(state: FleetState, node: str, ranks: Iterable[RankProgress], now: float) -> None:
    """Record the progress of a node's own ranks; runs 100,000 times a second in a large fleet."""
    name, job = "", None
    for progress in ranks:
        if progress.job != name:
            name = progress.job
            job = state.jobs.get(name)
            if job is not None and not job.is_running:
                job = None
            if job is not None:
                pace, coming, leaving = state.job_runtime[name].progress, job.generation, job.outgoing_generation
                ours = coming.ranks_on(node) if coming is not None else range(0)
                theirs = leaving.ranks_on(node) if leaving is not None else range(0)
        if job is None:
            continue
        if coming is not None and progress.generation == coming.number and progress.rank in ours:
            pace.entered_ranks.add(progress.rank)
            if leaving is not None:
                continue
        elif leaving is None or progress.generation != leaving.number or progress.rank not in theirs:
            continue
        pace.by_rank[progress.rank] = progress
        if pace.furthest_step is None or progress.step > pace.furthest_step:
            pace.record_step(progress.step, now)


def may_have_crossed_boundary(state: FleetState, ranks: Iterable[RankProgress]) -> bool:
    """Return whether one of the ranks may have crossed its job's boundary."""
    name = ""
    for progress in ranks:
        if progress.job != name:
            name = progress.job
            job = state.jobs.get(name)
            leaving = job is not None and job.outgoing_generation is not None
        if leaving and job is not None and is_beyond_boundary(job, progress):
            return True
    return False


def is_beyond_boundary(job: JobRecord, progress: RankProgress) -> bool:
    """Return whether a rank may have crossed the boundary, which is more than progress."""
    coming = job.generation
    return job.outgoing_generation is not None and coming is not None and progress.generation == coming.number


# Replica nodes that take no copies
#
# A vault without memory or a link that corrupts bytes does not hurt training, but nothing is committed while a share's
# copy depends on it. A node whose copies arrive nowhere is recognised at its next replica node too.


def skip_failing_replica_nodes(transition: Transition, job: JobRecord) -> None:
    """At a deadline or after a failed commit, skip the replica nodes that missed too many versions in a row."""
    live, policy, spec = transition.state.job_runtime[job.job], transition.policy, job.generation
    skips, missed = live.commits.skipped_replica_nodes, live.commits.missed_copies
    live.commits.skipped_replica_nodes = skips = {n: until for n, until in skips.items() if until > transition.now}
    failing = sorted(node for node, count in missed.items() if count >= policy.checkpoints.missed_copies_count)
    if not failing or spec is None or not job.is_running or transition.state.database.outage:
        return
    if transition.now < job.progress.opened_at + policy.jobs.growth_interval_s:
        transition.schedule_job(job.progress.opened_at + policy.jobs.growth_interval_s, job.job)
        return
    if generations.boundary_step(transition, job, live) is None:
        return  # the next missed version leads here again
    for replica_node in failing:
        del missed[replica_node]
        skips[replica_node] = transition.now + policy.checkpoints.replica_node_skip_s
        _raise_copies_missing(transition, job, spec, replica_node)
    if generations.plan_replicas(transition, job, list(spec.seats)) == spec.replica_nodes:
        return  # there is no other node
    count = policy.checkpoints.missed_copies_count
    sentence = f"copies no longer go to {join_names(failing)}, which missed {count} versions in a row"
    cause = RegroupCause(GenerationReason.PLACEMENT, sentence, transition.trace, at_boundary=True)
    generations.regroup(transition, job, cause)


def _raise_copies_missing(transition: Transition, job: JobRecord, spec: GenerationSpec, replica_node: str) -> None:
    senders = [node for node, replica_nodes in spec.replica_nodes.items() if replica_node in replica_nodes]
    count = transition.policy.checkpoints.missed_copies_count
    message = (
        f"{count} versions of {job.job} in a row did not get from {join_names(senders)} to {replica_node}, so nothing "
        "was committed; the ranks' logs on either end say why (memory, time, digests)"
    )
    finding = transition.make_finding(
        FindingKind.COPIES_MISSING, f"copies/{job.job}", Severity.WARNING, message, value=float(count)
    )
    transition.raise_finding(replica_node, finding, transition.policy.checkpoints.replica_node_skip_s)
