"""Decisions about ranks without progress, by the rank for which the others wait."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from everstep.vocabulary import RankActivity
from everstep.wire.v1.training import JobSpec
from everstep_controller.core.jobs.stall_decisions import Decision, Fail, JobStall, RegroupAll, Replace, Wait, decide
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import JobFailures
from everstep_controller.core.state import StalledRank

START = 1000.0
STALLED = StalledRank(
    step=5,
    collectives=9,
    place="train.py:16",
    since=START,
    activity=RankActivity.STILL,
    activity_since=START,
    threshold_s=1.0,
)


def still(**fields: Any) -> StalledRank:
    return msgspec.structs.replace(STALLED, **fields)


def working(**fields: Any) -> StalledRank:
    rank = msgspec.structs.replace(STALLED, activity=RankActivity.WORKING, doing="computes")
    return msgspec.structs.replace(rank, **fields)


def waiting(collectives: int = 10, operation: str = "all_reduce", **fields: Any) -> StalledRank:
    rank = msgspec.structs.replace(
        STALLED,
        activity=RankActivity.COLLECTIVE,
        collectives=collectives,
        operation=operation,
        place="train.py:17",
        waits_for_all=True,
    )
    return msgspec.structs.replace(rank, **fields)


def judge(
    stalled: dict[int, StalledRank],
    after_s: float,
    *,
    moving: dict[int, int] | None = None,
    returned: dict[int, int | None] | None = None,
    failures: JobFailures | None = None,
    **spec: Any,
) -> Decision:
    """Return the decision ``after_s`` seconds after the last progress."""
    moving = moving or {}
    return decide(
        JobStall(
            stalled=stalled,
            moving=set(moving),
            steps={number: rank.step for number, rank in stalled.items()} | moving,
            returned=returned or {},
            now=START + after_s,
            policy=CorePolicy(),
            spec=JobSpec(job="job", nproc_per_node=4, **spec),
            failures=failures or JobFailures(),
        )
    )


def notices(decision: Decision, after_s: float) -> list[str]:
    assert isinstance(decision, Wait), decision
    return [notice.sentence(START + after_s) for notice in decision.notices]


LONE = {0: working(), 1: waiting(), 2: waiting(), 3: waiting()}


@pytest.mark.promise("working-rank-kept")
@pytest.mark.parametrize("after_s", [1.0, 60.0, 600.0, 1799.0])
def test_rank_that_works_alone_is_kept_until_its_limit(after_s: float) -> None:
    assert isinstance(judge(LONE, after_s), Wait)


def test_rank_that_works_past_its_limit_is_replaced() -> None:
    decision = judge(LONE, 1800.0)
    assert isinstance(decision, Replace)
    assert decision.rank == 0
    assert "rank 0 has worked without progress at train.py:16 for 30 min; ranks 1-3 wait" in decision.sentence
    assert isinstance(judge(LONE, 90.0, work_limit_s=90.0), Replace)


@pytest.mark.parametrize(("limit_s", "after_s", "kind"), [(3600.0, 3000.0, Wait), (20.0, 21.0, Replace)])
def test_section_has_its_own_limit(limit_s: float, after_s: float, kind: type[Decision]) -> None:
    ranks = LONE | {0: working(section="validation", limit_s=limit_s, place_since=START)}
    assert isinstance(judge(ranks, after_s), kind)


def test_section_is_named_and_its_call_is_not() -> None:
    ranks = LONE | {0: working(section="validation", doing="", place_since=START)}
    assert notices(judge(ranks, 70.0), 70.0) == [
        'rank 0 works alone in "validation" at train.py:16 for 70 s; ranks 1-3 wait'
    ]


def test_long_call_is_named_after_a_minute_and_kept() -> None:
    ranks = LONE | {0: working(place_since=START + 2.0)}
    assert len(notices(judge(ranks, 61.0), 61.0)) == 1
    (_, sentence) = notices(judge(ranks, 62.0), 62.0)
    assert sentence == (
        "rank 0 has been in one call at train.py:16 for 60 s and computes: it may never end. The rank is replaced "
        "after 30 min without progress (--work-limit-s)"
    )


@pytest.mark.promise("working-rank-kept")
def test_still_rank_is_kept_while_another_rank_works() -> None:
    ranks = {0: working(), 1: still(), 2: waiting(), 3: waiting()}
    assert isinstance(judge(ranks, 600.0), Wait)


BLOCKED = {0: waiting(), 1: waiting(), 2: still(), 3: waiting()}


@pytest.mark.promise("stuck-rank-named")
def test_rank_that_stands_still_is_replaced_after_the_floor() -> None:
    assert notices(judge(BLOCKED, 5.0), 5.0) == [
        "rank 2 stands still at train.py:16 for 5 s; ranks 0-1, 3 wait. After 60 s of that it is replaced "
        "(--hang-threshold-s)"
    ]
    assert isinstance(judge(BLOCKED, 59.9), Wait)
    assert judge(BLOCKED, 60.0) == Replace(2, "rank 2 stands still at train.py:16 for 60 s; ranks 0-1, 3 wait")


def test_floor_counts_from_the_beginning_of_standing_still() -> None:
    ranks = BLOCKED | {2: still(activity_since=START + 300.0)}
    assert isinstance(judge(ranks, 359.0), Wait)
    assert isinstance(judge(ranks, 360.0), Replace)


@pytest.mark.parametrize(
    ("threshold_s", "failures", "spec", "due_s"),
    [
        (200.0, JobFailures(), {}, 200.0),
        (2.0, JobFailures(), {"hang_threshold_s": 2.0}, 2.0),
        (0.0, JobFailures(), {"hang_threshold_s": 30.0}, 30.0),  # reported by its agent
        (1.0, JobFailures(longest_pause_s=100.0), {}, 200.0),
        (1.0, JobFailures(hang_kills={"train.py:16": 1}), {}, 120.0),
    ],
)
def test_floor_follows_threshold_and_experience(
    threshold_s: float, failures: JobFailures, spec: dict[str, Any], due_s: float
) -> None:
    ranks = BLOCKED | {2: still(threshold_s=threshold_s)}
    assert isinstance(judge(ranks, due_s - 0.1, failures=failures, **spec), Wait)
    assert isinstance(judge(ranks, due_s, failures=failures, **spec), Replace)


def test_third_hang_at_one_place_is_left_to_a_person() -> None:
    failures = JobFailures(hang_kills={"train.py:16": 2})
    (sentence,) = notices(judge(BLOCKED, 10_000.0, failures=failures), 10_000.0)
    assert "A rank was replaced there 2 times" in sentence
    assert isinstance(judge(BLOCKED | {2: still(place="other.py:1")}, 60.0, failures=failures), Replace)


def test_hangs_without_a_place_are_counted_by_rank() -> None:
    """A rank that holds Python's lock names no line."""
    ranks = BLOCKED | {2: still(place="")}
    once, twice = JobFailures(hang_kills={"rank 2": 1}), JobFailures(hang_kills={"rank 2": 2})
    assert isinstance(judge(ranks, 119.9, failures=once), Wait)
    assert isinstance(judge(ranks, 120.0, failures=once), Replace)
    (sentence,) = notices(judge(ranks, 10_000.0, failures=twice), 10_000.0)
    assert "Rank 2 was replaced for that 2 times" in sentence
    assert isinstance(judge({0: still(place=""), 1: waiting()}, 60.0, failures=twice), Replace)


