"""Accept launchers' offers, form first generations and preempt jobs of lower priority."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

import msgspec

from everstep.ids import Version
from everstep.vocabulary import GenerationReason, JobState, NodeState
from everstep.wire.v1.directives import NewGeneration, StopJob
from everstep.wire.v1.training import LauncherJoined
from everstep_controller.core.checkpoints.storage import NO_VERSION, adopt_earlier_run
from everstep_controller.core.jobs import generations
from everstep_controller.core.jobs.generations import RegroupCause
from everstep_controller.core.jobs.notifications import is_unannounced, make_stop
from everstep_controller.core.records import (
    JobAuditNotes,
    JobCommits,
    JobFailures,
    JobMembership,
    JobRecord,
    JobStatus,
    LauncherRecord,
    RunProgress,
)
from everstep_controller.core.seats import membership
from everstep_controller.core.seats.job_index import clear_exclusion, drop_job, index_launcher, offer_to_jobs
from everstep_controller.core.state import FleetState, JobRuntime
from everstep_controller.core.transition import Transition
from everstep_controller.core.wording import format_node_count, join_names

MAX_REPORTED_GENERATION = 1 << 47
"""Highest generation number accepted for a generation that the records do not know. It leaves room above; with the last
possible number a job would have none left, and its record could not be read again."""


def handle_launcher_joined(transition: Transition, node: str, report: LauncherJoined) -> None:
    """Handle a launcher's offer: a new job, a spare, a reconnect or a launcher's new life."""
    job = transition.state.jobs.get(report.job)
    before = job.membership.launchers.get(node) if job is not None and not job.is_ended else None
    if before is not None and report.launcher < before.incarnation:  # an answer would affect the later launcher's job
        transition.count_ignored("launcher_joined.stale")
        return
    if why := membership.spec_error(report.spec):
        _refuse(transition, node, report, f"job {report.job} is refused: {why}")
        return
    if report.generation > max(MAX_REPORTED_GENERATION, job.progress.last_number if job is not None else 0):
        _refuse(
            transition, node, report, f"ranks on {node} report generation {report.generation}, which does not exist"
        )
        return
    if job is not None and job.is_ended:
        state = transition.state
        # the launchers of a job that ended in an outage still wait for the end
        ended_unheard = state.database.outage and job.status.since >= state.database.outage_since
        known = job.membership.launchers.get(node)
        # The node's own clock tells best: it may be behind the controller's, and a new run would end at once.
        last = known.incarnation if known is not None else int(job.status.since * 1000)
        if ended_unheard or report.launcher <= last:
            transition.send(node, make_stop(job, report.launcher))
            return
    if not _has_room(transition, node, report.job):
        most = transition.policy.jobs.per_node
        reason = f"{node} has {most} unfinished jobs and may have no more: `everstep jobs` lists them; end some with "
        reason += f"`everstep job stop NAME`, or raise policy.jobs.per_node ({most}) of the controller"
        _refuse(transition, node, report, reason)
        return
    if report.earlier is not None and report.earlier.fresh and job is not None and _has_no_launcher(job):
        advice = f"stop it first (`everstep job stop {job.job}`), give another --job, or continue it without --fresh"
        _refuse(transition, node, report, f"job {job.job} is paused and has checkpoints in memory: {advice}")
        return
    if job is None:
        job = _create(transition, report)
    elif job.is_ended:
        _start_over(transition, job, report)
    if report.spec != job.spec and not _accept_spec(transition, job, node, report):
        return
    if report.earlier is not None and not report.generation and job.status.state is JobState.FORMING:
        adopt_earlier_run(transition, job, report.earlier)
    before = job.membership.launchers.get(node)
    restarted = before is not None and report.launcher > before.incarnation
    new_agent = before is not None and not before.has_rejoined
    _record_launcher(transition, job, node, report)
    _catch_up(transition, job, node, report, restarted=restarted, new_agent=new_agent)


def _has_no_launcher(job: JobRecord) -> bool:
    """Return whether the job waits for launchers to continue it."""
    return job.status.state is JobState.PAUSED and not job.membership.launchers


def _has_room(transition: Transition, node: str, name: str) -> bool:
    """Return whether the node may offer itself to another job; jobs that never formed and are deserted make room."""
    state, most = transition.state, transition.policy.jobs.per_node
    live = state.node_runtime[node]
    if name in live.open_jobs or len(live.open_jobs) < most:
        return True
    jobs = [state.jobs[other] for other in live.open_jobs if not state.database.outage]
    void = [job for job in jobs if not job.membership.launchers and not job.progress.last_number]
    for job in sorted(void, key=lambda job: job.membership.abandoned_at)[: len(live.open_jobs) + 1 - most]:
        sentence = f"job {job.job} never formed, its launchers have left, and {node} has {most} unfinished jobs: "
        drop_job(transition, job.job, f"{sentence}it is forgotten")
    return len(live.open_jobs) < most


def _new_secret(transition: Transition) -> str:
    if len(transition.entropy) < 64:
        raise AssertionError("a job's secret needs 64 hex digits of entropy with the report that begins it")
    return transition.entropy


def _create(transition: Transition, report: LauncherJoined) -> JobRecord:
    job = JobRecord(
        job=report.job,
        spec=report.spec,
        secret=_new_secret(transition),
        status=JobStatus(since=transition.now, sentence="waits for its launchers"),
        progress=RunProgress(created_at=transition.now),
    )
    if report.generation:
        job.progress.last_number = generations.generation_number_floor(transition.state, report.generation)
    transition.state.jobs[job.job] = job
    transition.state.job_runtime[job.job] = JobRuntime()
    transition.log_event("job.created", f"job {job.job} was created by its first launcher", job=job.job)
    transition.mark_job_changed(job.job)
    return job


def _start_over(transition: Transition, job: JobRecord, report: LauncherJoined) -> None:
    """Run the job again for a launcher younger than its end. Generation numbers continue; the secret is new."""
    job.spec, job.secret = report.spec, _new_secret(transition)
    if job.status.state is JobState.FINISHED and report.earlier is None:  # a launcher that resumes says what is there
        job.spills.stored, job.spills.last_step = [], 0
    job.spills.earlier = Version(job.progress.last_number, 0)
    sentence = "waits for its launchers, to run once more"
    job.status.enter(JobState.FORMING, sentence, trace=transition.trace, now=transition.now)
    job.generation = job.outgoing_generation = None
    job.progress = RunProgress(created_at=transition.now, last_number=job.progress.last_number)
    job.membership, job.failures, job.audits = JobMembership(), JobFailures(), JobAuditNotes()
    job.commits = JobCommits(restore_ceiling=NO_VERSION)
    transition.state.job_runtime[job.job] = JobRuntime(nodes=transition.state.job_runtime[job.job].nodes)
    transition.log_event("job.created", f"job {job.job} is run again", job=job.job)
    transition.mark_job_changed(job.job)


def _accept_spec(transition: Transition, job: JobRecord, node: str, report: LauncherJoined) -> bool:
    """Accept a different specification from the only launcher; refuse it if there are others."""
    if any(other != node for other in job.membership.launchers):
        reason = f"the launcher on {node} has other options for job {job.job} than the launchers before it: "
        reason += "start all launchers with the same options"
        _refuse(transition, node, report, reason)
        return False
    job.spec = report.spec
    transition.mark_job_changed(job.job)
    return True


def _refuse(transition: Transition, node: str, report: LauncherJoined, reason: str) -> None:
    transition.log_event("launcher.refused", reason, node=node, job=report.job)
    transition.send(node, StopJob(job=report.job, ok=False, reason=reason, launcher=report.launcher))


def _record_launcher(transition: Transition, job: JobRecord, node: str, report: LauncherJoined) -> None:
    before = job.membership.launchers.get(node)
    if before is not None and before.incarnation == report.launcher:
        before.store_address, before.generation = report.store, report.generation
        before.has_rejoined = True
        before.make_usable()
    else:
        job.membership.launchers.pop(node, None)
        job.membership.launchers[node] = LauncherRecord(
            node=node, incarnation=report.launcher, store_address=report.store, generation=report.generation
        )
        clear_exclusion(transition, job.job, node)
        transition.log_event("launcher.joined", f"the launcher on {node} joined job {job.job}", node=node, job=job.job)
    index_launcher(transition.state, job, node)
    transition.mark_job_changed(job.job)


def _catch_up(
    transition: Transition, job: JobRecord, node: str, report: LauncherJoined, *, restarted: bool, new_agent: bool
) -> None:
    """Bring the launcher up to date. A new agent has lost its ranks' generation, and its vault will ask for it."""
    if report.generation > job.progress.last_number:
        sentence = (
            f"ranks on {node} are in generation {report.generation}, but the records end at "
            f"{job.progress.last_number} (restored from an old copy?)"
        )
        job.progress.last_number = generations.generation_number_floor(transition.state, report.generation)
        transition.log_event("job.records_behind", sentence, node=node, job=job.job)
    if job.status.state is JobState.FORMING:
        consider_forming(transition, job)
        return
    if job.generation is None:
        return
    if job.is_running and job.progress.last_number > job.generation.number:
        sentence = f"ranks on {node} are ahead of the records"
        generations.regroup(transition, job, RegroupCause(GenerationReason.FORMED, sentence, transition.trace))
        return
    if job.is_running and job.is_seated(node) and restarted:
        sentence = f"the launcher on {node} restarted"
        generations.regroup(transition, job, RegroupCause(GenerationReason.RANK_LOST, sentence, transition.trace))
        return
    spec = job.outgoing_generation if is_unannounced(transition, job) else job.generation
    if job.is_running and spec is not None and (new_agent or report.generation < spec.number):
        transition.send(node, NewGeneration(spec=spec))
    generations.consider_growth(transition, job)


