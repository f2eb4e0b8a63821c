"""Ranks that are lost, that hang, that flap."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.effects import Audit, Send
from everstep_controller.core.events import OperatorAction
from everstep_controller.core.jobs.hangs import find_stuck_rank
from everstep_controller.core.policy import CorePolicy

from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.directives import KillRank, NewGeneration, StopJob
from tests.support.core_fleet import CoreFleet, generations, sent


@pytest.mark.promise("stuck-rank-named")
def test_stuck_rank_is_the_one_behind_all_others() -> None:
    assert find_stuck_rank({0: (5, 10), 1: (5, 9), 2: (5, 10)}, [], {}) == 1
    assert find_stuck_rank({0: (5, 10), 1: (4, 99)}, [], {}) == 1


def test_stuck_rank_is_the_silent_one_when_others_are_equal() -> None:
    assert find_stuck_rank({0: (5, 10), 1: (5, 10)}, [2], {2: 5}) == 2


def test_stuck_rank_is_the_silent_one_furthest_behind() -> None:
    assert find_stuck_rank({0: (5, 10)}, [1, 2], {1: 4, 2: 5}) == 1


@pytest.mark.promise("stuck-rank-named")
def test_stuck_rank_stays_unnamed_when_ambiguous() -> None:
    assert find_stuck_rank({0: (5, 10), 1: (5, 10)}, [], {}) is None
    assert find_stuck_rank({0: (5, 10), 1: (5, 10)}, [2, 3], {2: 5, 3: 5}) is None
    assert find_stuck_rank({0: (5, 9), 1: (5, 9), 2: (5, 10)}, [], {}) is None


def test_stuck_rank_is_the_only_one_reporting_a_stall() -> None:
    assert find_stuck_rank({0: (5, 10)}, [1, 2], {1: 9, 2: 9}) == 0
    assert find_stuck_rank({0: (5, 10)}, [], {}) == 0


def test_unresponsive_rank_is_killed_before_next_generation() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    effects = fleet.unresponsive(1)
    to_it = [type(e.body) for e in effects if isinstance(e, Send) and e.node == "n2"]
    assert to_it == [KillRank, NewGeneration]
    assert sent(effects, KillRank)["n2"].generation == 1
    assert fleet.spec().reason is GenerationReason.RANK_HUNG


def test_second_unresponsive_rank_is_killed_without_regroup() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.unresponsive(1)
    effects = fleet.unresponsive(2, generation=1)
    assert generations(effects) == []
    assert sent(effects, KillRank)["n3"].generation == 1


def test_equal_stall_of_all_ranks_regroups_without_kill() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.stall(0)
    effects = fleet.stall(1)
    assert sent(effects, KillRank) == {}
    assert fleet.spec().number == 2


@pytest.mark.promise("long-steps")
def test_stall_after_a_rank_returned_kills_no_rank() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1, 2)
    assert sent(fleet.stall(0, step=9), KillRank) == {}
    assert sent(fleet.advance(0.6), KillRank) == {}
    assert fleet.spec().number == 1
    fleet.finish(0)
    assert fleet.job().status.state is JobState.FINISHED


def test_long_stall_after_a_rank_returned_fails_the_job() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1)
    fleet.stall(0, step=9)
    fleet.stall(2, step=9)
    fleet.advance(0.6)
    fleet.stall(0, step=9, stalled_s=700.0)
    assert fleet.job().status.state is JobState.FAILED
    assert (
        "rank 1 has returned from the training function. All ranks must run the same steps"
        in fleet.job().status.sentence
    )


def test_stall_replaces_silent_rank_among_unfinished_ranks() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1)
    fleet.stall(0, step=9)
    assert sent(fleet.advance(0.1), KillRank)["n3"].rank == 2


def test_stall_with_lost_node_drops_node_and_kills_no_rank() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.disconnect("n3")
    fleet.stall(0)
    effects = fleet.advance(0.1)
    assert fleet.seats() == ["n1", "n2"]
    assert sent(effects, KillRank) == {}


def test_simultaneous_rank_losses_make_one_generation() -> None:
    fleet = CoreFleet()
    fleet.start(2, nproc_per_node=4)
    fleet.lose_rank(0)
    for rank in (1, 2, 3):
        assert generations(fleet.lose_rank(rank, generation=1)) == []


def test_late_report_of_missing_replacement_counts() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    assert generations(fleet.lose_rank(1, generation=1, replacement=False))[0].number == 3
    assert fleet.seats() == ["n1", "n3"]


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
    """Its agent counts it to the generation that it was last offered, which is the announced one."""
    fleet = _before_a_boundary()
    assert [spec.number for spec in generations(fleet.lose_rank(1, generation=number))] == [3]
    assert fleet.spec().after_step is None
    assert fleet.seats() == ["n3", "n2"]


@pytest.mark.parametrize("number", [1, 2])
def test_rank_unresponsive_before_boundary_is_replaced(number: int) -> None:
    fleet = _before_a_boundary()
    effects = fleet.unresponsive(1, generation=number)
    assert sent(effects, KillRank)["n2"].generation == number
    assert [spec.number for spec in generations(effects)] == [3]


def test_collective_failure_behind_boundary_is_accepted() -> None:
    fleet = _before_a_boundary()
    fleet.fail_collective(1, generation=2)
    assert fleet.job().outgoing_generation is None
    assert [spec.number for spec in generations(fleet.advance(0.2, "n1", "n2", "n3"))] == [3]


def test_finished_rank_cannot_be_lost() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.finish(0)
    assert generations(fleet.lose_rank(0)) == []


def _flapping() -> CoreFleet:
    return CoreFleet(msgspec.structs.replace(CorePolicy.lab_preset(), rank_flap_count=3))


def test_old_rank_losses_are_forgotten() -> None:
    fleet = _flapping()
    fleet.start(2, 1)
    for _ in range(4):
        fleet.lose_rank(0)
        fleet.resume()
        fleet.advance(40.0, "n1", "n2", "n3")
    assert fleet.seats() == ["n1", "n2"]


def test_flapping_node_without_spare_fails_the_job() -> None:
    fleet = _flapping()
    fleet.start(1)
    fleet.lose_rank(0)
    fleet.lose_rank(0)
    effects = fleet.lose_rank(0)
    assert fleet.job_state() is JobState.FAILED
    assert sent(effects, StopJob)["n1"].ok is False


def test_launcher_restart_clears_exclusion() -> None:
    fleet = _flapping()
    fleet.start(2, 1)
    for _ in range(3):
        fleet.lose_rank(0)
    fleet.join("n1")
    assert fleet.job().membership.excluded_nodes == {}


def test_trace_spans_from_witness_to_resumed() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.fail_collective(0)
    trace = f"t{fleet.traces}"
    before = len(fleet.effects)
    fleet.disconnect("n3")
    fleet.resume()
    entries = [e.entry for e in fleet.effects[before:] if isinstance(e, Audit)]
    assert [entry.kind for entry in entries if entry.trace == trace] == ["generation", "resumed"]
    assert fleet.spec().trace == trace


def test_stale_unresponsive_report_kills_no_rank() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    assert sent(fleet.unresponsive(1, generation=1), KillRank)
    fleet.resume()
    assert not sent(fleet.unresponsive(1, generation=1), KillRank)
