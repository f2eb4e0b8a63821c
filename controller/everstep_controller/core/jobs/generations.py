"""Move a job to its next generation, at once or at a boundary, or pause it if too few nodes are left."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from everstep.clock import Backoff
from everstep.vocabulary import GenerationReason, JobState, NodeState
from everstep.wire.v1.training import GenerationSpec, Holder
from everstep_controller.core.checkpoints.commits import restore_rule
from everstep_controller.core.checkpoints.placement import FailureDomains, place_replicas
from everstep_controller.core.checkpoints.subscriptions import JobMilestone, publish
from everstep_controller.core.effects import PutGeneration
from everstep_controller.core.health.outbreaks import blocking_findings
from everstep_controller.core.jobs.notifications import send_generation, send_kill
from everstep_controller.core.records import JobRecord
from everstep_controller.core.seats.job_index import update_roster, wake_competing_jobs
from everstep_controller.core.seats.membership import describe_change, next_seats, seat_changes
from everstep_controller.core.state import FleetState, JobRuntime, ResumeRuntime
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import format_node_count, join_names

MAX_EXTRAPOLATION_S = 1.5
"""Seconds for which steps since the newest known one are extrapolated; heartbeats bring news every second."""
MAX_FORMER_NODES = 64
"""Number of nodes of earlier rosters remembered as holders of slots."""
MAX_CAUSE_CHARS = 3000
"""Length limit of a cause, so that a generation's sentence (up to 4096 characters) also states the change."""
NUMBERS_PER_EPOCH = 1_000_000
"""Generation numbers reserved for one epoch: those above ``epoch * NUMBERS_PER_EPOCH``."""


def generation_number_floor(state: FleetState, last_number: int) -> int:
    """Return the number after which this controller counts without the database: its epoch's block is its own."""
    return max(last_number, state.epoch * NUMBERS_PER_EPOCH)


class RegroupCause(msgspec.Struct, frozen=True):
    """Cause of a regroup."""

    reason: GenerationReason
    sentence: str
    trace: str
    at_boundary: bool = False
    """True if nothing is broken, so that the running generation may end at a boundary."""
    nodes_to_exclude: frozenset[str] = frozenset()
    """Nodes to leave out this time, although nothing stands against them."""
    nodes_exchanging_seats: tuple[str, str] | None = None
    """Two nodes that take each other's seats, and so each other's ranks."""

    @property
    def lets_ranks_end(self) -> bool:
        """Return whether ranks that have to leave a job that pauses may end by themselves."""
        return self.at_boundary or self.reason is GenerationReason.OPERATOR


def regroup(transition: Transition, job: JobRecord, cause: RegroupCause) -> None:
    """Open the job's next generation with the eligible nodes, or pause the job if these are too few."""
    live = transition.state.job_runtime[job.job]
    publish(transition, job, JobMilestone.GENERATION_ENDS)
    seats = _exchange_seats(_choose_seats(transition, job, cause), cause.nodes_exchanging_seats)
    if len(seats) < job.min_seats:
        _pause(transition, job, cause, seats)
        return
    waits = cause.at_boundary and not job.spec.restarts_script  # a script for torchrun has no boundaries
    boundary = boundary_step(transition, job, live) if waits else None
    publish(transition, job, JobMilestone.SEATS_CHOSEN)
    spec = _make_spec(transition, job, cause, seats, boundary)
    before = job.seats
    job.membership.former_nodes = [
        n for n in dict.fromkeys([*before, *job.membership.former_nodes]) if n not in spec.seated_nodes
    ][:MAX_FORMER_NODES]
    job.outgoing_generation = job.generation if boundary is not None else None
    _begin_generation(transition, job, live, spec)
    wake_competing_jobs(transition, job)
    if boundary is not None:
        publish(transition, job, JobMilestone.BOUNDARY_ANNOUNCED)
    transition.emit(PutGeneration(spec, transition.now))
    data = _event_data(spec, before, seats)
    transition.log_event("generation", spec.sentence, job=job.job, generation=spec.number, trace=spec.trace, data=data)
    send_generation(transition, job, before)


