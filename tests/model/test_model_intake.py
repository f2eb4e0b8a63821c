"""The queue before the loop against a dumb one: a list in the order of arrival, gone through anew at each question.

What the list knows: what a node said is never reordered; the next group is the oldest of what is urgent and the oldest
of what is routine, which keeps a share of the places; whoever has no place is refused, the routine first. Nothing is
lost: each stimulus is taken once, or refused once.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from everstep_controller.runtime.intake import ROUTINE_SHARE, Intake, PendingRequest, Urgency
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from everstep.errors import Unavailable
from tests.support.examples import examples

SOURCES = "abc"


@dataclass
class _Said:
    """``due``: its place among those that are urgent, by when it became so; None while it is routine."""

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
        self.list: list[_Said] = []
        self.ended: list[int] = []
        self.taken: list[tuple[str, int]] = []

    # --- what happens ----------------------------------------------------------------------------------------------

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
        urgent = urgency is Urgency.URGENT or any(one.source == source and one.due is not None for one in self.list)
        if urgent:
            self._hurried(source)
        self.list.append(_Said(self.said, source, self._next_turn() if urgent else None))

    @rule(source=st.sampled_from(SOURCES))
    def hurry(self, source: str) -> None:
        self.intake.expedite(source)
        self._hurried(source)

    @rule()
    def take(self) -> None:
        urgent = sorted((one for one in self.list if one.due is not None), key=lambda one: one.due or 0)
        routine = [one for one in self.list if one.due is None]
        kept = min(len(routine), max(self.group // ROUTINE_SHARE, self.group - len(urgent)))
        expected = urgent[: self.group - kept] + routine[:kept]
        found = [waiting.stimulus for waiting in self.intake.take()]
        assert found == [one.number for one in expected]
        self.list = [one for one in self.list if one not in expected]
        self.ended += found
        self.taken += [(one.source, one.number) for one in expected]

    @rule()
    def refuse_all(self) -> None:
        self.intake.refuse_all(Unavailable("over"))
        assert all(self.waiting[one.number].future.done() for one in self.list)
        self.ended += [one.number for one in self.list]
        self.list = []

    # --- the list ---------------------------------------------------------------------------------------------------

    def _next_turn(self) -> int:
        self.turn += 1
        return self.turn

    def _hurried(self, source: str) -> None:
        """All that the source said and that waits is urgent from now on."""
        for one in self.list:
            if one.source == source and one.due is None:
                one.due = self._next_turn()

    def _expect_refused(self, urgency: Urgency) -> int:
        """Who is to be refused when one more comes; 0: nobody."""
        if len(self.list) < self.limit:
            return 0
        routine = [one.number for one in self.list if one.due is None]
        return routine[0] if routine and urgency is Urgency.URGENT else self.said

    def _end_refused(self, number: int) -> None:
        if number:
            assert isinstance(self.waiting[number].future.exception(), Unavailable)
            self.ended.append(number)
            self.list = [one for one in self.list if one.number != number]

    # --- what holds always ------------------------------------------------------------------------------------------

    @invariant()
    def as_many_wait_as_in_the_list(self) -> None:
        assert len(self.intake) == len(self.list) <= self.limit
        assert (self.intake.next_due_in_s() is None) == (not self.list)

    @invariant()
    def what_a_node_said_is_taken_in_the_order_in_which_it_was_said(self) -> None:
        for source in SOURCES:
            numbers = [number for other, number in self.taken if other == source]
            assert numbers == sorted(numbers)

    def teardown(self) -> None:
        if not hasattr(self, "intake"):
            return
        while self.list:
            self.take()
        assert sorted(self.ended) == list(range(1, self.said + 1)), "each is taken or refused once"
        self.loop.close()


@pytest.mark.promise("report-order")
def test_intake_matches_list_model() -> None:
    run_state_machine_as_test(Queues, settings=settings(max_examples=examples(40), stateful_step_count=40))