def offer_after_deferral(transition: Transition) -> None:
    """Offer nodes whose deferred eviction was dropped, and which continue to serve, as ordinary spares."""
    for node in transition.deferral_dropped:
        record = transition.state.nodes.get(node)
        if record is not None and record.state is NodeState.HEALTHY and not record.health.deferred_eviction_key:
            offer_to_jobs(transition, node)


def consider_forming(transition: Transition, job: JobRecord) -> None:
    """Open the first generation, with all requested nodes or, after the wait, with enough. Not in a database outage."""
    if transition.state.database.outage:
        return
    most, least = job.max_seats, job.min_seats
    due = job.progress.created_at + job.spec.join_wait_s
    if transition.now < due and len(job.membership.launchers) < most:
        transition.schedule_job(due, job.job)
        return
    seats = len(membership.next_seats(transition.state, job)) if len(job.membership.launchers) >= least else 0
    if seats >= most or (seats >= least and transition.now >= due):
        sentence = f"{seats} of {format_node_count(most)} asked for have joined"
        generations.regroup(transition, job, RegroupCause(GenerationReason.FORMED, sentence, transition.trace))
    elif transition.now < due:
        transition.schedule_job(due, job.job)
    elif seats < least:
        consider_preemption(transition, job)


# Preemption: a job that cannot run takes nodes from a running job of lower priority that can spare them.
#
# It waits first, takes only what it needs and takes nothing if that would not suffice. The other job leaves the nodes
# at a boundary and is then left alone for a while. Nodes are never given back by force.