def test_busy_loop_is_hung_after_the_floor() -> None:
    ranks = BLOCKED | {2: still(activity=RankActivity.BUSY_LOOP)}
    assert isinstance(judge(ranks, 59.0), Wait)
    decision = judge(ranks, 60.0)
    assert isinstance(decision, Replace)
    assert "rank 2 runs a loop in which nothing changes at train.py:16" in decision.sentence
    assert isinstance(judge({0: ranks[2]}, 60.0), Replace)


def test_several_still_ranks_regroup_without_kill() -> None:
    ranks = {0: waiting(), 1: still(), 2: still(), 3: waiting()}
    decision = judge(ranks, 60.0)
    assert isinstance(decision, RegroupAll)
    assert "ranks 1-2 stand still at train.py:16 for 60 s; ranks 0, 3 wait" in decision.sentence


def test_ranks_that_all_stand_still_are_named_and_kept() -> None:
    ranks = {rank: still() for rank in range(4)}
    assert notices(judge(ranks, 60.0), 60.0) == [
        "ranks 0-3 stand still at train.py:16 for 60 s, and no rank waits for another. They restart after 30 min "
        "(--work-limit-s)"
    ]
    assert isinstance(judge(ranks, 1799.0), Wait)
    assert isinstance(judge(ranks, 1800.0), RegroupAll)
    assert isinstance(judge({rank: still(threshold_s=2.0) for rank in range(4)}, 2.0, hang_threshold_s=2.0), RegroupAll)


