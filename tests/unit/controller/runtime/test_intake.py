"""The queue before the loop: what is urgent goes first, what is routine is shed first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from everstep_controller.runtime.intake import MAX_PAUSE_S, ROUTINE_SHARE, Intake, PendingRequest, Urgency


class Queue:
    """An intake of names, and what it shed."""

    def __init__(self, limit: int, group: int = 10) -> None:
        self.shed: list[Urgency] = []
        self.intake: Intake[str] = Intake(limit, group, self.shed.append)

    def put(self, name: str, urgency: Urgency = Urgency.URGENT, source: str = "") -> PendingRequest[str]:
        waiting = PendingRequest(name, asyncio.get_running_loop().create_future(), source or name, urgency)
        self.intake.put(waiting)
        return waiting

    def take(self, worked_s: float = 0.0) -> list[str]:
        """The next group, of which the transaction took so long."""
        taken = self.intake.take()
        self.intake.pause_routine_after(taken, worked_s)
        return [waiting.stimulus for waiting in taken]


def in_a_loop(test: Callable[[], None]) -> None:
    async def run() -> None:
        test()

    asyncio.run(run())


def test_intake_age_covers_both_classes() -> None:
    def test() -> None:
        queue = Queue(5)
        assert queue.intake.oldest_wait_s() == 0.0
        queue.put("report").arrived_at -= 5.0
        queue.put("beat", Urgency.ROUTINE).arrived_at -= 60.0
        assert queue.intake.oldest_wait_s() >= 60.0

    in_a_loop(test)


def test_intake_defers_routine_after_routine_work() -> None:
    def test() -> None:
        queue = Queue(10)
        queue.put("warning 1", Urgency.ROUTINE)
        assert queue.intake.next_due_in_s() == 0.0
        assert queue.take(worked_s=60.0) == ["warning 1"]
        queue.put("warning 2", Urgency.ROUTINE)
        assert 0.0 < (queue.intake.next_due_in_s() or 0.0) <= MAX_PAUSE_S
        assert queue.take() == []
        assert queue.intake.oldest_wait_s() == 0.0, "a rest is no lag"
        queue.put("report")
        assert queue.intake.next_due_in_s() == 0.0
        assert queue.take(worked_s=60.0) == ["report"]

    in_a_loop(test)


def test_intake_defers_nothing_after_urgent_work() -> None:
    def test() -> None:
        queue = Queue(10)
        queue.put("report")
        queue.take(worked_s=60.0)
        queue.put("warning", Urgency.ROUTINE)
        assert queue.take() == ["warning"]

    in_a_loop(test)


def test_intake_does_not_defer_a_full_routine_group() -> None:
    def test() -> None:
        queue = Queue(100, group=8)
        queue.put("warning", Urgency.ROUTINE)
        queue.take(worked_s=60.0)
        for number in range(9):
            queue.put(f"picture {number}", Urgency.ROUTINE)
        assert queue.intake.next_due_in_s() == 0.0
        assert len(queue.take(worked_s=60.0)) == 8
        assert queue.take() == []

    in_a_loop(test)


def test_intake_keeps_later_routine_behind_urgent_of_same_node() -> None:
    def test() -> None:
        queue = Queue(100, group=ROUTINE_SHARE)
        for number in range(2 * ROUTINE_SHARE):
            queue.put(f"loss {number}", source=f"node {number}")
        last = f"node {2 * ROUTINE_SHARE - 1}"
        queue.put("picture of the last", Urgency.ROUTINE, last)
        queue.put("picture of another", Urgency.ROUTINE, "another")
        taken = [name for _ in range(4) for name in queue.take()]
        assert taken.index("picture of another") < ROUTINE_SHARE
        assert taken[-1] == "picture of the last"
        queue.put("next picture of the last", Urgency.ROUTINE, last)
        queue.take(worked_s=60.0)
        queue.put("its warning", Urgency.ROUTINE, last)
        assert queue.take() == [], "nothing urgent of its node waits any more"

    in_a_loop(test)
