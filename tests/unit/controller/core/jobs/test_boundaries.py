"""A generation with a boundary is entered after that step, or at once if its ranks cannot reach the boundary."""

from __future__ import annotations

import pytest

from everstep.vocabulary import JobState
from everstep.wire.v1.directives import KillRank, StopJob
from everstep.wire.v1.training import CollectiveFailed
from everstep_controller.core.effects import Send
from everstep_controller.core.events import OperatorAction
from tests.support.fleet.core_fleet import CoreFleet, generations, sent

STAYS = ("n1", "n2", "n4")


def test_restarted_script_leaves_a_drained_node_at_once() -> None:
    """Each of its ranks trains alone, so the job would never reach a boundary."""
    fleet = CoreFleet()
    fleet.start(4, restarts_script=True)
    fleet.progress(1)
    fleet.order(OperatorAction.DRAIN, node="n3")
    assert (fleet.spec().after_step, fleet.spec().seats) == (None, STAYS)


def test_new_member_progress_does_not_cross_boundary() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.progress(5)
    fleet.order(OperatorAction.DRAIN, node="n3")
    spec, running = fleet.spec(), fleet.running()
    (newcomer,) = (member for member in spec.roster if member.node == "n4")
    fleet.progress_of(newcomer.rank, 0, spec=spec)
    assert fleet.job().outgoing_generation == running
    (regrouped,) = generations(fleet.lose_rank(0))
    assert regrouped.number == spec.number + 1


@pytest.mark.promise("newcomers-meet")
def test_new_member_failure_before_boundary_forces_regroup() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.progress(5)
    fleet.order(OperatorAction.DRAIN, node="n3")
    spec = fleet.spec()
    (newcomer,) = (member for member in spec.roster if member.node == "n4")
    report = CollectiveFailed(
        job="job", at=fleet.now, generation=spec.number, rank=newcomer.rank, step=0, detail="broken pipe"
    )
    fleet.report("n4", report)
    (regrouped,) = generations(fleet.advance(1.0, *fleet.state.nodes))
    assert (regrouped.number, regrouped.after_step) == (spec.number + 1, None)
    assert regrouped.seats == spec.seats
    assert "no report names a lost member" in regrouped.sentence


def test_leaving_node_is_no_witness_of_announced_generation() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.progress(5)
    fleet.order(OperatorAction.DRAIN, node="n3")
    spec = fleet.spec()
    rank = fleet.running().ranks_on("n3")[0]
    fleet.report("n3", CollectiveFailed(job="job", at=fleet.now, generation=spec.number, rank=rank, step=0, detail=""))
    assert generations(fleet.advance(1.0, *fleet.state.nodes)) == []


def _training(ranks: int = 4) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(ranks)
    return fleet


@pytest.mark.promise("uneven-steps")
def test_rank_leaving_before_later_steps_fails_the_job() -> None:
    fleet = _training()
    for rank in range(4):
        fleet.progress_of(rank, step=6, started_step=6)
    fleet.finish(1, started_step=6)
    assert fleet.job().status.state is JobState.RUNNING
    for rank in (0, 2, 3):
        fleet.progress_of(rank, step=6, started_step=7)
    effects = fleet.advance(0.3)
    assert fleet.job().status.state is JobState.FAILED
    assert fleet.job().status.sentence.startswith(
        "rank 1 returned from the training function after step 6, but ranks 0, 2 and 3 began step 7. "
    )
    stops = [e.body for e in effects if isinstance(e, Send) and isinstance(e.body, StopJob)]
    assert stops
    assert not any(stop.ok for stop in stops)


def test_stall_after_uneven_end_kills_no_rank() -> None:
    fleet = _training(3)
    fleet.finish(1, started_step=6)
    effects = fleet.stall(0, step=6, started_step=7)
    assert sent(effects, KillRank) == {}
    assert fleet.job().status.state is JobState.FAILED
    assert (
        "rank 1 returned from the training function after step 6, but rank 0 began step 7"
        in fleet.job().status.sentence
    )


@pytest.mark.promise("uneven-steps")
def test_ranks_in_the_last_step_are_awaited() -> None:
    fleet = _training(3)
    fleet.finish(1, started_step=6)
    fleet.progress_of(0, step=5, started_step=6)
    fleet.progress_of(2, step=6, started_step=6)
    for _ in range(20):
        fleet.advance(30.0, "n1", "n2", "n3")
    assert fleet.job().status.state is JobState.RUNNING
    fleet.finish(0, 2, started_step=6)
    assert fleet.job().status.state is JobState.FINISHED


def test_ranks_returning_after_different_steps_fail_the_job() -> None:
    for first, second in ((6, 9), (9, 6)):
        fleet = _training(2)
        fleet.finish(0, started_step=first)
        fleet.finish(1, started_step=second)
        assert fleet.job().status.state is JobState.FAILED
        early, late = (0, 1) if first < second else (1, 0)
        assert (
            f"rank {early} returned from the training function after step 6, but rank {late}"
            in fleet.job().status.sentence
        )