def test_rank_that_has_not_reported_is_never_replaced() -> None:
    ranks = {rank: waiting() for rank in (0, 1, 3)}
    assert judge(ranks, 10_000.0, moving={2: 5}) == Wait()


def test_still_rank_behind_all_moving_ranks_is_replaced() -> None:
    assert judge({1: still()}, 10.0, moving={0: 8, 2: 9}) == Wait(START + 60.0)
    assert isinstance(judge({1: still()}, 60.0, moving={0: 8, 2: 9}), Replace)
    assert judge({1: still()}, 60.0, moving={0: 5, 2: 9}) == Wait()
    assert judge({1: waiting()}, 60.0, moving={0: 8, 2: 9}) == Wait()


def test_gpu_rank_ahead_of_a_still_one_does_not_protect_it() -> None:
    """The rank computes while it waits for a collective on its GPU."""
    spinning = working(collectives=10, may_wait=True)
    assert isinstance(judge({0: still(), 1: spinning, 2: spinning}, 60.0), Replace)
    assert isinstance(judge({0: working(may_wait=True), 1: spinning, 2: spinning}, 600.0), Wait)
    assert isinstance(judge({0: still(), 1: working(collectives=10)}, 600.0), Wait)


ALL = {rank: waiting() for rank in range(4)}


def test_ranks_in_one_collective_regroup_after_the_floor() -> None:
    assert isinstance(judge(ALL, 59.0), Wait)
    decision = judge(ALL, 60.0)
    assert isinstance(decision, RegroupAll)
    assert decision.step == 5
    assert "ranks 0-3 in all_reduce (number 10 after step 5) at train.py:17" in decision.sentence
    assert "different" not in decision.sentence


def test_collective_whose_data_move_is_awaited() -> None:
    ranks = ALL | {2: waiting(transfers=True)}
    assert isinstance(judge(ranks, 1000.0), Wait)
    assert isinstance(judge(ranks, 1800.0), RegroupAll)


MISMATCH = ALL | {0: waiting(operation="barrier", place="train.py:12")}


def test_different_collectives_at_the_same_step_fail_the_job() -> None:
    again = JobFailures(hung_collective_step=5)
    decision = judge(MISMATCH, 60.0, failures=again)
    assert isinstance(decision, Fail)
    assert "rank 0 in barrier" in decision.sentence
    assert isinstance(judge(MISMATCH, 60.0, failures=JobFailures(hung_collective_step=4)), RegroupAll)
    assert isinstance(judge(ALL, 60.0, failures=again), RegroupAll)


def test_different_subgroup_collectives_never_fail_job() -> None:
    ranks = {number: msgspec.structs.replace(rank, waits_for_all=False) for number, rank in MISMATCH.items()}
    assert isinstance(judge(ranks, 60.0, failures=JobFailures(hung_collective_step=5)), RegroupAll)


def test_rank_behind_in_collective_is_replaced_second_time() -> None:
    ranks = ALL | {2: waiting(collectives=9)}
    assert isinstance(judge(ranks, 60.0), RegroupAll)
    decision = judge(ranks, 60.0, failures=JobFailures(hung_collective_step=5))
    assert isinstance(decision, Replace)
    assert decision.rank == 2


REST = {0: waiting(), 2: waiting(), 3: waiting()}
IN_SUBGROUPS = {0: waiting(), 2: waiting(waits_for_all=False), 3: waiting(12, "recv", waits_for_all=False)}
"""Rank 1 has returned, and the others wait in collectives of some ranks, or for a message."""


@pytest.mark.promise("uneven-steps")
def test_collective_without_a_returned_rank_fails_the_job() -> None:
    assert isinstance(judge(REST, 4.9, returned={1: 9}), Wait)
    decision = judge(REST, 5.0, returned={1: 9})
    assert isinstance(decision, Fail)
    assert decision.sentence.startswith(
        "rank 1 returned from the training function, and ranks 0, 2-3 wait for it in all_reduce at train.py:17 after "
        "step 5. All ranks must run the same steps"
    )


