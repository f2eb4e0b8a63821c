"""Lost, hanging and flapping ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from everstep.vocabulary import GenerationReason, JobState, RankActivity
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob
from everstep_controller.core.effects import AppendToEventLog, Effect, Send
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.policy import CorePolicy
from everstep_controller.read_models.fleet_views import job_summary
from tests.support.fleet.core_fleet import CoreFleet, generations, sent

COLLECTIVE: dict[str, Any] = {"activity": RankActivity.COLLECTIVE, "operation": "all_reduce", "waits_for_all": True}
STILL: dict[str, Any] = {
    "activity": RankActivity.STILL,
    "collectives": 9,
    "place": "train.py:16",
    "doing": "does nothing",
}
WORKING = {"activity": RankActivity.WORKING, "collectives": 9, "place": "train.py:16", "doing": "computes"}
NODES = ("n1", "n2", "n3", "n4")


def stalled_events(effects: Sequence[Effect]) -> list[str]:
    return [e.entry.sentence for e in effects if isinstance(e, AppendToEventLog) and e.entry.kind == "rank.stalled"]


def _waiting_for(state: dict[str, Any], nodes: int = 3) -> CoreFleet:
    """Rank 1 is in ``state``, and the others wait for it in a collective."""
    fleet = CoreFleet()
    fleet.start(nodes)
    fleet.stall(1, **state)
    for rank in range(nodes):
        if rank != 1:
            fleet.stall(rank, **COLLECTIVE)
    return fleet


@pytest.mark.promise("working-rank-kept")
def test_rank_that_works_alone_is_named_once_and_kept() -> None:
    fleet = _waiting_for(WORKING)
    effects = [effect for _ in range(300) for effect in fleet.advance(1.0, *NODES[:3])]
    assert stalled_events(effects) == ["rank 1 works alone at train.py:16 for 5 s (computes); ranks 0, 2 wait"]
    assert sent(effects, KillRank) == {}
    assert fleet.spec().number == 1


@pytest.mark.promise("stuck-rank-named")
def test_rank_that_stands_still_is_replaced() -> None:
    fleet = _waiting_for(STILL)
    assert sent(fleet.advance(58.0, *NODES[:3]), KillRank) == {}
    assert sent(fleet.advance(3.0, *NODES[:3]), KillRank)["n2"].rank == 1
    assert fleet.spec().reason is GenerationReason.RANK_HUNG
    assert fleet.job().failures.hang_kills == {"train.py:16": 1}


def test_rank_without_a_place_is_replaced_twice() -> None:
    """A call that never ends holds Python's lock, so no line is known."""
    fleet = CoreFleet()
    fleet.start(3)
    kills = 0
    for _ in range(4):
        for rank, state in {0: COLLECTIVE, 1: STILL | {"place": ""}, 2: COLLECTIVE}.items():
            fleet.stall(rank, **state)
        if not sent(fleet.advance(400.0, *NODES[:3]), KillRank):
            break
        kills += 1
        fleet.resume(step=5)
    assert kills == 2
    assert fleet.job().failures.hang_kills == {"rank 1": 2}


def test_replaced_rank_is_logged_with_its_stacks() -> None:
    fleet = _waiting_for(STILL)
    effects = fleet.advance(61.0, *NODES[:3])
    (hung,) = [e.entry for e in effects if isinstance(e, AppendToEventLog) and e.entry.kind == "rank.hung"]
    assert hung.data["stacks"] == "Thread main: all_reduce"


def test_stall_that_ends_is_forgotten() -> None:
    fleet = _waiting_for(STILL)
    fleet.advance(10.0, *NODES[:3])
    assert job_summary(fleet.state, fleet.job()).stall.startswith("rank 1 stands still at train.py:16; ranks 0, 2 wait")
    for rank in range(3):
        fleet.stall(rank, activity=RankActivity.MOVING, activity_s=30.0 if rank == 1 else 0.0)
    assert sent(fleet.advance(100.0, *NODES[:3]), KillRank) == {}
    assert job_summary(fleet.state, fleet.job()).stall == ""
    assert fleet.job().failures.longest_pause_s == 30.0


