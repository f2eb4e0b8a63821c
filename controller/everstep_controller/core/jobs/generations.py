"""From one generation to the next: at once, or at a boundary; or a pause, when too few are left."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import msgspec

from everstep.clock import Backoff
from everstep.vocabulary import GenerationReason, JobState, NodeState
from everstep.wire.v1.training import GenerationSpec, Holder
from everstep_controller.core.checkpoints import commits
from everstep_controller.core.checkpoints.parity import reconsider_protection
from everstep_controller.core.checkpoints.placement import Site, place_replicas
from everstep_controller.core.checkpoints.storage import reconsider_spill
from everstep_controller.core.effects import PutGeneration
from everstep_controller.core.health.outbreaks import standing_against
from everstep_controller.core.jobs.job_index import roster_changed
from everstep_controller.core.jobs.membership import (
    describe_change,
    least_nodes,
    most_nodes,
    moves,
    next_seats,
    seats_of,
    store_node,
)
from everstep_controller.core.jobs.notifications import send_generation, send_kill
from everstep_controller.core.records import JobRecord, NodeRecord
from everstep_controller.core.state import FleetState, JobLive
from everstep_controller.core.transition import Turn
from everstep_controller.core.wording import named, nodes

BOUNDARY_UNSEEN_S = 1.5
"""Steps since the newest known one are counted for so long: a heartbeat with news of them comes each second."""
FORMER_NODES = 64
"""How many nodes of earlier rosters are remembered as holders of slots."""
CAUSE_CHARS = 3000
"""Of a cause's sentence, so that a generation's own, which may say 4096, says what it does as well."""
EPOCH_SPAN = 1_000_000
"""Generation numbers that belong to one life of a controller alone: those above ``epoch * EPOCH_SPAN``."""


def own_numbers(state: FleetState, known: int) -> int:
    """The number after which this controller may count on without looking into the database.

    Where the records are not the last word (they cannot be written, or ranks are ahead of them), another controller may
    give numbers too. ``epoch`` is this one's alone, so above its block no two give the same. Never below ``known``.
    """
    return max(known, state.epoch * EPOCH_SPAN)


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """Why a job regroups.

    ``boundary``: nothing is broken yet, so the running generation may end in order. ``without``: nodes to leave out
    this time, although nothing stands against them.
    """

    reason: GenerationReason
    sentence: str
    trace: str
    boundary: bool = False
    without: frozenset[str] = frozenset()


def regroup(turn: Turn, job: JobRecord, cause: Cause) -> None:
    """Opens the job's next generation with whoever is able, or pauses it where these are too few."""
    live = turn.state.live_jobs[job.job]
    commits.doubt_open_votes(turn, job)
    seats = _seats(turn, job, cause)
    if len(seats) < least_nodes(job):
        _pause(turn, job, cause, seats)
        return
    boundary = boundary_step(turn, job, live) if cause.boundary else None
    reconsider_spill(turn, job)
    reconsider_protection(turn, job)
    spec = _spec(turn, job, cause, seats, boundary)
    before = seats_of(job.generation)
    job.former = [n for n in dict.fromkeys([*before, *job.former]) if n not in spec.seated][:FORMER_NODES]
    job.leaving = job.generation if boundary is not None else None
    _begin(turn, job, live, spec)
    hand_on(turn, job)
    if boundary is not None:
        commits.aim_at(turn, job, boundary)
    turn.emit(PutGeneration(spec, turn.now))
    turn.audit(
        "generation",
        spec.sentence,
        job=job.job,
        generation=spec.number,
        trace=spec.trace,
        data=_facts(spec, before, seats),
    )
    send_generation(turn, job, before)


def _seats(turn: Turn, job: JobRecord, cause: Cause) -> list[str]:
    """Who takes part. Nodes that were to leave at a boundary go even when nobody reaches it, unless they are needed."""
    leaving = seats_of(job.leaving)
    if leaving and job.generation is not None:
        going = frozenset(leaving) - job.generation.seated
        seats = next_seats(turn.state, job, cause.without | going)
        if len(seats) >= least_nodes(job):
            return seats
    return next_roster(turn, job, cause.without)


def hand_on(turn: Turn, job: JobRecord) -> None:
    """What the job computes on, or may come to claim, has changed: others that want its nodes have a look, at once."""
    rivals: set[str] = set()
    for node in {*job.launchers, *job.former, *seats_of(job.generation)}:
        live = turn.state.live_nodes.get(node)
        if live is not None:
            rivals.update(live.open)
    for name in sorted(rivals):
        if name != job.job:
            turn.wake(turn.now, "job", name)


