"""The choice of nodes for the next roster, and its reasons."""

from __future__ import annotations

from everstep_controller.core.seats.membership import describe_change
from tests.support.fleet.core_fleet import CoreFleet


def test_roster_change_is_described() -> None:
    assert describe_change([], ["a", "b"], 2) == "forms with 2 nodes"
    assert describe_change(["a", "b"], ["a", "b"], 2) == "keeps all 2 nodes"
    assert describe_change(["a", "b"], ["a", "c"], 2) == "takes c in place of b"
    assert describe_change(["a", "b", "c"], ["a", "c"], 3) == "goes on with 2 of 3 nodes, without b"
    assert describe_change(["a", "b", "c"], ["a", "d"], 3) == "takes d and goes on with 2 of 3 nodes, without b, c"
    assert describe_change(["a"], ["a", "b"], 2) == "grows to 2 nodes with b"


def test_store_moves_to_first_survivor_when_its_node_leaves() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.lose_rank(1, replacement=False)
    assert (fleet.seats(), fleet.spec().store_node) == (["n1", "n4", "n3"], "n1")
    fleet.leave("n1")
    assert (fleet.seats(), fleet.spec().store_node, fleet.spec().store) == (["n4", "n3"], "n4", "n4:8000")
