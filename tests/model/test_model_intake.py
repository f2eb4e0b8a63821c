"""Compare the intake queue of the controller's loop with a plain list in the order of arrival.

The list keeps these rules: messages of one node keep their order; the next group holds the oldest urgent and the oldest
routine messages, with a share for the routine ones; a full queue refuses messages, routine ones first. Each message is
taken once or refused once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from everstep.errors import Unavailable
from everstep_controller.runtime.intake import ROUTINE_SHARE, Intake, PendingRequest, Urgency
from tests.support.plugins.example_counts import examples

SOURCES = "abc"


@dataclass
class _Message:
    """A message in the list. ``due``: its place among the urgent ones; None while it is routine."""

    number: int
    source: str
    due: int | None


class Queues(RuleBasedStateMachine):
    @initialize(limit=st.integers(1, 12), group=st.integers(1, 2 * ROUTINE_SHARE))
    def begin(self, limit: int, group: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.limit, self.group = limit, group
        self.shed: list[Urgency] = []
        self.intake: Intake[int] = Intake(limit, group, self.shed.append)
        self.said = self.turn = 0
        self.waiting: dict[int, PendingRequest[int]] = {}
        self.list: list[_Message] = []
        self.ended: list[int] = []
        self.taken: list[tuple[str, int]] = []

    @rule(source=st.sampled_from(SOURCES), urgency=st.sampled_from(Urgency))
    def say(self, source: str, urgency: Urgency) -> None:
        self.said += 1
        refused = self._expect_refused(urgency)
        waiting = PendingRequest(self.said, self.loop.create_future(), source, urgency)
        self.waiting[self.said] = waiting
        try:
            self.intake.put(waiting)
        except Unavailable:
            assert refused == self.said
            self.ended.append(self.said)
            return
        self._end_refused(refused)
        urgent = urgency is Urgency.URGENT or any(m.source == source and m.due is not None for m in self.list)
        if urgent:
            self._hurried(source)
        self.list.append(_Message(self.said, source, self._next_turn() if urgent else None))

    @rule(source=st.sampled_from(SOURCES))
    def hurry(self, source: str) -> None:
        self.intake.expedite(source)
        self._hurried(source)

    @rule()
    def take(self) -> None:
        urgent = sorted((m for m in self.list if m.due is not None), key=lambda m: m.due or 0)
        routine = [message for message in self.list if message.due is None]
        kept = min(len(routine), max(self.group // ROUTINE_SHARE, self.group - len(urgent)))
        expected = urgent[: self.group - kept] + routine[:kept]
        found = [waiting.stimulus for waiting in self.intake.take()]
        assert found == [message.number for message in expected]
        self.list = [message for message in self.list if message not in expected]
        self.ended += found
        self.taken += [(message.source, message.number) for message in expected]

    @rule()
    def refuse_all(self) -> None:
        self.intake.refuse_all(Unavailable("over"))
        assert all(self.waiting[message.number].future.done() for message in self.list)
        self.ended += [message.number for message in self.list]
        self.list = []

    def _next_turn(self) -> int:
        self.turn += 1
        return self.turn

    def _hurried(self, source: str) -> None:
        """Make all waiting messages of the source urgent."""
        for message in self.list:
            if message.source == source and message.due is None:
                message.due = self._next_turn()

    def _expect_refused(self, urgency: Urgency) -> int:
        """Return the number of the message to refuse when another one comes, or 0 for none."""
        if len(self.list) < self.limit:
            return 0
        routine = [message.number for message in self.list if message.due is None]
        return routine[0] if routine and urgency is Urgency.URGENT else self.said

    def _end_refused(self, number: int) -> None:
        if number:
            assert isinstance(self.waiting[number].future.exception(), Unavailable)
            self.ended.append(number)
            self.list = [message for message in self.list if message.number != number]

    @invariant()
    def queue_is_as_long_as_the_list(self) -> None:
        assert len(self.intake) == len(self.list) <= self.limit
        assert (self.intake.next_due_in_s() is None) == (not self.list)

    @invariant()
    def messages_of_a_node_keep_their_order(self) -> None:
        for source in SOURCES:
            numbers = [number for other, number in self.taken if other == source]
            assert numbers == sorted(numbers)

    def teardown(self) -> None:
        if not hasattr(self, "intake"):
            return
        while self.list:
            self.take()
        assert sorted(self.ended) == list(range(1, self.said + 1)), "each message is taken or refused once"
        self.loop.close()


@pytest.mark.promise("report-order")
def test_intake_matches_list_model() -> None:
    run_state_machine_as_test(Queues, settings=settings(max_examples=examples(40), stateful_step_count=40))