def _choose_seats(transition: Transition, job: JobRecord, cause: RegroupCause) -> list[str]:
    """Return the next seats. Nodes that were to leave at an unreached boundary leave now, unless the job needs them."""
    if job.outgoing_generation is not None and job.generation is not None:
        leaving = job.outgoing_generation.seated_nodes - job.generation.seated_nodes
        seats = next_seats(transition.state, job, cause.nodes_to_exclude | leaving)
        if len(seats) >= job.min_seats:
            return seats
    return current_roster(transition, job, cause.nodes_to_exclude)


def _exchange_seats(seats: list[str], nodes: tuple[str, str] | None) -> list[str]:
    """Return the seats with two nodes exchanged, if both have one."""
    if nodes is None or not set(nodes) <= set(seats):
        return seats
    other = dict(zip(nodes, reversed(nodes), strict=True))
    return [other.get(node, node) for node in seats]


def _event_data(spec: GenerationSpec, previous: Sequence[str], seats: Sequence[str]) -> dict[str, str]:
    data = {"reason": str(spec.reason), "nodes": str(len(seats)), "world_size": str(spec.world_size)}
    left, came = seat_changes(previous, seats)
    optional = {
        "left": join_names(left) if left else None,
        "came": join_names(came) if came else None,
        "after_step": spec.after_step,
        "floor": spec.restore.floor,
        "ceiling": spec.restore.ceiling,
    }
    return data | {key: str(value) for key, value in optional.items() if value is not None}


def _make_spec(
    transition: Transition, job: JobRecord, cause: RegroupCause, seats: list[str], boundary: int | None
) -> GenerationSpec:
    state, number = transition.state, job.progress.last_number
    number = (generation_number_floor(state, number) if state.database.outage else number) + 1
    change = describe_change(job.seats, seats, job.max_seats)
    when = "" if boundary is None else f"after step {boundary} "
    records = state.nodes
    leader = _choose_store_node(seats, job.generation)
    return GenerationSpec(
        job=job.job,
        number=number,
        reason=cause.reason,
        sentence=(
            f"{cause.sentence[:MAX_CAUSE_CHARS]}; {when}generation {number} "
            f"{change}{describe_kept_nodes(state, job, seats)}"
        ),
        trace=cause.trace,
        seats=tuple(seats),
        store=job.membership.launchers[leader].store_address,
        store_node=leader,
        restore=restore_rule(transition, job),
        holders=tuple(
            Holder(node=node, vault=records[node].identity.vault, rack=records[node].identity.domain.rack)
            for node in _holders(transition, job, seats)
        ),
        replica_nodes=plan_replicas(transition, job, seats),
        secret=job.secret,
        spec=job.spec,
        issued_at=transition.now,
        after_step=boundary,
        audits_off=tuple(job.audits.off),
    )


def _choose_store_node(seats: Sequence[str], previous: GenerationSpec | None) -> str:
    """Return the node that hosts the store: the previous one if it stays, else the first that stays, else the first."""
    if previous is None:
        return seats[0]
    if previous.store_node in seats:
        return previous.store_node
    return next((node for node in seats if node in previous.seated_nodes), seats[0])


