"""Launchers offer their nodes to a job, and its first generation forms."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from everstep.vocabulary import GenerationReason, JobState, NodeState
from everstep.wire.v1.directives import NewGeneration, StopJob
from everstep.wire.v1.training import LauncherJoined
from everstep_controller.core.checkpoints.commits import NOTHING
from everstep_controller.core.jobs.generations import Cause, boundary_step, consider_growth, own_numbers, regroup
from everstep_controller.core.jobs.job_index import drop_job, launcher_came
from everstep_controller.core.jobs.membership import (
    ENDED,
    able_nodes,
    contradiction,
    domain_of,
    is_seated,
    least_nodes,
    most_nodes,
    next_seats,
    owner_of,
    seats_among,
    seats_of,
    unfit,
)
from everstep_controller.core.jobs.notifications import is_untold, stop_of
from everstep_controller.core.records import JobRecord, LauncherRecord
from everstep_controller.core.state import FleetState, JobLive
from everstep_controller.core.transition import Turn
from everstep_controller.core.wording import named, nodes

MOST_BELIEVED = 1 << 47
"""Of a generation that the records do not know. Above there is room for as many as will ever come: with the last number
that there can be, the job would have none left, nor could its record be read again."""


def launcher_joined(turn: Turn, node: str, report: LauncherJoined) -> None:
    """Takes a node's offer: a new job, a spare, a catching up after a reconnect, or a launcher's new life."""
    job = turn.state.jobs.get(report.job)
    if job is not None and job.state not in ENDED and _is_stale(job, node, report):
        turn.ignore("launcher_joined.stale")
        return
    if why := contradiction(report.spec):
        _refuse(turn, node, report, f"job {report.job} cannot be: {why}")
        return
    if report.generation > max(MOST_BELIEVED, job.last_number if job is not None else 0):
        _refuse(
            turn, node, report, f"ranks on {node} say that they are in generation {report.generation}: there is none"
        )
        return
    if job is not None and job.state in ENDED:
        ended_unheard = turn.state.store_away and job.since >= turn.state.store_away_at  # its launchers wait to be told
        if ended_unheard or report.launcher <= int(job.since * 1000):
            turn.send(node, stop_of(job, report.launcher))
            return
    if not _has_room(turn, node, report.job):
        most = turn.policy.jobs_per_node
        reason = f"{node} has {most} unfinished jobs and may have no more: `everstep jobs` lists them; end some with "
        reason += f"`everstep job stop NAME`, or raise jobs_per_node ({most}) in the controller's [policy]"
        _refuse(turn, node, report, reason)
        return
    if job is None:
        job = _create(turn, report)
    elif job.state in ENDED:
        _start_over(turn, job, report)
    if report.spec != job.spec and not _take_spec(turn, job, node, report):
        return
    before = job.launchers.get(node)
    restarted = before is not None and report.launcher > before.incarnation
    new_agent = before is not None and not before.confirmed
    _note_launcher(turn, job, node, report)
    _catch_up(turn, job, node, report, restarted=restarted, new_agent=new_agent)


def _is_stale(job: JobRecord, node: str, report: LauncherJoined) -> bool:
    """Whether a later launcher of the node has joined: to answer this one would stop, or change, the other's job."""
    before = job.launchers.get(node)
    return before is not None and report.launcher < before.incarnation


def _has_room(turn: Turn, node: str, name: str) -> bool:
    """Whether the node may offer itself to the job as well. Makes room where that takes nothing from anybody: jobs that
    never formed, and whose launchers have all left, keep nothing."""
    state, most = turn.state, turn.policy.jobs_per_node
    live = state.live_nodes[node]
    if name in live.open or len(live.open) < most:
        return True
    jobs = [state.jobs[other] for other in live.open]
    void = [] if state.store_away else [job for job in jobs if not job.launchers and not job.last_number]
    for job in sorted(void, key=lambda job: job.deserted_at)[: len(live.open) + 1 - most]:
        sentence = f"job {job.job} never formed, its launchers have left, and {node} has {most} unfinished jobs: "
        drop_job(turn, job.job, f"{sentence}it is forgotten")
    return len(live.open) < most


def _new_secret(turn: Turn) -> str:
    if len(turn.entropy) < 64:
        raise AssertionError("a job's secret needs 64 hex digits of entropy with the report that begins it")
    return turn.entropy


def _create(turn: Turn, report: LauncherJoined) -> JobRecord:
    job = JobRecord(job=report.job, spec=report.spec, secret=_new_secret(turn), created_at=turn.now, since=turn.now)
    job.sentence = "waits for its launchers"
    if report.generation:
        job.last_number = own_numbers(turn.state, report.generation)
    turn.state.jobs[job.job] = job
    turn.state.live_jobs[job.job] = JobLive()
    turn.audit("job.created", f"job {job.job} asked for by its first launcher", job=job.job)
    turn.job_changed(job.job)
    return job