def test_stall_ends_with_a_finished_step() -> None:
    fleet = _waiting_for(STILL)
    fleet.progress(6)
    assert sent(fleet.advance(100.0, *NODES[:3]), KillRank) == {}


@pytest.mark.promise("working-rank-kept")
def test_silent_rank_that_works_is_kept() -> None:
    """A long call in C holds Python's lock, so its process sends no messages."""
    fleet = _waiting_for(WORKING)
    assert sent(fleet.unresponsive(1, activity=RankActivity.WORKING), KillRank) == {}
    assert sent(fleet.advance(120.0, *NODES[:3]), KillRank) == {}
    fleet.unresponsive(1, activity=RankActivity.MOVING)
    assert sent(fleet.advance(3000.0, *NODES[:3]), KillRank) == {}


@pytest.mark.parametrize(("activity", "is_killed"), [(RankActivity.STILL, True), (RankActivity.WORKING, False)])
def test_silent_still_rank_outside_generation_is_killed(activity: RankActivity, is_killed: bool) -> None:
    """The rank holds up the others, which wait for it in the new generation."""
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    assert bool(sent(fleet.unresponsive(1, activity=activity), KillRank)) is is_killed


@pytest.mark.promise("uneven-steps")
def test_return_inside_a_step_fails_the_job() -> None:
    """``if bad: break`` before the backward pass: the others wait for its all-reduce."""
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1, started_step=6, collectives=9)
    for rank in (0, 2):
        fleet.stall(rank, started_step=6, **COLLECTIVE)
    fleet.advance(6.0, *NODES[:3])
    assert fleet.job_state() is JobState.FAILED
    assert "rank 1 returned from the training function, and ranks 0, 2 wait for it" in fleet.job().status.sentence


@pytest.mark.promise("uneven-steps")
def test_return_beside_subgroups_is_named_and_fails_later() -> None:
    """Collectives of smaller groups do not tell for which rank the others wait, until all have waited for long."""
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1, started_step=6, collectives=9)
    for rank in (0, 2):
        fleet.stall(rank, started_step=6, **COLLECTIVE | {"waits_for_all": False})
    sentence = "rank 1 has left the training function; ranks 0, 2 still wait in all_reduce after step 5"
    assert stalled_events(fleet.advance(6.0, *NODES[:3]))[0].startswith(f"{sentence} for 5 s.")
    assert job_summary(fleet.state, fleet.job()).stall.startswith(f"{sentence}.")
    assert fleet.job_state() is JobState.RUNNING
    fleet.advance(55.0, *NODES[:3])
    assert fleet.job_state() is JobState.FAILED
    assert "rank 1 returned from the training function, and ranks 0, 2 wait" in fleet.job().status.sentence


def test_different_collectives_fail_the_job_at_the_second_time() -> None:
    fleet = _waiting_for(COLLECTIVE | {"operation": "barrier", "place": "train.py:12"})
    fleet.advance(61.0, *NODES[:3])
    assert (fleet.job_state(), fleet.spec().number) == (JobState.RUNNING, 2)
    fleet.resume(step=6)
    fleet.stall(1, step=5, **COLLECTIVE | {"operation": "barrier"})
    fleet.progress(5)
    for rank in (0, 2):
        fleet.stall(rank, step=5, **COLLECTIVE)
    fleet.stall(1, step=5, **COLLECTIVE | {"operation": "barrier"})
    fleet.advance(61.0, *NODES[:3])
    assert fleet.job_state() is JobState.FAILED
    assert "wait in different collectives after step 5" in fleet.job().status.sentence


def test_unresponsive_rank_is_killed_before_next_generation() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    effects = fleet.unresponsive(1)
    to_it = [type(e.body) for e in effects if isinstance(e, Send) and e.node == "n2"]
    assert to_it == [KillRank, NewGeneration]
    assert sent(effects, KillRank)["n2"].generation == 1
    assert fleet.spec().reason is GenerationReason.RANK_HUNG


