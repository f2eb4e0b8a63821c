"""How many steps apart snapshots are: enough, no more, and the same on all ranks at every step."""

from __future__ import annotations

import logging

import pytest
import torch.distributed as dist
from everstep_trainer.snapshot.pace import (
    MAX_BLOCKED_SHARE,
    MAX_INTERVAL,
    MIN_BLOCKED_S,
    PACE_WINDOW,
    SnapshotPace,
    target_interval,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import examples


class Lockstep:
    """Ranks that take part in every step; each one's copier is behind its training by at most one snapshot.

    ``blocked_s(rank, step)``: for how long that snapshot holds up the training.
    """

    def __init__(self, world: int) -> None:
        store = dist.HashStore()
        self.paces = [SnapshotPace(store, rank, None) for rank in range(world)]
        self.last: list[int | None] = [None] * world

    def step(self, step: int, order: list[int], blocked_s: list[float], copiers: list[bool], step_s: float) -> None:
        """All ranks finish ``step``. ``copiers``: who is done with the snapshot before the next rank goes on."""
        due = [self.rank(rank, step, blocked_s[rank], copiers[rank], step_s) for rank in order]
        assert len(set(due)) == 1, f"ranks differ about step {step}"

    def rank(self, rank: int, step: int, blocked_s: float, copier: bool, step_s: float) -> bool:
        pace = self.paces[rank]
        pace.end_step(step)
        if not pace.is_due(step):
            pace.record_step(step_s, None)
            return False
        self.catch_up(rank)  # the last snapshot is over before the next one begins
        pace.record_step(step_s, blocked_s)
        self.last[rank] = step
        if copier:
            self.catch_up(rank)
        return True

    def catch_up(self, rank: int) -> None:
        last, self.last[rank] = self.last[rank], None
        if last is not None:
            self.paces[rank].agree(last)

    def run(self, first: int, last: int, blocked_s: list[float], step_s: float = 1.0) -> list[int]:
        """Plain steps; which of them were stored."""
        ranks = list(range(len(self.paces)))
        for step in range(first, last):
            self.step(step, ranks, blocked_s, [True] * len(ranks), step_s)
        return [step for step in range(first, last) if self.paces[0].is_due(step)]


@given(st.floats(0, 10, allow_nan=False), st.floats(0, 10, allow_nan=False), st.integers(1, MAX_INTERVAL))
def test_training_is_blocked_for_at_most_its_share(blocked_s: float, step_s: float, now: int) -> None:
    every = target_interval(blocked_s, step_s, now)
    assert 1 <= every <= MAX_INTERVAL
    if blocked_s < MIN_BLOCKED_S:
        assert every == 1
    elif every < MAX_INTERVAL:
        assert blocked_s <= MAX_BLOCKED_SHARE * (blocked_s + every * step_s) * 1.0001
    if every > now:
        assert blocked_s > MAX_BLOCKED_SHARE * (blocked_s + (every - 1) * step_s) * 0.9999, "no more than it takes"


def test_pace_between_two_values_is_stable() -> None:
    blocked_s = (
        0.099 * 2 * 1.1
    )  # of two steps of a second, just under a tenth: one in two is enough, one in three is much
    assert target_interval(blocked_s, 1.0, 1) == 2
    assert target_interval(blocked_s, 1.0, 2) == 2
    assert target_interval(blocked_s, 1.0, 3) == 3
    assert target_interval(blocked_s / 2, 1.0, 3) < 3


def test_pace_follows_the_slowest_rank_and_recovers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ranks = Lockstep(3)
    with caplog.at_level(logging.INFO):
        assert ranks.run(1, 2 * PACE_WINDOW, [0.01, 0.01, 0.3]) == list(range(1, 2 * PACE_WINDOW))
        third = ranks.run(2 * PACE_WINDOW, 4 * PACE_WINDOW, [0.01, 0.01, 0.3])
        assert third == [step for step in range(2 * PACE_WINDOW, 4 * PACE_WINDOW) if step % 3 == 0]
        ranks.run(4 * PACE_WINDOW, 6 * PACE_WINDOW, [0.01, 0.01, 0.01])
        assert ranks.run(6 * PACE_WINDOW, 7 * PACE_WINDOW, [0.01, 0.01, 0.01]) == list(
            range(6 * PACE_WINDOW, 7 * PACE_WINDOW)
        )
    assert [record.getMessage() for record in caplog.records] == [
        f"snapshots block training for over 10 % of the time: taking one every 3 steps from step {2 * PACE_WINDOW}",
        f"taking a snapshot every step again, from step {6 * PACE_WINDOW}",
    ]


def test_pace_fixed_by_the_user_stays() -> None:
    pace = SnapshotPace(dist.HashStore(), 0, 5)
    for step in range(1, 4 * PACE_WINDOW):
        pace.end_step(step)
        pace.record_step(1.0, 1.0)
        pace.agree(step)
    assert [step for step in range(1, 21) if pace.is_due(step)] == [5, 10, 15, 20]


@given(st.data())
@settings(max_examples=examples(20))
def test_ranks_agree_on_the_pace_at_every_step(data: st.DataObject) -> None:
    world = data.draw(st.integers(1, 4))
    first = data.draw(st.integers(0, 3 * PACE_WINDOW))
    ranks = Lockstep(world)
    blocked_s, order, copiers = [0.0] * world, list(range(world)), [False] * world
    for step in range(first + 1, first + 6 * PACE_WINDOW):
        if step % 32 == 0:
            blocked_s = [data.draw(st.sampled_from([0.0, 0.05, 0.2, 0.5, 2.0])) for _ in range(world)]
            order = data.draw(st.permutations(range(world)))
            copiers = [data.draw(st.booleans()) for _ in range(world)]
        ranks.step(step, order, blocked_s, copiers, 1.0)
