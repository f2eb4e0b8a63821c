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
from tests.support.core_fleet import CoreFleet, decisions, generations, sent


@pytest.mark.promise("stuck-rank-named")
def test_the_rank_behind_all_others_is_the_stuck_one() -> None:
    assert find_stuck_rank({0: (5, 10), 1: (5, 9), 2: (5, 10)}, [], {}) == 1
    assert find_stuck_rank({0: (5, 10), 1: (4, 99)}, [], {}) == 1


def test_the_one_that_says_nothing_is_stuck_when_the_others_stand_side_by_side() -> None:
    assert find_stuck_rank({0: (5, 10), 1: (5, 10)}, [2], {2: 5}) == 2


def test_of_several_silent_ones_the_one_clearly_behind_is_named() -> None:
    assert find_stuck_rank({0: (5, 10)}, [1, 2], {1: 4, 2: 5}) == 1


@pytest.mark.promise("stuck-rank-named")
def test_nobody_is_named_by_guessing() -> None:
    assert find_stuck_rank({0: (5, 10), 1: (5, 10)}, [], {}) is None
    assert find_stuck_rank({0: (5, 10), 1: (5, 10)}, [2, 3], {2: 5, 3: 5}) is None
    assert find_stuck_rank({0: (5, 9), 1: (5, 9), 2: (5, 10)}, [], {}) is None


def test_a_single_rank_that_reports_itself_behind_the_others_is_stuck() -> None:
    assert find_stuck_rank({0: (5, 10)}, [1, 2], {1: 9, 2: 9}) == 0
    assert find_stuck_rank({0: (5, 10)}, [], {}) == 0


def test_kill_and_next_generation_come_together_and_the_kill_comes_first() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    effects = fleet.unresponsive(1)
    to_it = [type(e.body) for e in effects if isinstance(e, Send) and e.node == "n2"]
    assert to_it == [KillRank, NewGeneration]
    assert sent(effects, KillRank)["n2"].generation == 1
    assert fleet.spec().reason is GenerationReason.RANK_HUNG


def test_a_second_stopped_rank_is_killed_without_another_generation() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.unresponsive(1)
    effects = fleet.unresponsive(2, generation=1)
    assert generations(effects) == []
    assert sent(effects, KillRank)["n3"].generation == 1


def test_all_ranks_stalled_alike_leave_together_and_nobody_is_killed() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.stall(0)
    effects = fleet.stall(1)
    assert sent(effects, KillRank) == {}
    assert fleet.spec().number == 2


@pytest.mark.promise("long-steps")
def test_who_has_returned_is_not_killed_for_one_that_saves_what_was_trained() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1, 2)
    assert sent(fleet.stall(0, step=9), KillRank) == {}
    assert sent(fleet.advance(0.6), KillRank) == {}
    assert fleet.spec().number == 1
    fleet.finish(0)
    assert fleet.job().state is JobState.FINISHED


def test_who_waits_for_ranks_that_have_returned_is_not_waited_for_without_end() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1)
    fleet.stall(0, step=9)
    fleet.stall(2, step=9)
    fleet.advance(0.6)
    fleet.stall(0, step=9, stalled_s=700.0)
    assert fleet.job().state is JobState.FAILED
    assert (
        "rank 1 has returned from the training function: all ranks have to make the same steps" in fleet.job().sentence
    )


def test_among_ranks_that_have_not_returned_the_one_that_is_waited_for_is_replaced() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.finish(1)
    fleet.stall(0, step=9)
    assert sent(fleet.advance(0.1), KillRank)["n3"].rank == 2


def test_a_silent_node_explains_a_stall_better_than_a_stuck_rank() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.disconnect("n3")
    fleet.stall(0)
    effects = fleet.advance(0.1)
    assert fleet.seats() == ["n1", "n2"]
    assert sent(effects, KillRank) == {}


def test_a_replacement_keeps_every_seat() -> None:
    fleet = CoreFleet()
    fleet.start(4, 1)
    effects = fleet.lose_rank(0)
    assert [spec.number for spec in generations(effects)] == [2]
    assert fleet.seats() == ["n1", "n2", "n3", "n4"]


def test_several_losses_at_once_are_one_generation() -> None:
    fleet = CoreFleet()
    fleet.start(2, nproc_per_node=4)
    fleet.lose_rank(0)
    for rank in (1, 2, 3):
        assert generations(fleet.lose_rank(rank, generation=1)) == []


