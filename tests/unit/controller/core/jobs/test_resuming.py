"""Ranks that do not enter a generation: their replacement, and the consequence for their node."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.errors import Conflict
from everstep.vocabulary import JobState
from everstep.wire.v1.directives import KillRank
from everstep.wire.v1.training import RankLost
from everstep_controller.core.effects import Effect, Send
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.seats.membership import no_seat_reason
from tests.support.fleet.core_fleet import CoreFleet, logged_sentences

DEADLINE_S = 10.0
POLICY = CorePolicy.lab_preset().with_values(
    regroups={"resume_deadline_s": DEADLINE_S}, jobs={"growth_interval_s": 1.0}
)


def _fleet(nodes: int = 4, **spec: Any) -> CoreFleet:
    fleet = CoreFleet(POLICY)
    fleet.start(nodes, **spec)
    return fleet


def _killed(effects: list[Effect]) -> list[tuple[str, int, int]]:
    """Node, local rank and generation of every process that was to be ended."""
    bodies = (
        (effect.node, effect.body)
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.body, KillRank)
    )
    return [(node, body.local_rank, body.generation) for node, body in bodies]


def _miss_a_generation(fleet: CoreFleet, *missing: int) -> list[Effect]:
    """A rank is replaced; all but those ranks enter the generation that follows, and its deadline passes."""
    fleet.lose_rank(0)
    return _miss_this_one(fleet, *missing)


def _miss_this_one(fleet: CoreFleet, *missing: int) -> list[Effect]:
    before, spec = len(fleet.effects), fleet.spec()
    deadline_s = fleet.state.job_runtime["job"].resume.due - fleet.now
    for member in spec.roster:
        if member.rank not in missing:
            fleet.progress_of(member.rank, 5, spec=spec)
    fleet.advance(deadline_s + 1.0, *fleet.state.nodes)
    return fleet.effects[before:]


def _replace(fleet: CoreFleet, node: str, rank: int, generation: int, local_rank: int = 0) -> None:
    """The process that was to be ended has ended, and another has its place."""
    words = RankLost(
        job="job",
        at=fleet.now,
        generation=generation,
        rank=rank,
        local_rank=local_rank,
        signal=9,
        detail="killed on the controller's word",
        has_replacement=True,
    )
    fleet.report(node, words)


def _step(fleet: CoreFleet, step: int) -> None:
    fleet.resume(step=step)
    fleet.advance(2.0, *fleet.state.nodes)
    fleet.progress(step + 2)
    fleet.advance(3.0, *fleet.state.nodes)


@pytest.mark.promise("lost-rank-replaced")
def test_rank_missing_from_generation_is_killed_and_replaced() -> None:
    fleet = _fleet()
    effects = _miss_a_generation(fleet, 3)
    assert _killed(effects) == [("n4", 0, 2)]
    assert fleet.seats() == ["n1", "n2", "n3"]
    assert "rank 3 on it did not enter generation 2 in time" in no_seat_reason(fleet.state, fleet.job(), "n4")
    fleet.resume(step=20)
    _replace(fleet, "n4", 3, 2)
    _step(fleet, 40)
    assert fleet.seats() == ["n1", "n2", "n3", "n4"]


@pytest.mark.promise("lost-rank-replaced")
def test_paused_job_resumes_with_the_replaced_node() -> None:
    fleet = _fleet(min_nodes=4)
    for attempt in range(1, 4):  # however often: it has nothing else to do
        _miss_a_generation(fleet, 3) if attempt == 1 else _miss_this_one(fleet, 3)
        assert fleet.job_state() is JobState.PAUSED
        _replace(fleet, "n4", 3, fleet.spec().number)
        fleet.advance(3.0, *fleet.state.nodes)
        assert (fleet.job_state(), len(fleet.seats())) == (JobState.RUNNING, 4)


def test_node_missing_two_generations_needs_readmission() -> None:
    fleet = _fleet()
    _miss_a_generation(fleet, 3)
    fleet.resume(step=20)
    _replace(fleet, "n4", 3, 2)
    again = fleet.spec().number
    assert fleet.seats() == ["n1", "n2", "n3", "n4"]
    _miss_this_one(fleet, 3)
    assert fleet.seats() == ["n1", "n2", "n3"]
    fleet.resume(step=60)
    _replace(fleet, "n4", 3, again)
    _step(fleet, 80)
    assert fleet.seats() == ["n1", "n2", "n3"]
    fleet.order(OperatorAction.READMIT, node="n4")
    _step(fleet, 100)
    assert fleet.seats() == ["n1", "n2", "n3", "n4"]
    fleet.resume(step=120)
    assert fleet.job().membership.launchers["n4"].late_generations == 0
    with pytest.raises(Conflict, match="n4 is healthy and in service"):
        fleet.order(OperatorAction.READMIT, node="n4")


@pytest.mark.promise("lost-rank-replaced")
def test_missing_ranks_on_every_node_are_restarted_eventually() -> None:
    fleet = _fleet(2, nproc_per_node=2)
    fleet.lose_rank(0)
    number = fleet.spec().number
    for rank in (0, 2):
        fleet.progress_of(rank, 5)
    effects = fleet.advance(2.0 * DEADLINE_S, "n1", "n2")
    (overdue,) = logged_sentences(effects, "generation.overdue")
    assert "2 of 4 ranks have not entered it, some on every node; still waiting" in overdue
    effects = fleet.advance(8.0 * DEADLINE_S, "n1", "n2")
    assert _killed(effects)[:2] == [("n1", 1, number), ("n2", 1, number)]
    assert fleet.spec().number == number + 1
    assert fleet.seats() == ["n1", "n2"]
    fleet.resume(step=20)
    assert logged_sentences(fleet.effects, "resumed")