def _facts(spec: GenerationSpec, before: Sequence[str], seats: Sequence[str]) -> dict[str, str]:
    facts = {"reason": str(spec.reason), "nodes": str(len(seats)), "world_size": str(spec.world_size)}
    left, came = moves(before, seats)
    optional = {
        "left": named(left) if left else "",
        "came": named(came) if came else "",
        "after_step": "" if spec.after_step is None else str(spec.after_step),
        "floor": str(spec.restore.floor or ""),
        "ceiling": str(spec.restore.ceiling or ""),
    }
    return facts | {key: value for key, value in optional.items() if value}


def _spec(turn: Turn, job: JobRecord, cause: Cause, seats: list[str], boundary: int | None) -> GenerationSpec:
    state = turn.state
    number = (own_numbers(state, job.last_number) if state.store_away else job.last_number) + 1
    change = describe_change(seats_of(job.generation), seats, most_nodes(job))
    when = "" if boundary is None else f"after step {boundary} "
    records = state.nodes
    leader = store_node(seats, job.generation)
    return GenerationSpec(
        job=job.job,
        number=number,
        reason=cause.reason,
        sentence=f"{cause.sentence[:CAUSE_CHARS]}; {when}generation {number} {change}{in_words(state, job, seats)}",
        trace=cause.trace,
        seats=tuple(seats),
        store=job.launchers[leader].store,
        store_node=leader,
        restore=commits.restore_rule(turn, job),
        holders=tuple(_holder(records[node]) for node in _holders(turn, job, seats)),
        replica_nodes=placed(turn, job, seats),
        secret=job.secret,
        spec=job.spec,
        issued_at=turn.now,
        after_step=boundary,
    )


def _holder(record: NodeRecord) -> Holder:
    return Holder(node=record.node, vault=record.vault, rack=record.domain.rack)


def placed(turn: Turn, job: JobRecord, seats: list[str]) -> dict[str, tuple[str, ...]]:
    """Which nodes copy what each of ``seats`` alone holds."""
    records, live = turn.state.nodes, turn.state.live_jobs[job.job]
    return place_replicas(
        seats,
        {node: Site.of(records[node]) for node in seats},
        job.spec.replicas,
        job.generation.replica_nodes if job.generation is not None else {},
        frozenset(home for home, until in live.passed_over.items() if until > turn.now),
    )


def _holders(turn: Turn, job: JobRecord, seats: list[str]) -> list[str]:
    """Whose vaults may be asked: the roster's, and those of former members that were never caught lying.

    A vault outlives its agent. So one whose node is out of reach is asked as well, as long as it may hold what
    counts: versions of a generation that it was in, from the newest committed one on.
    """
    state, before = turn.state, seats_of(job.generation)
    committed = state.live_jobs[job.job].committed
    is_old = committed is not None and job.generation is not None and committed.generation == job.generation.number
    counts, stay = set(before if is_old else [*before, *job.former]), set(seats)
    former = [
        node
        for node in dict.fromkeys([*before, *job.former])
        if node not in stay
        and not state.nodes[node].condemned
        and (node in counts or (node in state.reachable and state.live_nodes[node].gone_at is None))
    ]
    return seats + former


def _begin(turn: Turn, job: JobRecord, live: JobLive, spec: GenerationSpec) -> None:
    """Makes ``spec`` the job's generation and forgets what was known of the one before."""
    job.generation, job.last_number = spec, spec.number
    job.opened_at, job.resumed_at, job.finished, job.last_begun = turn.now, None, [], None
    if job.state is not JobState.RUNNING:
        job.state, job.since = JobState.RUNNING, turn.now
    roster_changed(turn.state, job)
    job.sentence, job.trace = spec.sentence, spec.trace
    if job.spilling is not None or job.protecting is not None:  # they are repeated in this generation's name
        live.spill_due = live.protect_due = turn.now
        turn.wake(turn.now, "job", job.job)
    live.pace.entered, live.resumed, live.slowest = set(), set(), None
    live.inherited, live.first_steps = False, {}
    live.witnesses, live.stalls, live.pending = set(), {}, None
    live.resume_due, live.gather_due = turn.now + resume_patience_s(turn, live), 0.0
    if job.leaving is None:
        forget_running(live)
    else:
        live.fallback_at = turn.now + _fallback_s(turn, job, spec.after_step or 0)
        live.resume_due += live.fallback_at - turn.now
        turn.wake(live.fallback_at, "job", job.job)
    turn.wake(live.resume_due, "job", job.job)
    turn.job_changed(job.job)


def resume_patience_s(turn: Turn, live: JobLive) -> float:
    """Until a generation is to step: twice as long after each one in a row that did not."""
    waits = Backoff(floor_s=turn.policy.resume_deadline_s, ceiling_s=turn.policy.resume_deadline_max_s)
    return waits.limit_s(live.resume_attempts)


def forget_running(live: JobLive) -> None:
    """Drops progress and open votes: they belong to a generation that is over."""
    live.pace.progress, live.pace.newest_step, live.ballots = {}, None, {}
    live.candidate, live.candidate_due = None, 0.0