def test_a_late_word_that_there_is_no_replacement_still_counts() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    assert generations(fleet.lose_rank(1, generation=1, replacement=False))[0].number == 3
    assert fleet.seats() == ["n1", "n3"]


def test_a_loss_during_a_regrouping_is_the_next_generation() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    fleet.lose_rank(1)
    assert fleet.spec().number == 3


def _before_a_boundary() -> CoreFleet:
    """Generation 1 runs; 2, with n3 in place of n1, is announced for a boundary."""
    fleet = CoreFleet()
    fleet.start(2, 1)
    fleet.progress(5)
    fleet.order(OperatorAction.DRAIN, node="n1")
    assert (fleet.running().number, fleet.spec().number) == (1, 2)
    return fleet


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_lost_before_an_announced_boundary_is_replaced_at_once(number: int) -> None:
    """Its agent counts it to the generation that it was last offered, which is the announced one."""
    fleet = _before_a_boundary()
    assert [spec.number for spec in generations(fleet.lose_rank(1, generation=number))] == [3]
    assert fleet.spec().after_step is None
    assert fleet.seats() == ["n3", "n2"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_that_is_silent_before_an_announced_boundary_is_replaced_at_once(number: int) -> None:
    fleet = _before_a_boundary()
    effects = fleet.unresponsive(1, generation=number)
    assert sent(effects, KillRank)["n2"].generation == number
    assert [spec.number for spec in generations(effects)] == [3]


def test_a_rank_that_cannot_join_behind_a_boundary_is_heard_before_any_beat_shows_it_there() -> None:
    fleet = _before_a_boundary()
    fleet.fail_collective(1, generation=2)
    assert fleet.job().outgoing_generation is None
    assert [spec.number for spec in generations(fleet.advance(0.2, "n1", "n2", "n3"))] == [3]


def test_a_rank_that_has_finished_cannot_be_lost() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.finish(0)
    assert generations(fleet.lose_rank(0)) == []


def _flapping() -> CoreFleet:
    return CoreFleet(msgspec.structs.replace(CorePolicy.lab(), rank_flap_count=3))


def test_a_node_that_keeps_losing_ranks_is_left_out() -> None:
    fleet = _flapping()
    fleet.start(2, 1)
    fleet.lose_rank(0)
    fleet.lose_rank(0)
    assert decisions(fleet.lose_rank(0)) == [("n1", "recommend")]
    assert fleet.seats() == ["n3", "n2"]


def test_old_losses_are_forgotten() -> None:
    fleet = _flapping()
    fleet.start(2, 1)
    for _ in range(4):
        fleet.lose_rank(0)
        fleet.resume()
        fleet.advance(40.0, "n1", "n2", "n3")
    assert fleet.seats() == ["n1", "n2"]


def test_flapping_without_another_node_fails_the_job() -> None:
    fleet = _flapping()
    fleet.start(1)
    fleet.lose_rank(0)
    fleet.lose_rank(0)
    effects = fleet.lose_rank(0)
    assert fleet.job_state() is JobState.FAILED
    assert sent(effects, StopJob)["n1"].ok is False


def test_a_launchers_new_life_wipes_the_slate() -> None:
    fleet = _flapping()
    fleet.start(2, 1)
    for _ in range(3):
        fleet.lose_rank(0)
    fleet.join("n1")
    assert fleet.job().excluded_nodes == {}


def test_one_trace_leads_from_the_first_witness_to_the_last_rank_that_steps() -> None:
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


def test_a_job_goes_on_without_a_node_that_flaps_where_it_has_just_as_many_as_it_needs() -> None:
    fleet = _flapping()
    fleet.start(2, min_nodes=1)
    for _ in range(3):
        fleet.lose_rank(0)
    assert (fleet.job_state(), fleet.seats()) == (JobState.RUNNING, ["n2"])


def test_a_late_word_that_a_rank_does_not_tick_ends_none_that_has_entered_the_next_generation() -> None:
    fleet = CoreFleet()
    fleet.start(3)
    fleet.lose_rank(0)
    assert sent(fleet.unresponsive(1, generation=1), KillRank)
    fleet.resume()
    assert not sent(fleet.unresponsive(1, generation=1), KillRank)
