"""Jobs that compete for nodes: one that cannot run takes nodes of a running one of lower priority that can spare them.

It waits first, takes no more than it needs to run, and takes nothing where that would not be enough. The other job
leaves the nodes at a boundary, so it loses no step; and it is left alone for a while then. Nothing is ever given back
by force: both grow from whatever comes free.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from controller.core.blocks import domain_of
from controller.core.generations import Cause, boundary_step, regroup
from controller.core.membership import (
    able_nodes,
    is_seated,
    least_nodes,
    next_seats,
    owner_of,
    seats_among,
    seats_of,
    unfit,
)
from controller.core.records import JobRecord
from controller.core.state import FleetState
from controller.core.turn import Turn
from controller.core.wording import named, nodes
from everstep.vocabulary import GenerationReason, JobState

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
