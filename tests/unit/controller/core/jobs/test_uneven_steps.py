"""Ranks that leave the training function while others go on with later steps."""

from __future__ import annotations

import pytest
from everstep_controller.core.effects import Send

from everstep.vocabulary import JobState
from everstep.wire.v1.directives import KillRank, StopJob
from tests.support.core_fleet import CoreFleet, generations, sent


def _training(ranks: int = 4) -> CoreFleet:
    fleet = CoreFleet()
    fleet.start(ranks)
    return fleet


@pytest.mark.promise("uneven-steps")
def test_rank_leaving_before_later_steps_fails_the_job() -> None:
    fleet = _training()
    for rank in range(4):
        fleet.progress_of(rank, step=6, begun=6)
    fleet.finish(1, begun=6)
    assert fleet.job().status.state is JobState.RUNNING
    for rank in (0, 2, 3):
        fleet.progress_of(rank, step=6, begun=7)
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
    fleet.finish(1, begun=6)
    effects = fleet.stall(0, step=6, begun=7)
    assert sent(effects, KillRank) == {}
    assert fleet.job().status.state is JobState.FAILED
    assert (
        "rank 1 returned from the training function after step 6, but rank 0 began step 7"
        in fleet.job().status.sentence
    )


@pytest.mark.promise("uneven-steps")
def test_ranks_in_the_last_step_are_awaited() -> None:
    fleet = _training(3)
    fleet.finish(1, begun=6)
    fleet.progress_of(0, step=5, begun=6)
    fleet.progress_of(2, step=6, begun=6)
    for _ in range(20):
        fleet.advance(30.0, "n1", "n2", "n3")
    assert fleet.job().status.state is JobState.RUNNING
    fleet.finish(0, 2, begun=6)
    assert fleet.job().status.state is JobState.FINISHED


def test_ranks_returning_after_different_steps_fail_the_job() -> None:
    for first, second in ((6, 9), (9, 6)):
        fleet = _training(2)
        fleet.finish(0, begun=first)
        fleet.finish(1, begun=second)
        assert fleet.job().status.state is JobState.FAILED
        early, late = (0, 1) if first < second else (1, 0)
        assert (
            f"rank {early} returned from the training function after step 6, but rank {late}"
            in fleet.job().status.sentence
        )


def test_last_step_of_an_earlier_generation_is_forgotten() -> None:
    fleet = _training(3)
    fleet.finish(1, begun=6)
    assert generations(fleet.lose_rank(0))
    for rank in range(3):
        fleet.progress_of(rank, step=6, begun=7)
    fleet.advance(0.3)
    fleet.finish(begun=9)
    assert fleet.job().status.state is JobState.FINISHED