def plan_replicas(transition: Transition, job: JobRecord, seats: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the replica nodes for the data that each of ``seats`` alone holds."""
    domains = {node: FailureDomains.of(transition.state.nodes[node]) for node in seats}
    previous = job.generation.replica_nodes if job.generation is not None else {}
    skips = transition.state.job_runtime[job.job].commits.skipped_replica_nodes
    skipped = frozenset(node for node, until in skips.items() if until > transition.now)
    return place_replicas(seats, domains, job.spec.replicas, previous, skipped)


def _holders(transition: Transition, job: JobRecord, seats: list[str]) -> list[str]:
    """Return the nodes whose vaults may be asked: the roster, and former members that never computed wrongly."""
    state, before = transition.state, job.seats
    committed = state.job_runtime[job.job].commits.committed_version
    is_old = committed is not None and job.generation is not None and committed.generation == job.generation.number
    counts, stay = set(before if is_old else [*before, *job.membership.former_nodes]), set(seats)
    former = [
        node
        for node in dict.fromkeys([*before, *job.membership.former_nodes])
        if node not in stay
        and not state.nodes[node].health.defective_gpus
        and (
            node in counts
            or (node in state.liveness.reachable_nodes and state.node_runtime[node].disconnected_at is None)
        )
    ]
    return seats + former


def _begin_generation(transition: Transition, job: JobRecord, live: JobRuntime, spec: GenerationSpec) -> None:
    """Make ``spec`` the job's generation and reset the state of the one before."""
    assert spec.number > job.progress.last_number, f"{job.job}: generation {spec.number} is not a new one"
    assert job.outgoing_generation is None or spec.after_step is not None, f"{job.job}: no boundary to {spec.number}"
    job.generation, job.progress.last_number = spec, spec.number
    job.progress.opened_at, job.progress.resumed_at = transition.now, None
    job.progress.finished_ranks, job.progress.last_begun, job.progress.returned_collectives = [], None, {}
    job.status.enter(JobState.RUNNING, spec.sentence, trace=spec.trace, now=transition.now)
    update_roster(transition.state, job)
    publish(transition, job, JobMilestone.GENERATION_BEGINS)
    live.progress.entered_ranks = set()
    live.resume = ResumeRuntime(attempts=live.resume.attempts, due=transition.now + resume_timeout_s(transition, live))
    live.regroup.drop_reports()
    live.regroup.growth_due = 0.0
    if job.outgoing_generation is None:
        _forget_ranks(transition, job)
    else:
        stride, policy = transition.read_step_rate(job.job), transition.policy
        steps = (spec.after_step or 0) - (stride.step or 0) + policy.regroups.boundary_fallback_steps
        fallback_s = max(policy.regroups.boundary_fallback_s, steps * stride.step_s)
        live.regroup.boundary_fallback_at = transition.now + fallback_s
        live.resume.due += fallback_s
        transition.schedule_job(live.regroup.boundary_fallback_at, job.job)
    transition.schedule_job(live.resume.due, job.job)
    transition.mark_job_changed(job.job)


def resume_timeout_s(transition: Transition, live: JobRuntime) -> float:
    """Return the seconds until a generation must step; doubles after each failed one in a row."""
    waits = Backoff(
        floor_s=transition.policy.regroups.resume_deadline_s, ceiling_s=transition.policy.regroups.resume_deadline_max_s
    )
    return waits.limit_s(live.resume.attempts)


def _forget_ranks(transition: Transition, job: JobRecord) -> None:
    """Drop progress, audits' counts and open votes of a generation that is over."""
    live = transition.state.job_runtime[job.job]
    live.progress.by_rank, live.progress.furthest_step = {}, None
    live.audits.restart_counts()
    publish(transition, job, JobMilestone.RANKS_GONE)


def _pause(transition: Transition, job: JobRecord, cause: RegroupCause, seats: list[str]) -> None:
    if job.status.state is JobState.PAUSED:
        return
    _kill_left_out(transition, job, cause, seats)
    job.status.paused_for = cause.sentence
    enter_pause(transition, job, _describe_paused(job, seats), cause.trace, spills=cause.lets_ranks_end)
    transition.schedule_job(transition.now + transition.policy.jobs.preempt_after_s, job.job)


def enter_pause(transition: Transition, job: JobRecord, sentence: str, trace: str, *, spills: bool) -> None:
    """Pause a job whose ranks are gone. ``spills``: its newest version goes to storage."""
    live = transition.state.job_runtime[job.job]
    live.regroup.drop_reports()
    publish(transition, job, JobMilestone.RANKS_GONE)
    job.outgoing_generation = None
    job.status.enter(JobState.PAUSED, sentence, trace=trace, now=transition.now)
    update_roster(transition.state, job)
    transition.mark_job_changed(job.job)
    transition.log_event("job.paused", sentence, job=job.job, generation=job.progress.last_number, trace=trace)
    if spills:
        publish(transition, job, JobMilestone.JOB_MAY_STOP)
    wake_competing_jobs(transition, job)


def _describe_paused(job: JobRecord, seats: Sequence[str]) -> str:
    """Return why the job is paused, which nodes are eligible and how many more it needs."""
    least = job.min_seats
    missing = least - len(seats)
    more = "more of a block come back" if job.spec.block_nodes > 1 else f"{missing} come back"
    until = "one comes back" if missing == 1 else more
    return (
        f"{job.status.paused_for}; able to go on: {join_names(seats)}; the job needs {format_node_count(least)} "
        f"and is paused until {until}"
    )


def schedule_paused_job_checks(transition: Transition) -> None:
    """Schedule a check, at most once a second, of each paused job whose nodes changed in this event."""
    changed, jobs = transition.changed_records()
    names = dict.fromkeys(jobs)
    for node in changed:
        names.update(transition.state.node_runtime[node].jobs)
    for name in names:
        if transition.state.jobs[name].status.state is JobState.PAUSED:
            transition.schedule_job(math.floor(transition.now) + 1.0, name)


def update_paused_reason(transition: Transition, job: JobRecord) -> None:
    """Update a paused job's sentence to the nodes that are eligible now."""
    seats = current_roster(transition, job)
    if len(seats) < job.min_seats and (sentence := _describe_paused(job, seats)) != job.status.sentence:
        job.status.sentence = sentence
        transition.mark_job_changed(job.job)


def _kill_left_out(transition: Transition, job: JobRecord, cause: RegroupCause, seats: list[str]) -> None:
    """End the running ranks on nodes that had to leave, since no generation announces the change to them.

    Where nothing is broken, or a person ordered it, they get a signal and their grace time first.
    """
    running = job.running_generation
    if running is not None:
        killed = (running.seated_nodes & transition.state.liveness.reachable_nodes) - set(seats)
        for member in running.roster:
            if member.node in killed:
                reason, trace, has_grace = cause.sentence, cause.trace, cause.lets_ranks_end
                send_kill(transition, job, member, running.number, reason, trace, has_grace=has_grace)


def boundary_step(transition: Transition, job: JobRecord, live: JobRuntime) -> int | None:
    """Return the step for an orderly end, at the next commit if there is time; None if it cannot run until then."""
    if not job.is_running or job.progress.resumed_at is None or job.outgoing_generation is not None:
        return None
    if live.regroup.pending is not None or live.regroup.failed_collective_ranks or job.progress.finished_ranks:
        return None
    state = transition.state
    seats = job.seats
    if any(
        node not in state.liveness.reachable_nodes or state.node_runtime[node].disconnected_at is not None
        for node in seats
    ):
        return None
    stride, margin = transition.read_step_rate(job.job), transition.policy.regroups.boundary_margin_steps
    if stride.step is None:
        return None
    if stride.step_s <= 0:
        return stride.step + margin
    margin = max(margin, math.ceil(transition.policy.regroups.boundary_margin_s / stride.step_s))
    soonest = stride.predict_step(transition.now, MAX_EXTRAPOLATION_S) + margin
    candidate = live.commits.candidate_step
    return candidate if candidate is not None and candidate >= soonest else soonest


def mark_boundary_crossed(transition: Transition, job: JobRecord) -> None:
    """Note that ranks have crossed the boundary: from now on only the new generation counts."""
    live = transition.state.job_runtime[job.job]
    if job.outgoing_generation is None:
        return
    job.outgoing_generation = None
    update_roster(transition.state, job)
    _forget_ranks(transition, job)
    live.regroup.drop_reports()
    transition.mark_job_changed(job.job)
    wake_competing_jobs(transition, job)


def note_beyond_boundary(transition: Transition, job: JobRecord, node: str, rank: int, number: int, step: int) -> None:
    """Note a rank's report of ``step`` in generation ``number``, which may show that the boundary was crossed.

    A newcomer enters the announced generation early and waits there: its report counts only from the boundary's step.
    """
    coming, leaving = job.generation, job.outgoing_generation
    if leaving is None or coming is None or coming.number != number or not coming.has_rank_on(node, rank):
        return
    if node in leaving.seated_nodes or step >= (coming.after_step or 0):
        mark_boundary_crossed(transition, job)


def settle_boundary(transition: Transition, job: JobRecord) -> None:
    """At a deadline, note that the boundary was crossed, or abandon it and regroup at once."""
    live = transition.state.job_runtime[job.job]
    spec = job.generation
    if job.outgoing_generation is None or spec is None:
        return
    step = transition.read_step_rate(job.job).step
    entered = any(
        spec.node_of(rank) in job.outgoing_generation.seated_nodes for rank in transition.read_entered_ranks(job.job)
    )
    if entered or (step is not None and step >= (spec.after_step or 0)):
        if entered or transition.now >= live.regroup.boundary_fallback_at:
            mark_boundary_crossed(transition, job)
    elif transition.now >= live.regroup.boundary_fallback_at:
        sentence = f"the boundary after step {spec.after_step} was not reached in time; the job regroups at once"
        regroup(transition, job, RegroupCause(spec.reason, sentence, spec.trace))


def consider_growth(transition: Transition, job: JobRecord) -> None:
    """Resume a paused job, or grow a small one at a boundary, once nodes and time allow."""
    state = transition.state
    if job.generation is None or job.status.state not in (JobState.RUNNING, JobState.PAUSED):
        return
    if job.status.state is JobState.PAUSED:
        seats = next_seats(state, job)
        if len(seats) >= job.min_seats and not _waits_for_more_nodes(transition, job, seats):
            sentence = f"enough nodes are available again ({join_names(seats)})"
            regroup(transition, job, RegroupCause(GenerationReason.GROWTH, sentence, transition.trace))
        return
    before = job.seats
    if len(before) >= job.max_seats or job.progress.resumed_at is None:
        return
    if job.outgoing_generation is not None or state.database.outage:
        return
    seats = next_seats(state, job)
    stay = set(before) - set(job.membership.replaced_stragglers)  # those leave once others come
    if len(seats) <= len(before) or not stay <= set(seats):
        return
    due = job.progress.opened_at + transition.policy.jobs.growth_interval_s
    if transition.now < due:
        transition.schedule_job(due, job.job)
        return
    if _waits_for_more_nodes(transition, job, seats):
        return
    if boundary_step(transition, job, state.job_runtime[job.job]) is not None:
        sentence = f"a spare is ready and the job has {len(before)} of {job.max_seats} nodes"
        cause = RegroupCause(GenerationReason.GROWTH, sentence, transition.trace, at_boundary=True)
        regroup(transition, job, cause)


def _waits_for_more_nodes(transition: Transition, job: JobRecord, seats: Sequence[str]) -> bool:
    """Return whether to wait for more returning nodes, because each growth costs a regroup."""
    live = transition.state.job_runtime[job.job]
    if len(seats) >= min(job.max_seats, len(job.membership.launchers)):
        return False
    if not live.regroup.growth_due:
        live.regroup.growth_due = transition.now + transition.policy.jobs.growth_gather_s
        transition.schedule_job(live.regroup.growth_due, job.job)
    return transition.now < live.regroup.growth_due


# Seats kept on hold
#
# A hold, or another party's cordon, keeps new work away from a node, and a regroup is new work. The job continues
# without the node if it can, and with it if it would otherwise have to pause.


def current_roster(transition: Transition, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """Return ``roster_at`` now."""
    return roster_at(transition.state, transition.now, job, without)


def roster_at(state: FleetState, now: float, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """Return ``next_seats``, together with seated nodes on hold if the job needs them and they suffice."""
    seats = next_seats(state, job, without)
    if len(seats) >= job.min_seats:
        return seats
    staying = [node for node in job.seats if job.is_running and _may_keep_seat(state, now, node)]
    more = next_seats(state, job, without, keep_seated=staying) if staying else seats
    return more if len(more) >= job.min_seats else seats


def _may_keep_seat(state: FleetState, now: float, node: str) -> bool:
    """Return whether a seated node keeps its seat: on probation, or held without maintenance or blocking findings."""
    record = state.nodes[node]
    if record.state is NodeState.PROBATION:
        return True
    if record.state is not NodeState.HELD or record.scheduling.maintenance_until:
        return False
    return not blocking_findings(state, record, now)


def describe_kept_nodes(state: FleetState, job: JobRecord, seats: Sequence[str]) -> str:
    """Return what a generation's sentence says of kept nodes among its ``seats``; "" for none."""
    held = [node for node in seats if state.nodes[node].state in (NodeState.HELD, NodeState.PROBATION)]
    if not held:
        return ""
    return f"; it keeps {join_names(held)}, because the job needs {format_node_count(job.min_seats)}"