@pytest.mark.promise("working-rank-kept")
def test_stall_after_a_rank_returned_kills_no_rank() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1, 2)
    assert sent(fleet.stall(0, step=9, **STILL), KillRank) == {}
    assert sent(fleet.advance(600.0, *NODES[:3]), KillRank) == {}
    assert fleet.spec().number == 1
    fleet.finish(0)
    assert fleet.job().status.state is JobState.FINISHED


def test_stall_past_the_work_limit_after_a_return_fails_the_job() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1, 2)
    fleet.stall(0, step=9, **STILL)
    fleet.advance(1801.0, *NODES[:3])
    assert fleet.job().status.state is JobState.FAILED
    assert "2 other ranks have returned from the training function" in fleet.job().status.sentence


def test_stall_with_lost_node_drops_node_and_kills_no_rank() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.disconnect("n3")
    fleet.stall(0, **COLLECTIVE)
    effects = fleet.advance(0.1)
    assert fleet.seats() == ["n1", "n2"]
    assert sent(effects, KillRank) == {}


def _before_a_boundary() -> CoreFleet:
    """Generation 1 runs; 2, with n3 in place of n1, is announced for a boundary."""
    fleet = CoreFleet()
    fleet.start(2, 1)
    fleet.progress(5)
    fleet.order(OperatorAction.DRAIN, node="n1")
    assert (fleet.running().number, fleet.spec().number) == (1, 2)
    return fleet


@pytest.mark.parametrize("number", [1, 2])
def test_rank_lost_before_announced_boundary_is_replaced(number: int) -> None:
    """The rank's agent reports the newest announced generation."""
    fleet = _before_a_boundary()
    assert [spec.number for spec in generations(fleet.lose_rank(1, generation=number))] == [3]
    assert fleet.spec().after_step is None
    assert fleet.seats() == ["n3", "n2"]


def test_finished_rank_cannot_be_lost() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.finish(0)
    assert generations(fleet.lose_rank(0)) == []


def _flapping() -> CoreFleet:
    return CoreFleet(CorePolicy.lab_preset().with_values(regroups={"rank_flap_count": 3}))


def test_flapping_node_without_spare_fails_the_job() -> None:
    fleet = _flapping()
    fleet.start(1)
    fleet.lose_rank(0)
    fleet.lose_rank(0)
    effects = fleet.lose_rank(0)
    assert fleet.job_state() is JobState.FAILED
    assert sent(effects, StopJob)["n1"].ok is False


def test_hung_ranks_exclude_no_node() -> None:
    """The controller itself ordered their end, and bounds it at each place of the script."""
    fleet = CoreFleet(CorePolicy().with_values(regroups={"rank_flap_count": 3}))
    fleet.start(3)
    for line in range(4):
        for rank, state in {0: COLLECTIVE, 1: STILL | {"place": f"train.py:{line}"}, 2: COLLECTIVE}.items():
            fleet.stall(rank, **state)
        assert sent(fleet.advance(61.0, *NODES[:3]), KillRank)
        fleet.resume(step=5)
    assert fleet.job().membership.excluded_nodes == {}
    assert fleet.seats() == [*NODES[:3]]


def test_stopped_ranks_count_as_losses_of_their_node() -> None:
    """A program on the node stops them; nothing else bounds how often they are replaced."""
    fleet = _flapping()
    fleet.start(2, 1)
    for _ in range(3):
        fleet.unresponsive(0)
        fleet.resume(step=5)
    assert list(fleet.job().membership.excluded_nodes) == ["n1"]


def test_launcher_restart_clears_exclusion() -> None:
    fleet = _flapping()
    fleet.start(2, 1)
    for _ in range(3):
        fleet.lose_rank(0)
    fleet.join("n1")
    assert fleet.job().membership.excluded_nodes == {}


def test_stale_unresponsive_report_kills_no_rank() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    assert sent(fleet.unresponsive(1, generation=1), KillRank)
    fleet.resume()
    assert not sent(fleet.unresponsive(1, generation=1), KillRank)