def _start_over(turn: Turn, job: JobRecord, report: LauncherJoined) -> None:
    """A launcher younger than the job's end: the same name, run once more. Generation numbers go on; who knew the
    secret of the run before knows nothing of this one."""
    job.secret = _new_secret(turn)
    job.spec, job.state, job.since, job.created_at = report.spec, JobState.FORMING, turn.now, turn.now
    job.sentence, job.trace = "waits for its launchers, to run once more", turn.trace
    job.generation, job.leaving, job.launchers, job.resumed_at = None, None, {}, None
    job.ceiling, job.retries, job.raised, job.finished, job.last_begun = NOTHING, 0, {}, [], None
    job.losses, job.excluded, job.former, job.slow, job.homes = {}, {}, [], {}, None
    job.ties, job.size, job.gave_at, job.ended_step = [], None, 0.0, 0
    turn.state.live_jobs[job.job] = JobLive(nodes=turn.state.live_jobs[job.job].nodes)
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
    turn.send(node, StopJob(job=report.job, ok=False, reason=reason, launcher=report.launcher))


def _note_launcher(turn: Turn, job: JobRecord, node: str, report: LauncherJoined) -> None:
    before = job.launchers.get(node)
    same_life = before is not None and before.incarnation == report.launcher
    if before is not None and same_life:
        before.store, before.generation = report.store, report.generation
        before.able, before.confirmed, before.why_not = True, True, ""
        before.missing, before.late = [], 0
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
    launcher_came(turn.state, job, node)
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
    """A node became able: that may be what a forming, paused or small job of its launchers waits for.

    Each job is looked at with the next Tick, once for all nodes: a roster takes as long to work out as a job has nodes,
    and a whole job's may come back in the same moment.
    """
    for name in turn.state.live_nodes[node].open:
        live = turn.state.live_jobs[name]
        if live.offered_at is None:
            live.offered_at = turn.now
            turn.wake(turn.now, "job", name)


def offer_released(turn: Turn) -> None:
    """Jobs did without nodes whose eviction was held: those that serve on are spares like others."""
    for node in turn.released:
        record = turn.state.nodes.get(node)
        if record is not None and record.state is NodeState.HEALTHY and not record.overruled:
            offer_to_jobs(turn, node)


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
    seats = len(next_seats(turn.state, job)) if len(job.launchers) >= least else 0
    if seats >= most or (seats >= least and turn.now >= due):
        sentence = f"{seats} of {nodes(most)} asked for have joined"
        regroup(turn, job, Cause(reason=GenerationReason.FORMED, sentence=sentence, trace=turn.trace))
    elif turn.now < due:
        turn.wake(due, "job", job.job)
    elif seats < least:
        consider_taking(turn, job)


# ---- priorities
# Jobs that compete for nodes: one that cannot run takes nodes of a running one of lower priority that can spare them.
#
# It waits first, takes no more than it needs to run, and takes nothing where that would not be enough. The other job
# leaves the nodes at a boundary, so it loses no step; and it is left alone for a while then. Nothing is ever given back
# by force: both grow from whatever comes free.

LOOK_AGAIN_S = 1.0
"""Least seconds between two looks of a job that waits."""


Asked = tuple[JobRecord, str]
"""A job, and a node of its roster that another one could use."""


class Plan(msgspec.Struct, frozen=True):
    """The roster a job could run with, and by job the nodes of it that others are to give. Both empty: none."""

    seats: tuple[str, ...] = ()
    takings: dict[str, list[str]] = {}


def consider_taking(turn: Turn, job: JobRecord) -> None:
    """A job that is below its minimum takes what it needs, when it has waited long enough."""
    if job.state not in (JobState.FORMING, JobState.PAUSED) or turn.state.store_away:
        return
    since = job.since + (job.spec.join_wait_s if job.state is JobState.FORMING else 0.0)
    due = since + turn.policy.take_after_s
    if turn.now < due:
        turn.wake(due, "job", job.job)
        return
    givers = [other for other in rivals_below(turn.state, job) if _may_give(turn, other)]
    plan = choose_takings(turn.state, job, givers)
    for name, taken in plan.takings.items():
        _take(turn, job, turn.state.jobs[name], taken, plan)
    again = turn.now + max(turn.policy.take_after_s, LOOK_AGAIN_S)
    turn.wake(math.ceil(again / LOOK_AGAIN_S) * LOOK_AGAIN_S, "job", job.job)  # one look a second, however often asked


def rivals_below(state: FleetState, job: JobRecord) -> list[JobRecord]:
    """Running jobs of lower priority on nodes that offer themselves to ``job`` as well; the lowest first."""
    names = dict.fromkeys(name for node in job.launchers for name in _jobs_on(state, node))
    others = [state.jobs[name] for name in names]
    below = [o for o in others if o.state is JobState.RUNNING and o.spec.priority < job.spec.priority]
    return sorted(below, key=lambda other: other.spec.priority)


def _jobs_on(state: FleetState, node: str) -> Iterable[str]:
    live = state.live_nodes.get(node)
    return live.open if live is not None else ()