RECHECK_S = 1.0
"""Minimum seconds between two checks of a waiting job."""


SeatedNode = tuple[JobRecord, str]
"""A job, and a node of its roster that another job could use."""


class PreemptionPlan(msgspec.Struct, frozen=True):
    """Preemption plan; both fields are empty if there is none."""

    seats: tuple[str, ...] = ()
    """Roster with which the job could run."""
    nodes_by_job: dict[str, list[str]] = {}
    """Nodes of the roster that other jobs have to give, by job."""


def consider_preemption(transition: Transition, job: JobRecord) -> None:
    """Preempt other jobs if the job has been below its minimum for long enough."""
    if job.status.state not in (JobState.FORMING, JobState.PAUSED) or transition.state.database.outage:
        return
    since = job.status.since + (job.spec.join_wait_s if job.status.state is JobState.FORMING else 0.0)
    due = since + transition.policy.jobs.preempt_after_s
    if transition.now < due:
        transition.schedule_job(due, job.job)
        return
    givers = [
        other
        for other in preemptable_jobs(transition.state, job)
        if transition.now >= other.membership.preempted_at + transition.policy.jobs.preempt_after_s
        and generations.boundary_step(transition, other, transition.state.job_runtime[other.job]) is not None
    ]
    plan = plan_preemption(transition.state, job, givers)
    for name, taken in plan.nodes_by_job.items():
        _preempt(transition, job, transition.state.jobs[name], taken, plan)
    again = transition.now + max(transition.policy.jobs.preempt_after_s, RECHECK_S)
    # rounding merges repeated requests into one check a second
    transition.schedule_job(math.ceil(again / RECHECK_S) * RECHECK_S, job.job)


def preemptable_jobs(state: FleetState, job: JobRecord) -> list[JobRecord]:
    """Return running jobs of lower priority with nodes that ``job`` could use, lowest priority first."""
    launchers = (state.node_runtime[node] for node in job.membership.launchers if node in state.node_runtime)
    names = dict.fromkeys(name for live in launchers for name in live.open_jobs)
    others = [state.jobs[name] for name in names]
    below = [o for o in others if o.is_running and o.spec.priority < job.spec.priority]
    return sorted(below, key=lambda other: other.spec.priority)


