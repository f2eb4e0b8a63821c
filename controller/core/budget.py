"""How many nodes may leave the fleet by the controller's own doing: of all, of one rack, of one job, in one window.

The fleet's own budget latches: more convictions than that in a window are a pattern, and a person is to look at it
before anybody else leaves. A rack's and a job's do not: they bound what one coincidence can cost, and further evictions
wait until the window has passed. An operator's evictions need no budget and use none.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from controller.core.membership import jobs_seated_on, seats_of
from controller.core.records import Eviction
from controller.core.state import FleetState
from everstep.vocabulary import JobState

FLEET = "fleet"


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """One budget: of the ``kind`` fleet, rack or job, with its ``name`` (empty: the fleet).

    ``limit`` evictions in a window, ``used`` and ``left`` of them now; ``of`` nodes that its share is taken of.
    ``frees_at``: when its oldest eviction leaves the window; 0.0 with none in it.
    """

    kind: str
    name: str
    limit: int
    used: int
    of: int
    frees_at: float = 0.0

    @property
    def left(self) -> int:
        return max(0, self.limit - self.used)

    @property
    def id(self) -> str:
        return f"{self.kind}:{self.name}" if self.name else self.kind

    def in_words(self) -> str:
        """``the fleet``, ``rack r1``, ``job train``."""
        return f"{self.kind} {self.name}" if self.name else f"the {self.kind}"


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """The budget at one moment. ``breaker``: why nobody is evicted any more, since ``breaker_at``; empty while the
    fleet's budget was not exceeded. ``scopes``: the fleet, and every rack and job that used some of its own."""

    window_s: float
    breaker: str
    breaker_at: float
    scopes: tuple[Scope, ...]


def budget(state: FleetState, now: float) -> Budget:
    """What may still be evicted at ``now``."""
    recent = recent_evictions(state, now)
    racks = dict.fromkeys(eviction.rack for eviction in recent if eviction.rack)
    jobs = dict.fromkeys(name for eviction in recent for name in eviction.jobs)
    return Budget(
        window_s=state.policy.eviction_window_s,
        breaker=state.fleet.breaker,
        breaker_at=state.fleet.breaker_at if state.fleet.breaker else 0.0,
        scopes=(
            fleet_scope(state, now),
            *(rack_scope(state, rack, now) for rack in racks),
            *(job_scope(state, job, now) for job in jobs),
        ),
    )


def budget_left(state: FleetState, now: float) -> int:
    """Evictions that the fleet's budget still allows at ``now``; none while the breaker is latched."""
    return 0 if state.fleet.breaker else fleet_scope(state, now).left


def recent_evictions(state: FleetState, now: float) -> list[Eviction]:
    """The evictions inside the window that ends at ``now``, oldest first."""
    return [eviction for eviction in state.fleet.evicted if eviction.at > now - state.policy.eviction_window_s]


def scopes_of(state: FleetState, node: str, now: float) -> Iterator[Scope]:
    """Every budget but the fleet's that the node's eviction would count against."""
    rack = state.nodes[node].domain.rack
    if rack:
        yield rack_scope(state, rack, now)
    for job in jobs_seated_on(state, node):
        if job.state is JobState.RUNNING:
            yield job_scope(state, job.job, now)


def fleet_scope(state: FleetState, now: float) -> Scope:
    """The budget of all."""
    policy, used = state.policy, recent_evictions(state, now)
    return _scope(state, FLEET, "", policy.eviction_count, policy.eviction_share, len(state.nodes), used)


def rack_scope(state: FleetState, rack: str, now: float) -> Scope:
    """The budget of one rack: its share is of the nodes that are expected to be heard there, or were evicted."""
    policy, tally = state.policy, state.tallies.get(f"rack:{rack}")
    used = [eviction for eviction in recent_evictions(state, now) if eviction.rack == rack]
    of = tally.expected if tally is not None else 0
    return _scope(state, "rack", rack, policy.eviction_rack_count, policy.eviction_rack_share, of, used)


def job_scope(state: FleetState, job: str, now: float) -> Scope:
    """The budget of one job: its share is of the nodes that it has and those that it lost to evictions."""
    policy, record = state.policy, state.jobs.get(job)
    used = [eviction for eviction in recent_evictions(state, now) if job in eviction.jobs]
    of = len(seats_of(record.generation)) + len(used) if record is not None else 0
    return _scope(state, "job", job, policy.eviction_job_count, policy.eviction_job_share, of, used)


def _scope(state: FleetState, kind: str, name: str, count: int, share: float, of: int, used: list[Eviction]) -> Scope:
    """By count and by share, the smaller of both; and always one, or nothing sick could ever leave a small fleet."""
    return Scope(
        kind=kind,
        name=name,
        limit=max(1, min(count, int(share * of))),
        used=len(used),
        of=of,
        frees_at=used[0].at + state.policy.eviction_window_s if used else 0.0,
    )