def _may_give(turn: Turn, job: JobRecord) -> bool:
    """Whether the job can leave nodes in order now, and has not lost one to others lately."""
    if turn.now < job.gave_at + turn.policy.take_after_s:
        return False
    return boundary_step(turn, job, turn.state.live_jobs[job.job]) is not None


def choose_takings(state: FleetState, job: JobRecord, givers: Sequence[JobRecord]) -> Plan:
    """Which nodes of which of ``givers`` the job needs to reach its minimum; nothing where that is not enough.

    ``givers`` are asked in their order; each keeps its own minimum, without the free nodes that the job takes as well.
    Nodes that leave another job at a boundary already are counted on. Where blocks stay within a domain, the one in
    which the next block lacks least comes first; what a giver can spare in one it may not in the next as well, and not
    every order is tried: seldom is there a way that is not found.
    """
    least = least_nodes(job)
    if len(job.launchers) < least:
        return Plan()
    offered = [*able_nodes(state, job), *(node for node in job.launchers if _is_coming(state, job, node))]
    seats = seats_among(state, job, offered, least)
    if len(seats) >= least:
        return Plan()
    theirs, taken = _theirs(state, job, givers), dict[str, JobRecord]()
    while theirs and len(seats) < least:
        begun = _begun(state, job, offered, seats)
        region = max(theirs, key=lambda name: len(begun[name]))
        block = _next_block(state, job, theirs[region], begun[region], seats, taken)
        if not block:
            del theirs[region]
        taken |= block
        offered += block
        seats = seats_among(state, job, offered, least)
    if len(seats) < least:
        return Plan()
    takings: dict[str, list[str]] = {}
    for node in seats:
        if node in taken:
            takings.setdefault(taken[node].job, []).append(node)
    return Plan(tuple(seats), takings)


def _theirs(state: FleetState, job: JobRecord, givers: Sequence[JobRecord]) -> dict[str, deque[Asked]]:
    """What givers have that the job could use, by the domain that its blocks do not leave; their last seats first."""
    found: dict[str, deque[Asked]] = {}
    for giver in givers:
        for node in reversed(seats_of(giver.generation)):
            if not unfit(state, job, node):
                found.setdefault(_region(state, job, node), deque()).append((giver, node))
    return found


def _region(state: FleetState, job: JobRecord, node: str) -> str:
    within = job.spec.block_within
    return domain_of(state.nodes[node].domain, within) if within else ""


def _begun(state: FleetState, job: JobRecord, offered: Sequence[str], seats: Sequence[str]) -> dict[str, list[str]]:
    """By domain, of what is offered what makes no whole block yet."""
    placed, begun = set(seats), defaultdict[str, list[str]](list)
    for node in offered:
        if node not in placed:
            begun[_region(state, job, node)].append(node)
    return begun


def _next_block(
    state: FleetState,
    job: JobRecord,
    asked: deque[Asked],
    begun: Sequence[str],
    seats: Sequence[str],
    taken: Mapping[str, JobRecord],
) -> dict[str, JobRecord]:
    """What makes a whole block of what is ``begun``, of those ``asked``: nodes, and the jobs that can spare them. None
    where there are not so many."""
    found: dict[str, JobRecord] = {}
    while asked and len(begun) + len(found) < job.spec.block_nodes:
        giver, node = asked.popleft()
        gone = [*seats, *begun, *found, node]
        asked_of = {one.job: one for one in (*taken.values(), *found.values(), giver)}
        if all(_can_spare(state, one, gone) for one in asked_of.values()):
            found[node] = giver
    return found if len(begun) + len(found) == job.spec.block_nodes else {}


def _is_coming(state: FleetState, job: JobRecord, node: str) -> bool:
    owner = None if unfit(state, job, node) else owner_of(state, job, node)
    if owner is None or owner.spec.priority >= job.spec.priority or owner.leaving is None:
        return False
    return owner.generation is not None and node not in owner.generation.seated and is_seated(owner, node)


def _can_spare(state: FleetState, giver: JobRecord, taken: Sequence[str]) -> bool:
    return len(next_seats(state, giver, frozenset(taken))) >= least_nodes(giver)


def _take(turn: Turn, job: JobRecord, giver: JobRecord, taken: list[str], plan: Plan) -> None:
    """The giver does without these nodes, and does not fill up with the free ones that the plan counts on."""
    giver.gave_at = turn.now
    sentence = (
        f"job {job.job} (priority {job.spec.priority}) cannot run with less than {nodes(least_nodes(job))} and takes "
        f"{named(taken)} of job {giver.job} (priority {giver.spec.priority}), which can spare that"
    )
    turn.audit("job.takes", sentence, job=job.job)
    cause = Cause(
        reason=GenerationReason.PRIORITY,
        sentence=sentence,
        trace=turn.trace,
        boundary=True,
        without=frozenset(plan.seats),
    )
    regroup(turn, giver, cause)
