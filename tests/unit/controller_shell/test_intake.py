"""The queue before the loop: what is urgent goes first, what is routine is shed first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from controller.intake import ROUTINE_SHARE, Intake, Urgency, Waiting
from everstep.errors import Unavailable


class Queue:
    """An intake of names, and what it shed."""

    def __init__(self, limit: int) -> None:
        self.shed: list[Urgency] = []
        self.intake: Intake[str] = Intake(limit, self.shed.append)

    def put(self, name: str, urgency: Urgency = Urgency.URGENT) -> Waiting[str]:
        waiting = Waiting(name, asyncio.get_running_loop().create_future())
        self.intake.put(waiting, urgency)
        return waiting

    def take(self, most: int) -> list[str]:
        return [waiting.stimulus for waiting in self.intake.take(most)]


def in_a_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


def test_urgent_stimuli_go_before_routine_ones_and_each_class_in_order() -> None:
    def test() -> None:
        queue = Queue(10)
        queue.put("beat 1", Urgency.ROUTINE)
        queue.put("report 1")
        queue.put("beat 2", Urgency.ROUTINE)
        queue.put("report 2")
        assert queue.take(10) == ["report 1", "report 2", "beat 1", "beat 2"]

    in_a_loop(test)


def test_routine_stimuli_keep_a_share_of_each_transaction() -> None:
    def test() -> None:
        queue = Queue(100)
        for number in range(40):
            queue.put(f"report {number}")
        for number in range(10):
            queue.put(f"beat {number}", Urgency.ROUTINE)
        taken = queue.take(2 * ROUTINE_SHARE)
        assert [name for name in taken if name.startswith("beat")] == ["beat 0", "beat 1"]
        assert len(taken) == 2 * ROUTINE_SHARE

    in_a_loop(test)


def test_a_full_queue_refuses_a_routine_stimulus_and_says_when_to_come_again() -> None:
    def test() -> None:
        queue = Queue(1)
        queue.put("report")
        with pytest.raises(Unavailable) as refusal:
            queue.put("beat", Urgency.ROUTINE)
        assert refusal.value.retry_after_s > 0
        assert queue.shed == [Urgency.ROUTINE]
        assert queue.take(5) == ["report"]

    in_a_loop(test)


def test_a_full_queue_sheds_its_oldest_routine_stimulus_for_an_urgent_one() -> None:
    def test() -> None:
        queue = Queue(2)
        oldest = queue.put("beat 1", Urgency.ROUTINE)
        queue.put("beat 2", Urgency.ROUTINE)
        queue.put("report")
        assert isinstance(oldest.done.exception(), Unavailable)
        assert queue.shed == [Urgency.ROUTINE]
        assert queue.take(5) == ["report", "beat 2"]

    in_a_loop(test)


def test_an_urgent_stimulus_is_shed_only_when_nothing_routine_waits() -> None:
    def test() -> None:
        queue = Queue(1)
        queue.put("report 1")
        with pytest.raises(Unavailable):
            queue.put("report 2")
        assert queue.shed == [Urgency.URGENT]

    in_a_loop(test)


def test_the_age_of_the_oldest_is_that_of_either_class() -> None:
    def test() -> None:
        queue = Queue(5)
        assert queue.intake.oldest_s() == 0.0
        queue.put("report").arrived_at -= 5.0
        queue.put("beat", Urgency.ROUTINE).arrived_at -= 60.0
        assert queue.intake.oldest_s() >= 60.0

    in_a_loop(test)


def test_whoever_waits_is_refused_when_the_queue_ends() -> None:
    def test() -> None:
        queue = Queue(5)
        waiting = [queue.put("report"), queue.put("beat", Urgency.ROUTINE)]
        queue.intake.refuse_all(Unavailable("stopping"))
        assert all(isinstance(one.done.exception(), Unavailable) for one in waiting)
        assert len(queue.intake) == 0

    in_a_loop(test)
