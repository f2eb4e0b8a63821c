"""The nodes that a job takes from other jobs, compared with all possible rosters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from everstep.vocabulary import JobState
from everstep.wire.v1.agent import Domain
from everstep_controller.core.jobs.joining import PreemptionPlan, plan_preemption, preemptable_jobs
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.plugins.example_counts import examples

WAITER, GIVERS = "waiter", ("low", "middle")
NODES = [f"n{number}" for number in range(7)]
nodes = st.sets(st.sampled_from(NODES))


@dataclass(frozen=True)
class Shape:
    """Of the job that waits: rosters of ``least`` nodes, in blocks within a rack."""

    least: int
    block: int
    within: bool


@dataclass(frozen=True)
class World:
    rack: dict[str, str]
    shape: Shape
    offered: dict[str, set[str]]
    least: dict[str, int]
    most: dict[str, int]

    def runs(self, roster: Iterable[str]) -> bool:
        """Tell if the waiting job can run on exactly these nodes."""
        per_rack = Counter(self.rack[node] if self.shape.within else "" for node in roster)
        return all(count % self.shape.block == 0 for count in per_rack.values())


@st.composite
def worlds(draw: st.DrawFn) -> World:
    rack = {node: draw(st.sampled_from("ab")) for node in NODES}
    block = draw(st.sampled_from([1, 2, 2]))
    shape = Shape(block * draw(st.integers(1, 3 if block == 1 else 2)), block, block > 1 and draw(st.booleans()))
    cut = draw(st.integers(1, len(NODES)))
    offered = {"low": set(NODES[:cut]), "middle": set(NODES[cut:]), WAITER: draw(nodes.filter(bool))}
    least = {name: draw(st.integers(1, 4)) for name in GIVERS}
    return World(rack, shape, offered, least, {name: least[name] + draw(st.integers(0, 4)) for name in GIVERS})


def _fleet(world: World) -> CoreFleet:
    fleet = CoreFleet()
    for node in NODES:
        fleet.register(node, domain=Domain(rack=world.rack[node]))
        fleet.beat(node)
    for priority, name in enumerate(GIVERS):
        offered = sorted(world.offered[name])
        if len(offered) >= world.least[name]:
            fleet.join(
                *offered,
                job=name,
                min_nodes=world.least[name],
                max_nodes=world.most[name],
                priority=priority,
                join_wait_s=1.0,
            )
    fleet.advance(1.1, *NODES)
    shape = world.shape
    fleet.join(
        *sorted(world.offered[WAITER]),
        job=WAITER,
        min_nodes=shape.least,
        max_nodes=len(NODES) // shape.block * shape.block,
        block_nodes=shape.block,
        block_within="rack" if shape.within else "",
        priority=5,
        join_wait_s=1e6,
    )
    return fleet


def _rosters(world: World, fleet: CoreFleet) -> Iterator[tuple[set[str], set[str]]]:
    """Yield each roster of the waiting job that leaves the other jobs their minimum, with the nodes taken."""
    seated = {name: set(fleet.seats(name)) for name in GIVERS if _runs(fleet, name)}
    computing = set().union(*seated.values())
    for roster in map(set, combinations(sorted(world.offered[WAITER]), world.shape.least)):
        left = {name: (seats | (world.offered[name] - computing)) - roster for name, seats in seated.items()}
        if world.runs(roster) and all(len(left[name]) >= world.least[name] for name in left):
            yield roster, roster & computing


def _all_can_be_spared(world: World, fleet: CoreFleet) -> bool:
    """Tell if no other job needs a node that the waiting job could use, in one domain after the other."""
    seated = {name: set(fleet.seats(name)) for name in GIVERS if _runs(fleet, name)}
    computing = set().union(*seated.values())
    left = {name: (seats | (world.offered[name] - computing)) - world.offered[WAITER] for name, seats in seated.items()}
    return all(len(left[name]) >= world.least[name] for name in left)


def _runs(fleet: CoreFleet, job: str) -> bool:
    return job in fleet.state.jobs and fleet.job_state(job) is JobState.RUNNING


@pytest.mark.promise("job-priorities")
@settings(max_examples=examples(40))
@given(worlds())
def test_preemption_plan_matches_exhaustive_search(world: World) -> None:
    fleet = _fleet(world)
    assume(fleet.job_state(WAITER) is not JobState.RUNNING)
    job = fleet.job(WAITER)
    plan = plan_preemption(fleet.state, job, preemptable_jobs(fleet.state, job))
    possible = list(_rosters(world, fleet))
    if any(not taken for _, taken in possible) or not possible:
        assert plan == PreemptionPlan(), "nothing is taken where that is not needed, or would not be enough"
        return
    if plan == PreemptionPlan():
        surely_found = not world.shape.within or _all_can_be_spared(world, fleet)
        assert not surely_found, "there is a way, and it is not found"
        return
    taken = {node for nodes in plan.nodes_by_job.values() for node in nodes}
    assert (set(plan.seats), taken) in possible
    assert not any(less < taken for _, less in possible), "no more than it needs"
    for name, some in plan.nodes_by_job.items():
        assert set(some) <= set(fleet.seats(name))