def _pause(turn: Turn, job: JobRecord, cause: Cause, seats: list[str]) -> None:
    live = turn.state.live_jobs[job.job]
    if job.state is JobState.PAUSED:
        return
    _end_those_outside(turn, job, cause, seats)
    live.pending, job.leaving = None, None
    live.stalls, live.witnesses = {}, set()
    job.paused_for = cause.sentence
    sentence = _waiting(job, seats)
    job.state, job.since, job.sentence, job.trace = JobState.PAUSED, turn.now, sentence, cause.trace
    roster_changed(turn.state, job)
    turn.job_changed(job.job)
    turn.audit("job.paused", sentence, job=job.job, generation=job.last_number, trace=cause.trace)
    hand_on(turn, job)
    turn.wake(turn.now + turn.policy.take_after_s, "job", job.job)


def _waiting(job: JobRecord, seats: Sequence[str]) -> str:
    """Why the job is paused, who could go on, and how many more it waits for."""
    least = least_nodes(job)
    missing = least - len(seats)
    more = "more of a block come back" if job.spec.block_nodes > 1 else f"{missing} come back"
    until = "one comes back" if missing == 1 else more
    return f"{job.paused_for}; able to go on: {named(seats)}; the job needs {nodes(least)} and is paused until {until}"


def note_waiting(turn: Turn) -> None:
    """Has each paused job looked at again whose nodes changed in this turn: once a second, however many did."""
    changed, jobs = turn.changed()
    names = dict.fromkeys(jobs)
    for node in changed:
        names.update(turn.state.live_nodes[node].jobs)
    for name in names:
        if turn.state.jobs[name].state is JobState.PAUSED:
            turn.wake(math.floor(turn.now) + 1.0, "job", name)


def restate_waiting(turn: Turn, job: JobRecord) -> None:
    """Brings the sentence of a paused job up to date with the nodes that are able now."""
    seats = next_roster(turn, job)
    if len(seats) < least_nodes(job) and (sentence := _waiting(job, seats)) != job.sentence:
        job.sentence = sentence
        turn.job_changed(job.job)


def _end_those_outside(turn: Turn, job: JobRecord, cause: Cause, seats: list[str]) -> None:
    """No generation will tell ranks on a node that had to go to leave the running one: they are killed instead."""
    running, stay = job.leaving or job.generation, set(seats)
    for node in running.seats if running else ():
        if node not in stay and node in turn.state.reachable and running:
            for member in running.on(node):
                send_kill(turn, job, member, running.number, cause.sentence, cause.trace)


# --- boundaries --------------------------------------------------------------------------------------------------


def boundary_step(turn: Turn, job: JobRecord, live: JobLive) -> int | None:
    """After which step the running generation may end in order; None where it cannot run on until then.

    That of the version to be committed next, where that leaves time to tell everybody: each rank keeps it, with its
    copies, so that the step is not lost even where a node dies on its way out.
    """
    if job.state is not JobState.RUNNING or job.resumed_at is None or job.leaving is not None:
        return None
    if live.pending is not None or live.witnesses or job.finished:
        return None
    state = turn.state
    seats = seats_of(job.generation)
    if any(node not in state.reachable or state.live_nodes[node].gone_at is not None for node in seats):
        return None
    stride, margin = turn.stride(job.job), turn.policy.boundary_margin_steps
    if stride.step is None:
        return None
    if stride.step_s <= 0:
        return stride.step + margin
    margin_s = turn.policy.boundary_margin_s
    soonest = stride.step_by(turn.now, BOUNDARY_UNSEEN_S) + max(margin, math.ceil(margin_s / stride.step_s))
    return live.candidate if live.candidate is not None and live.candidate >= soonest else soonest


def _fallback_s(turn: Turn, job: JobRecord, after_step: int) -> float:
    stride = turn.stride(job.job)
    steps = after_step - (stride.step or 0) + turn.policy.boundary_fallback_steps
    return max(turn.policy.boundary_fallback_s, steps * stride.step_s)


def boundary_crossed(turn: Turn, job: JobRecord) -> None:
    """Ranks have left the running generation in order: from now on only the new one speaks."""
    live = turn.state.live_jobs[job.job]
    if job.leaving is None:
        return
    job.leaving = None
    roster_changed(turn.state, job)
    forget_running(live)
    live.witnesses, live.stalls, live.pending = set(), {}, None
    turn.job_changed(job.job)
    hand_on(turn, job)


def heard_beyond_boundary(turn: Turn, job: JobRecord, node: str, rank: int, number: int, step: int) -> None:
    """A rank speaks of ``step`` in generation ``number``: where that is the announced one, the running one was left in
    order. A newcomer enters as soon as it hears of it, and waits there: it tells of others once it has their step."""
    coming = job.generation
    if job.leaving is None or coming is None or coming.number != number or not coming.has(node, rank):
        return
    if node in job.leaving.seated or step >= (coming.after_step or 0):
        boundary_crossed(turn, job)