def plan_preemption(state: FleetState, job: JobRecord, victims: Sequence[JobRecord]) -> PreemptionPlan:
    """Return the nodes of ``victims``, in order, that the job needs for its minimum; an empty plan if too few."""
    least = job.min_seats
    if len(job.membership.launchers) < least:
        return PreemptionPlan()
    offered = [
        *membership.eligible_nodes(state, job),
        *(node for node in job.membership.launchers if _is_leaving_victim(state, job, node)),
    ]
    seats = membership.seats_among(state, job, offered, least)
    if len(seats) >= least:
        return PreemptionPlan()
    theirs, taken = _preemptable_nodes(state, job, victims), dict[str, JobRecord]()
    while theirs and len(seats) < least:
        begun = _incomplete_blocks(state, job, offered, seats)
        region = max(theirs, key=lambda name: len(begun[name]))
        block = _next_block(state, job, theirs[region], begun[region], seats, taken)
        if not block:
            del theirs[region]
        taken |= block
        offered += block
        seats = membership.seats_among(state, job, offered, least)
    if len(seats) < least:
        return PreemptionPlan()
    takings: dict[str, list[str]] = {}
    for node in seats:
        if node in taken:
            takings.setdefault(taken[node].job, []).append(node)
    return PreemptionPlan(tuple(seats), takings)


def _preemptable_nodes(state: FleetState, job: JobRecord, victims: Sequence[JobRecord]) -> dict[str, deque[SeatedNode]]:
    """Return the victims' nodes that the job could use, by block domain, last seats first."""
    found: dict[str, deque[SeatedNode]] = {}
    for giver in victims:
        for node in reversed(giver.seats):
            if not membership.unfit_reason(state, job, node):
                found.setdefault(_block_domain(state, job, node), deque()).append((giver, node))
    return found


def _block_domain(state: FleetState, job: JobRecord, node: str) -> str:
    within = job.spec.block_within
    return membership.domain_of(state.nodes[node].identity.domain, within) if within else ""


def _incomplete_blocks(
    state: FleetState, job: JobRecord, offered: Sequence[str], seats: Sequence[str]
) -> dict[str, list[str]]:
    """Return the offered nodes that form no whole block yet, by domain."""
    placed, begun = set(seats), defaultdict[str, list[str]](list)
    for node in offered:
        if node not in placed:
            begun[_block_domain(state, job, node)].append(node)
    return begun


def _next_block(
    state: FleetState,
    job: JobRecord,
    offers: deque[SeatedNode],
    partial_block: Sequence[str],
    seats: Sequence[str],
    taken_nodes: Mapping[str, JobRecord],
) -> dict[str, JobRecord]:
    """Return the ``offers`` that complete ``partial_block``, with the jobs that can spare them; {} if too few."""
    found: dict[str, JobRecord] = {}
    while offers and len(partial_block) + len(found) < job.spec.block_nodes:
        giver, node = offers.popleft()
        gone = frozenset((*seats, *partial_block, *found, node))
        asked_of = {asked_job.job: asked_job for asked_job in (*taken_nodes.values(), *found.values(), giver)}
        if all(
            len(membership.next_seats(state, asked_job, gone)) >= asked_job.min_seats for asked_job in asked_of.values()
        ):
            found[node] = giver
    return found if len(partial_block) + len(found) == job.spec.block_nodes else {}


def _is_leaving_victim(state: FleetState, job: JobRecord, node: str) -> bool:
    owner = None if membership.unfit_reason(state, job, node) else membership.other_owner(state, job, node)
    if owner is None or owner.spec.priority >= job.spec.priority or owner.outgoing_generation is None:
        return False
    return owner.generation is not None and not owner.has_seat(node) and owner.is_seated(node)


def _preempt(transition: Transition, job: JobRecord, victim: JobRecord, taken: list[str], plan: PreemptionPlan) -> None:
    """Take nodes from the victim, which must not replace them with the free nodes in the plan."""
    victim.membership.preempted_at = transition.now
    sentence = (
        f"job {job.job} (priority {job.spec.priority}) needs at least "
        f"{format_node_count(job.min_seats)} and takes "
        f"{join_names(taken)} of job {victim.job} (priority {victim.spec.priority}), which stays above its minimum"
    )
    transition.log_event("job.preempts", sentence, job=job.job)
    cause = RegroupCause(
        GenerationReason.PRIORITY, sentence, transition.trace, at_boundary=True, nodes_to_exclude=frozenset(plan.seats)
    )
    generations.regroup(transition, victim, cause)
