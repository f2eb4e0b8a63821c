"""Who is in the next roster, and where its copies go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controller.core.membership import choose_seats, describe_change, roster_of
from controller.core.placement import place_replicas, shared_domains
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.directives import NewGeneration
from tests.support.core_fleet import CoreFleet, generations, sent

names = st.lists(st.sampled_from([f"n{i}" for i in range(9)]), unique=True)


def test_a_spare_takes_the_lost_nodes_rank_numbers() -> None:
    assert choose_seats(["a", "b", "c"], ["a", "c", "s"], 3) == ["a", "s", "c"]


def test_without_a_spare_the_survivors_keep_their_order() -> None:
    assert choose_seats(["a", "b", "c"], ["c", "a"], 3) == ["a", "c"]


def test_a_smaller_bound_drops_the_last_seats() -> None:
    assert choose_seats(["a", "b", "c"], ["a", "b", "c", "s"], 2) == ["a", "b"]


@given(names, names, st.integers(1, 9))
def test_seats_are_as_many_as_can_be_and_survivors_stay_in_order(before: list[str], able: list[str], most: int) -> None:
    seats = choose_seats(before, able, most)
    assert len(seats) == len(set(seats)) == min(most, len(able))
    survivors = [node for node in seats if node in before]
    assert survivors == [node for node in before if node in survivors]
    if len([node for node in before if node in able]) <= most:
        assert set(survivors) == set(before) & set(able)


@given(names, names)
def test_with_enough_spares_every_survivor_keeps_its_ranks(before: list[str], spares: list[str]) -> None:
    lost = before[::2]
    fresh = [f"s-{name}" for name in spares]
    seats = choose_seats(before, [n for n in before if n not in lost] + fresh, len(before))
    if len(fresh) >= len(lost):
        assert all(seats[i] == node for i, node in enumerate(before) if node not in lost)


def test_ranks_are_consecutive_on_each_node() -> None:
    roster = roster_of(["b", "a"], 2)
    assert [(m.rank, m.node, m.local_rank) for m in roster] == [(0, "b", 0), (1, "b", 1), (2, "a", 0), (3, "a", 1)]


def test_the_change_is_said_in_words() -> None:
    assert describe_change([], ["a", "b"], 2) == "forms with 2 nodes"
    assert describe_change(["a", "b"], ["a", "b"], 2) == "keeps all 2 nodes"
    assert describe_change(["a", "b"], ["a", "c"], 2) == "takes c in place of b"
    assert describe_change(["a", "b", "c"], ["a", "c"], 3) == "goes on with 2 of 3 nodes, without b"
    assert describe_change(["a", "b", "c"], ["a", "d"], 3) == "takes d and goes on with 2 of 3 nodes, without b, c"
    assert describe_change(["a"], ["a", "b"], 2) == "grows to 2 nodes with b"


# --- placement ---------------------------------------------------------------------------------------------------

domain = st.builds(Domain, rack=st.sampled_from(["", "r1", "r2"]), power=st.sampled_from(["", "p1", "p2"]))


def _oracle(index: int, seats: list[str], domains: dict[str, Domain], wanted: int) -> tuple[str, ...]:
    """Slow and plain: each time the best of all by (domains shared with the holders, distance in the ring)."""
    holders = [seats[index]]
    for _ in range(wanted):
        rest = [
            (sum(shared_domains(domains[seats[j]], domains[h]) for h in holders), (j - index) % len(seats), seats[j])
            for j in range(len(seats))
            if seats[j] not in holders
        ]
        if rest:
            holders.append(min(rest)[2])
    return tuple(holders[1:])


@given(st.lists(domain, min_size=1, max_size=9), st.integers(1, 4))
def test_placement_agrees_with_the_dumb_one(domains: list[Domain], replicas: int) -> None:
    named = {f"n{i}": domain for i, domain in enumerate(domains)}
    seats = list(named)
    placed = place_replicas(seats, named, replicas)
    assert placed == {node: _oracle(i, seats, named, replicas - 1) for i, node in enumerate(seats)}


def test_a_copy_crosses_the_rack_where_it_can() -> None:
    racks = {"a": Domain(rack="1"), "b": Domain(rack="1"), "c": Domain(rack="2")}
    assert place_replicas(["a", "b", "c"], racks, 2) == {"a": ("c",), "b": ("c",), "c": ("a",)}


def test_unnamed_domains_are_shared_with_nobody() -> None:
    assert shared_domains(Domain(), Domain()) == 0
    assert shared_domains(Domain(rack="1", power="p"), Domain(rack="1", power="p")) == 2


# --- in the fleet ------------------------------------------------------------------------------------------------


def test_the_store_stays_until_its_node_leaves_and_then_goes_to_the_first_survivor() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    fleet.lose_rank(1, replacement=False)
    assert (fleet.seats(), fleet.spec().store_node) == (["n1", "n4", "n3"], "n1")
    fleet.leave("n1")
    assert (fleet.seats(), fleet.spec().store_node, fleet.spec().store) == (["n4", "n3"], "n4", "n4:8000")


def test_those_who_leave_the_roster_are_told_too() -> None:
    fleet = CoreFleet()
    fleet.start(3, 1)
    effects = fleet.lose_rank(1, replacement=False)
    assert set(sent(effects, NewGeneration)) == {"n1", "n2", "n3", "n4"}
    assert all(body.spec == generations(effects)[0] for body in sent(effects, NewGeneration).values())


def test_vaults_of_former_members_stay_holders_while_they_answer_or_may_hold_what_counts() -> None:
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


def test_a_member_that_is_out_of_reach_stays_a_holder_since_its_vault_outlives_its_agent() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    fleet.seal(4)
    fleet.disconnect("n2")
    fleet.disconnect("n3")
    fleet.fail_collective(0)
    assert fleet.seats() == ["n1", "n4"]
    assert {"n2", "n3"} < {holder.node for holder in fleet.spec().holders}


def test_two_jobs_on_one_node_regroup_each_for_itself() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    fleet.join("n1", "n2", job="other", min_nodes=1, max_nodes=2)
    fleet.resume("other")
    assert [spec.job for spec in generations(fleet.lose_rank(0))] == ["job"]
    fleet.disconnect("n2")
    lost = generations(fleet.advance(1.1, "n1"))
    assert {spec.job for spec in lost} == {"job", "other"}
    assert fleet.seats("other") == ["n1"]
