"""Who is in the next roster, and who is not, and why."""

from __future__ import annotations

from everstep_controller.core.events import OperatorAction, OperatorCommand
from everstep_controller.core.jobs.membership import choose_seats, describe_change
from hypothesis import given
from hypothesis import strategies as st

from tests.support.core_fleet import CoreFleet

names = st.lists(st.sampled_from([f"n{i}" for i in range(9)]), unique=True)


@given(names, names, st.integers(1, 9))
def test_seats_are_maximal_and_keep_survivor_order(before: list[str], able: list[str], most: int) -> None:
    seats = choose_seats(before, able, most)
    assert len(seats) == len(set(seats)) == min(most, len(able))
    survivors = [node for node in seats if node in before]
    assert survivors == [node for node in before if node in survivors]
    if len([node for node in before if node in able]) <= most:
        assert set(survivors) == set(before) & set(able)


@given(names, names)
def test_survivors_keep_ranks_with_enough_spares(before: list[str], spares: list[str]) -> None:
    lost = before[::2]
    fresh = [f"s-{name}" for name in spares]
    seats = choose_seats(before, [n for n in before if n not in lost] + fresh, len(before))
    if len(fresh) >= len(lost):
        assert all(seats[i] == node for i, node in enumerate(before) if node not in lost)


def test_roster_change_is_described() -> None:
    assert describe_change([], ["a", "b"], 2) == "forms with 2 nodes"
    assert describe_change(["a", "b"], ["a", "b"], 2) == "keeps all 2 nodes"
    assert describe_change(["a", "b"], ["a", "c"], 2) == "takes c in place of b"
    assert describe_change(["a", "b", "c"], ["a", "c"], 3) == "goes on with 2 of 3 nodes, without b"
    assert describe_change(["a", "b", "c"], ["a", "d"], 3) == "takes d and goes on with 2 of 3 nodes, without b, c"
    assert describe_change(["a"], ["a", "b"], 2) == "grows to 2 nodes with b"


def test_roster_description_is_bounded() -> None:
    many, fewer = [f"n{i}" for i in range(1000)], [f"n{i}" for i in range(0, 1000, 2)]
    assert describe_change(many, fewer, 1000) == (
        "goes on with 500 of 1000 nodes, without n1, n3, n5, n7, n9, n11, n13, n15 and 492 more"
    )
    assert describe_change(fewer, many, 1000).endswith("and 492 more")
    fleet = CoreFleet()
    fleet.start(2)
    order = OperatorCommand(action=OperatorAction.DRAIN, node="n2", actor="ada", reason="because " * 1000, trace="t")
    fleet.feed(order)
    assert len(fleet.spec().sentence) < 4096
    assert fleet.spec().sentence.endswith("goes on with 1 of 2 nodes, without n2")


# --- in the fleet ------------------------------------------------------------------------------------------------


def test_store_moves_to_first_survivor_when_its_node_leaves() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.lose_rank(1, replacement=False)
    assert (fleet.seats(), fleet.spec().store_node) == (["n1", "n4", "n3"], "n1")
    fleet.leave("n1")
    assert (fleet.seats(), fleet.spec().store_node, fleet.spec().store) == (["n4", "n3"], "n4", "n4:8000")


def test_former_members_remain_holders_while_needed() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.lose_rank(1, replacement=False)
    assert [holder.node for holder in fleet.spec().holders] == ["n1", "n4", "n3", "n2"]
    fleet.disconnect("n2")
    fleet.lose_rank(0)
    assert [holder.node for holder in fleet.spec().holders] == ["n1", "n4", "n3", "n2"], "nothing is committed since"
    fleet.resume()
    fleet.seal(4)
    fleet.lose_rank(0)
    assert [holder.node for holder in fleet.spec().holders] == ["n1", "n4", "n3"]


def test_unreachable_member_remains_a_holder() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.seal(4)
    fleet.disconnect("n2")
    fleet.disconnect("n3")
    fleet.fail_collective(0)
    assert fleet.seats() == ["n1", "n4"]
    assert {"n2", "n3"} < {holder.node for holder in fleet.spec().holders}


def test_launcher_unknown_to_restarted_agent_gets_no_seat() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.register("n4")
    fleet.lose_rank(2, replacement=False)
    assert fleet.seats() == ["n1", "n2"]
    fleet.resume()
    fleet.join("n4", again=True)
    fleet.advance(3.0, "n1", "n2", "n4")
    assert set(fleet.seats()) == {"n1", "n2", "n4"}
