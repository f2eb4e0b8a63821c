"""Every transition of a node's state: each one in the table happens, and the documentation draws the same ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from everstep.vocabulary import NodeState
from everstep_controller.core.events import OperatorAction, Tick
from everstep_controller.core.health.node_state import TRANSITIONS, set_state
from everstep_controller.core.transition import Transition
from tests.support.fleet.core_fleet import CoreFleet

ROOT = Path(__file__).parents[5]
OTHERS = ("n1", "n2", "n3")
EDGE = re.compile(r"^ +(\w+) --> (\w+): ", re.MULTILINE)

Step = Callable[[CoreFleet], object]


def _fleet() -> CoreFleet:
    """Return a fleet of four healthy nodes without a job; n4 is the one to move."""
    fleet = CoreFleet()
    for node in (*OTHERS, "n4"):
        fleet.register(node)
        fleet.beat(node)
    return fleet


def _order(action: OperatorAction) -> Step:
    return lambda fleet: fleet.order(action, node="n4")


def _disconnect(fleet: CoreFleet) -> None:
    fleet.disconnect("n4")


def _hear(fleet: CoreFleet) -> None:
    fleet.mark_seen("n4")


def _wait(fleet: CoreFleet) -> None:
    fleet.advance(3.0, *OTHERS)


def _fall_silent_before_late_tick(fleet: CoreFleet) -> None:
    for _ in range(8):
        fleet.now += 1.0
        for node in OTHERS:
            fleet.touch(node)
    fleet.feed(Tick(trace=fleet.trace()))


def _pass_probation(fleet: CoreFleet) -> None:
    fleet.finish_probe("n4", ok=True)
    fleet.advance(4.0, *OTHERS, "n4")


EVICT, READMIT, REPAIR = _order(OperatorAction.EVICT), _order(OperatorAction.READMIT), _order(OperatorAction.REPAIR)
HOLD, RELEASE = _order(OperatorAction.HOLD), _order(OperatorAction.RELEASE)

ENTRY: dict[NodeState, tuple[Step, ...]] = {
    NodeState.HEALTHY: (),
    NodeState.SUSPECT: (_disconnect,),
    NodeState.LOST: (_disconnect, _wait),
    NodeState.QUARANTINED: (EVICT,),
    NodeState.PROBATION: (EVICT, READMIT),
    NodeState.HELD: (HOLD,),
    NodeState.REPAIR: (REPAIR,),
}
"""Steps that lead from healthy to each state."""

STEPS: dict[tuple[NodeState, NodeState], tuple[Step, ...]] = {
    (NodeState.HEALTHY, NodeState.SUSPECT): (_disconnect,),
    (NodeState.HEALTHY, NodeState.LOST): (_fall_silent_before_late_tick,),
    (NodeState.SUSPECT, NodeState.HEALTHY): (_hear,),
    (NodeState.SUSPECT, NodeState.LOST): (_wait,),
    (NodeState.LOST, NodeState.PROBATION): (_hear,),
    (NodeState.QUARANTINED, NodeState.PROBATION): (READMIT,),
    (NodeState.QUARANTINED, NodeState.LOST): (_disconnect, _wait, READMIT),
    (NodeState.PROBATION, NodeState.HEALTHY): (_pass_probation,),
    (NodeState.PROBATION, NodeState.LOST): (_disconnect, _wait),
    (NodeState.HELD, NodeState.HEALTHY): (READMIT,),
    (NodeState.HELD, NodeState.SUSPECT): (_disconnect, READMIT),
    (NodeState.HELD, NodeState.PROBATION): (RELEASE,),
    (NodeState.HELD, NodeState.LOST): (_disconnect, _wait, RELEASE),
    (NodeState.REPAIR, NodeState.PROBATION): (READMIT,),
    (NodeState.REPAIR, NodeState.LOST): (_disconnect, _wait, READMIT),
    **{(state, NodeState.QUARANTINED): (EVICT,) for state in NodeState if state is not NodeState.QUARANTINED},
    **{(state, NodeState.REPAIR): (REPAIR,) for state in NodeState if state is not NodeState.REPAIR},
    **{
        (state, NodeState.HELD): (HOLD,)
        for state in (NodeState.HEALTHY, NodeState.SUSPECT, NodeState.LOST, NodeState.PROBATION)
    },
}
"""Steps that lead from the first state to the second."""

EDGES = [(before, after) for before, following in TRANSITIONS.items() for after in following]


@pytest.mark.parametrize(("before", "after"), [edge for edge in EDGES if edge in STEPS])
def test_listed_transition_happens(before: NodeState, after: NodeState) -> None:
    fleet = _fleet()
    for step in ENTRY[before]:
        step(fleet)
    assert fleet.node_state("n4") is before
    for step in STEPS[before, after]:
        step(fleet)
    assert fleet.node_state("n4") is after


def test_every_listed_transition_has_a_test() -> None:
    assert STEPS.keys() | {(NodeState.QUARANTINED, NodeState.HELD), (NodeState.PROBATION, NodeState.SUSPECT)} == set(
        EDGES
    )


def test_unlisted_transition_is_refused() -> None:
    fleet = _fleet()
    EVICT(fleet)
    with pytest.raises(AssertionError, match="quarantined to healthy"):
        set_state(Transition(fleet.state, fleet.now, ""), "n4", NodeState.HEALTHY, "because")


def test_documentation_draws_the_listed_transitions() -> None:
    text = (ROOT / "docs/concepts/node-states.md").read_text().partition("## States")[0]
    assert set(EDGE.findall(text)) == set(EDGES)