@pytest.mark.parametrize(
    ("ranks", "returned"),
    [
        (REST, {1: 10}),
        (REST, {1: None}),
        (REST | {2: waiting(transfers=True)}, {1: 9}),
        (REST | {2: working()}, {1: 9}),
        (REST | {2: still()}, {1: 9}),
        (IN_SUBGROUPS | {2: waiting(transfers=True)}, {1: 9}),
        (IN_SUBGROUPS | {2: working()}, {1: 9}),
        (IN_SUBGROUPS | {2: still()}, {1: 9}),
        ({0: still()}, {1: 9, 2: 9, 3: 9}),
        ({0: working()}, {1: 9, 2: 9, 3: 9}),
    ],
)
def test_wait_after_a_return_that_may_end_is_left_alone(
    ranks: dict[int, StalledRank], returned: dict[int, int | None]
) -> None:
    for after_s in (6.0, 600.0, 1799.0):
        assert isinstance(judge(ranks, after_s, returned=returned), Wait)
    assert isinstance(judge(ranks, 1800.0, returned=returned), Fail)


@pytest.mark.promise("uneven-steps")
def test_ranks_that_wait_after_a_return_are_named() -> None:
    assert judge(IN_SUBGROUPS, 4.9, returned={1: 9}) == Wait(START + 5.0)
    assert notices(judge(IN_SUBGROUPS, 5.0, returned={1: 9}), 5.0) == [
        "rank 1 has left the training function; ranks 0, 2-3 still wait in all_reduce, recv at train.py:17 after step "
        "5 for 5 s. The job ends after 60 s of that (--hang-threshold-s)"
    ]
    (sentence,) = notices(judge(REST, 5.0, returned={1: 10, 4: 10}), 5.0)
    assert sentence.startswith("ranks 1 and 4 have left the training function; ranks 0, 2-3 still wait in all_reduce")
    assert "after 30 min of that (--work-limit-s)" in sentence


def test_moving_data_after_a_return_is_named_after_a_minute() -> None:
    """Ranks of one group gather what one of them saves, while the ranks of another group have returned."""
    ranks = IN_SUBGROUPS | {2: waiting(transfers=True)}
    assert judge(ranks, 59.0, returned={1: 9}) == Wait(START + 60.0)
    (sentence,) = notices(judge(ranks, 60.0, returned={1: 9}), 60.0)
    assert "ranks 0, 2-3 still wait" in sentence


@pytest.mark.promise("uneven-steps")
def test_ranks_that_all_wait_after_a_return_fail_the_job() -> None:
    assert isinstance(judge(IN_SUBGROUPS, 59.9, returned={1: 9}), Wait)
    decision = judge(IN_SUBGROUPS, 60.0, returned={1: 9})
    assert isinstance(decision, Fail)
    assert decision.sentence.startswith(
        "rank 1 returned from the training function, and ranks 0, 2-3 wait in all_reduce, recv at train.py:17 after "
        "step 5, and none works. All ranks must run the same steps"
    )


@pytest.mark.parametrize(
    ("spec", "failures", "due_s"),
    [
        ({"hang_threshold_s": 20.0}, JobFailures(), 20.0),
        ({"hang_threshold_s": 1.0}, JobFailures(), 5.0),
        ({"work_limit_s": 30.0}, JobFailures(), 30.0),
        ({}, JobFailures(longest_pause_s=100.0), 200.0),
    ],
)
def test_wait_after_a_return_follows_threshold_and_limit(
    spec: dict[str, Any], failures: JobFailures, due_s: float
) -> None:
    assert isinstance(judge(IN_SUBGROUPS, due_s - 0.1, returned={1: 9}, failures=failures, **spec), Wait)
    assert isinstance(judge(IN_SUBGROUPS, due_s, returned={1: 9}, failures=failures, **spec), Fail)


def test_ranks_that_go_on_after_a_return_are_left_alone() -> None:
    """Ranks that wait for each other and finish: a collective ends, and the next one begins another wait."""
    next_wait = IN_SUBGROUPS | {3: waiting(13, waits_for_all=False, since=START + 50.0, activity_since=START + 51.0)}
    assert isinstance(judge(next_wait, 110.0, returned={1: 9}), Wait)
    assert isinstance(judge(next_wait, 111.0, returned={1: 9}), Fail)
    one_moves = {0: waiting(waits_for_all=False), 2: waiting(waits_for_all=False)}
    assert judge(one_moves, 10_000.0, returned={1: 9}, moving={3: 5}) == Wait()