def check_boundary(turn: Turn, job: JobRecord) -> None:
    """At a deadline: the boundary is behind us, or is given up and the job regroups at once."""
    live = turn.state.live_jobs[job.job]
    spec = job.generation
    if job.leaving is None or spec is None:
        return
    step = turn.stride(job.job).step
    entered = any(spec.node_of(rank) in job.leaving.seated for rank in turn.entered(job.job))
    if entered or (step is not None and step >= (spec.after_step or 0)):
        if entered or turn.now >= live.fallback_at:
            boundary_crossed(turn, job)
    elif turn.now >= live.fallback_at:
        sentence = f"the boundary after step {spec.after_step} was not reached in time"
        regroup(turn, job, Cause(reason=spec.reason, sentence=sentence, trace=spec.trace))


# --- growth ------------------------------------------------------------------------------------------------------


def consider_growth(turn: Turn, job: JobRecord) -> None:
    """A paused job goes on, a small one grows at a boundary, as soon as the nodes and the time are there."""
    state = turn.state
    if job.generation is None or job.state not in (JobState.RUNNING, JobState.PAUSED):
        return
    if job.state is JobState.PAUSED:
        seats = next_seats(state, job)
        if len(seats) >= least_nodes(job) and not _gathers(turn, job, seats):
            sentence = f"enough nodes are able again ({named(seats)})"
            regroup(turn, job, Cause(reason=GenerationReason.GROWTH, sentence=sentence, trace=turn.trace))
        return
    before = seats_of(job.generation)
    if len(before) >= most_nodes(job) or job.resumed_at is None or job.leaving or state.store_away:
        return
    seats = next_seats(state, job)
    stay = set(before) - set(job.slow)  # who was slow, and taken for want of others, leaves when they come
    if len(seats) <= len(before) or not stay <= set(seats):
        return
    due = job.opened_at + turn.policy.growth_interval_s
    if turn.now < due:
        turn.wake(due, "job", job.job)
        return
    if _gathers(turn, job, seats):
        return
    if boundary_step(turn, job, state.live_jobs[job.job]) is not None:
        sentence = f"a spare is ready and the job has {len(before)} of {most_nodes(job)} nodes"
        cause = Cause(reason=GenerationReason.GROWTH, sentence=sentence, trace=turn.trace, boundary=True)
        regroup(turn, job, cause)


def _gathers(turn: Turn, job: JobRecord, seats: Sequence[str]) -> bool:
    """Whether others that come back in the same moment are waited for: each growth costs a regrouping."""
    live = turn.state.live_jobs[job.job]
    if len(seats) >= min(most_nodes(job), len(job.launchers)):
        return False
    if not live.gather_due:
        live.gather_due = turn.now + turn.policy.growth_gather_s
        turn.wake(live.gather_due, "job", job.job)
    return turn.now < live.gather_due


# ---- staying
# Which held nodes keep their seats: what runs there goes on, where a job would fall below its minimum without it.
#
# A hold, and a cordon of somebody else, keep new work away. A regroup is new work; so the job goes on without the node
# where it can, and with it where it would have to pause for want of a node that computes.


def next_roster(turn: Turn, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """``roster_at`` now."""
    return roster_at(turn.state, turn.now, job, without)


def roster_at(state: FleetState, now: float, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """``next_seats``, with nodes that are held in their seats where these are needed; as it is where they do not
    suffice either."""
    seats = next_seats(state, job, without)
    if len(seats) >= least_nodes(job):
        return seats
    staying = [node for node in _running_seats(job) if _may_stay(state, now, node)]
    more = next_seats(state, job, without, staying=staying) if staying else seats
    return more if len(more) >= least_nodes(job) else seats


def _running_seats(job: JobRecord) -> Sequence[str]:
    return job.generation.seats if job.generation is not None and job.state is JobState.RUNNING else ()


def _may_stay(state: FleetState, now: float, node: str) -> bool:
    """Not in maintenance, for which nodes are left; nor with anything that would evict it. On probation it serves, and
    is judged as others are."""
    record = state.nodes[node]
    if record.state is NodeState.PROBATION:
        return True
    if record.state is not NodeState.HELD or record.maintenance_until:
        return False
    return not standing_against(state, record, now)


def in_words(state: FleetState, job: JobRecord, seats: Sequence[str]) -> str:
    """What a generation says of such nodes among its ``seats``; empty without any."""
    held = [node for node in seats if state.nodes[node].state in (NodeState.HELD, NodeState.PROBATION)]
    if not held:
        return ""
    return f"; it keeps {named(held)} all the same, since it needs {nodes(least_nodes(job))}"
