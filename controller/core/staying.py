"""Which held nodes keep their seats: what runs there goes on, where a job would fall below its minimum without it.

A hold, and a cordon of somebody else, keep new work away. A regroup is new work; so the job goes on without the node
where it can, and with it where it would have to pause for want of a node that computes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from controller.core.membership import least_nodes, next_seats
from controller.core.records import JobRecord
from controller.core.rulings import standing_against
from controller.core.state import FleetState
from controller.core.turn import Turn
from controller.core.wording import named, nodes
from everstep.vocabulary import JobState, NodeState


def next_roster(turn: Turn, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """``roster_at`` now."""
    return roster_at(turn.state, turn.now, job, without)


def roster_at(state: FleetState, now: float, job: JobRecord, without: Collection[str] = ()) -> list[str]:
    """``next_seats``, with nodes that are held in their seats where these are needed; as it is where they do not
    suffice either."""
    seats = next_seats(state, job, without)
    if len(seats) >= least_nodes(job):
        return seats
    staying = [node for node in _seats(job) if _may_stay(state, now, node)]
    more = next_seats(state, job, without, staying=staying) if staying else seats
    return more if len(more) >= least_nodes(job) else seats


def _seats(job: JobRecord) -> Sequence[str]:
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
