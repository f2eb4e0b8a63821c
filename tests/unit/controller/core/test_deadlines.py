"""Compare the queue of deadlines with a list that is searched: each deadline comes once, the earliest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep_controller.core.engine import next_deadline
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.startup import restore_state
from everstep_controller.core.state import DeadlineKind
from everstep_controller.core.transition import pop_due, push_deadline

Deadline = tuple[float, DeadlineKind, str]
deadlines = st.tuples(
    st.sampled_from([1.0, 2.0, 3.0, 4.0]), st.sampled_from([DeadlineKind.NODE, DeadlineKind.JOB]), st.sampled_from("ab")
)


def _pop(waiting: list[Deadline], now: float) -> tuple[DeadlineKind, str] | None:
    """The earliest that is due; of several the one that was asked for first."""
    due = [deadline for deadline in waiting if deadline[0] <= now]
    if not due:
        return None
    first = min(due, key=lambda deadline: deadline[0])
    waiting.remove(first)
    return first[1:]


@given(st.lists(st.one_of(deadlines, st.sampled_from([1.0, 2.0, 3.5])), max_size=60))
def test_deadlines_are_popped_once_in_order(acts: list[Deadline | float]) -> None:
    state, waiting = restore_state(CorePolicy.lab_preset()), list[Deadline]()
    while pop_due(state, float("inf")):
        pass
    for act in acts:
        if isinstance(act, float):
            assert pop_due(state, act) == _pop(waiting, act)
        else:
            push_deadline(state, *act)
            waiting += [act] if act not in waiting else []
        assert next_deadline(state) == min((due for due, _, _ in waiting), default=None)
