"""Copies go to nodes that are not likely to be lost together with the one that is copied, and nobody gets too many."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from everstep_controller.core.checkpoints.placement import FailureDomains, place_replicas
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire.v1.agent import Domain
from tests.support.core_fleet import CoreFleet

site = st.builds(
    FailureDomains,
    rack=st.sampled_from(["", "r1", "r2"]),
    switch=st.sampled_from(["", "s1", "s2"]),
    power=st.sampled_from(["", "p1", "p2"]),
    driver=st.sampled_from(["", "d1", "d2"]),
)
rosters = st.lists(site, min_size=1, max_size=7)


def _named(sites: list[FailureDomains]) -> dict[str, FailureDomains]:
    return {f"n{at}": site for at, site in enumerate(sites)}


def _shared(sites: dict[str, FailureDomains], nodes: tuple[str, ...]) -> int:
    return sum(sites[one].count_shared(sites[other]) for one, other in combinations(nodes, 2))


def _least_shared(sites: dict[str, FailureDomains], node: str, copies: int) -> int:
    """Slow and plain: the best of all choices of nodes."""
    others = [other for other in sites if other != node]
    return min(_shared(sites, (node, *chosen)) for chosen in combinations(others, min(copies, len(others))))


def _fleet_of(racks: int, per_rack: int) -> dict[str, FailureDomains]:
    """Racks of a switch each, two racks on a power unit."""
    return {
        f"n{rack}-{at}": FailureDomains(rack=f"r{rack}", switch=f"s{rack}", power=f"p{rack // 2}", driver="d1")
        for rack in range(racks)
        for at in range(per_rack)
    }


# --- apart -------------------------------------------------------------------------------------------------------


@pytest.mark.promise("copies-across-domains")
@given(rosters)
def test_first_replica_shares_the_fewest_domains(sites: list[FailureDomains]) -> None:
    named = _named(sites)
    placed = place_replicas(list(named), named, 2)
    for node, copies in placed.items():
        if len(named) > 1:
            assert _shared(named, (node, *copies)) == _least_shared(named, node, 1)


@given(rosters, st.integers(3, 4))
def test_further_replicas_share_no_more_than_greedy_choice(sites: list[FailureDomains], replicas: int) -> None:
    named = _named(sites)
    for node, copies in place_replicas(list(named), named, replicas).items():
        assert _shared(named, (node, *copies)) <= _greedy(named, node, replicas - 1)


def _greedy(sites: dict[str, FailureDomains], node: str, copies: int) -> int:
    """The most that choosing the nearest to nothing, one after the other, may share, whichever of equals is taken."""
    worst, open_choices = 0, [(node,)]
    for _ in range(min(copies, len(sites) - 1)):
        longer = []
        for chosen in open_choices:
            costs = {
                other: sum(sites[other].count_shared(sites[one]) for one in chosen)
                for other in sites
                if other not in chosen
            }
            longer += [(*chosen, other) for other, cost in costs.items() if cost == min(costs.values())]
        open_choices = longer[:200]
    return max((_shared(sites, chosen) for chosen in open_choices), default=worst)


@given(rosters, st.integers(1, 5))
def test_node_gets_requested_number_of_replicas(sites: list[FailureDomains], replicas: int) -> None:
    named = _named(sites)
    placed = place_replicas(list(named), named, replicas)
    assert list(placed) == list(named)
    for node, copies in placed.items():
        assert len(set(copies)) == len(copies) == min(replicas, len(named)) - 1
        assert node not in copies


def test_replicas_cross_driver_versions() -> None:
    racks = _fleet_of(racks=8, per_rack=4)
    drivers = {"n0": "d1", "n1": "d1", "n2": "d1", "n3": "d1"}
    sites = {
        node: FailureDomains(site.power, site.switch, site.rack, drivers.get(node.split("-")[0], "d2"))
        for node, site in racks.items()
    }
    placed = place_replicas(list(sites), sites, 2)
    assert not any(sites[node].has_same_driver(sites[copy]) for node, (copy,) in placed.items())


def test_unnamed_domains_count_as_distinct() -> None:
    assert FailureDomains().count_shared(FailureDomains()) == 0
    assert not FailureDomains().has_same_driver(FailureDomains())
    assert FailureDomains(rack="1", power="p").count_shared(FailureDomains(rack="1", power="p")) == 2


# --- few sets, even load -----------------------------------------------------------------------------------------


@given(st.integers(2, 40), st.integers(2, 4))
def test_nodes_replicate_within_small_groups(count: int, replicas: int) -> None:
    nodes = {f"n{at}": FailureDomains(rack=f"r{at}") for at in range(count)}
    placed = place_replicas(list(nodes), nodes, replicas)
    sets = {frozenset((node, *copies)) for node, copies in placed.items()}
    assert len(sets) <= max(1, count // replicas) + count % replicas * replicas
    assert set(Counter(copy for copies in placed.values() for copy in copies).values()) == {min(replicas, count) - 1}


# --- after a change ----------------------------------------------------------------------------------------------


@given(st.integers(0, 31), st.integers(0, 7))
def test_replacing_one_node_moves_few_replicas(lost: int, rack: int) -> None:
    sites = _fleet_of(racks=8, per_rack=4)
    before = place_replicas(list(sites), sites, 2)
    gone = list(sites)[lost]
    seats = [node if node != gone else "spare" for node in sites]
    after_sites = sites | {"spare": FailureDomains(rack=f"r{rack}", switch=f"s{rack}", power=f"p{rack // 2}")}
    after = place_replicas(seats, after_sites, 2, before)
    moved = sum(after[node] != before[node] for node in seats if node != "spare")
    assert 1 <= moved <= 3, "the one's that has lost its home; where spare and widow are near, two make place for them"
    assert all(_shared(after_sites, (node, *copies)) == 0 for node, copies in after.items())


@given(st.integers(2, 12), st.integers(0, 11))
def test_placement_stays_even_after_node_loss(pairs: int, lost: int) -> None:
    """Pairs copy each other, and one of a pair is lost: the other one cannot keep its own copy. What a node has to keep
    beside its own share is what its memory must suffice for."""
    sites = {f"n{at}": FailureDomains(rack=f"r{at}") for at in range(2 * pairs)}
    before = place_replicas(list(sites), sites, 2)
    seats = [node for at, node in enumerate(sites) if at != lost % len(sites)]
    after = place_replicas(seats, sites, 2, before)
    assert Counter(copy for copies in after.values() for copy in copies) == dict.fromkeys(seats, 1)
    assert sum(after[node] != before[node] for node in seats) == 2, "the widow's, and one that makes place for it"


@given(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 7)), max_size=40))
def test_replica_load_stays_bounded_over_many_replacements(changes: list[tuple[int, int]]) -> None:
    sites = _fleet_of(racks=8, per_rack=2)
    seats = list(sites)
    placed = place_replicas(seats, sites, 2)
    for number, (seat, rack) in enumerate(changes):
        sites[f"x{number}"] = FailureDomains(rack=f"r{rack}", switch=f"s{rack}", power=f"p{rack // 2}")
        seats[seat] = f"x{number}"
        placed = place_replicas(seats, sites, 2, placed)
        least = {node: _shared(sites, (node, *copies)) for node, copies in placed.items()}
        assert all(cost == _least_shared({n: sites[n] for n in seats}, node, 1) for node, cost in least.items())
    if all(_least_shared({n: sites[n] for n in seats}, node, 1) == 0 for node in seats):
        spread = Counter(sites[node].power for node in seats)
        if max(spread.values()) <= len(seats) // 2:
            assert max(Counter(copy for copies in placed.values() for copy in copies).values()) <= 2


# --- in the fleet ------------------------------------------------------------------------------------------------


@pytest.mark.promise("copies-across-domains")
def test_roster_change_places_replicas_across_racks() -> None:
    fleet = CoreFleet()
    for node, rack in (("n1", "a"), ("n2", "a"), ("n3", "b"), ("n4", "b"), ("n5", "a")):
        fleet.register(node, domain=Domain(rack=rack))
    fleet.join("n1", "n2", "n3", "n4", min_nodes=2, max_nodes=4)
    fleet.resume()
    fleet.join("n5")
    assert _crosses(fleet)
    fleet.leave("n3")
    assert set(fleet.seats()) == {"n1", "n2", "n5", "n4"}
    assert _crosses(fleet), "with three of four in one rack all three copy to the fourth"
    fleet.resume()
    fleet.leave("n5")
    assert _crosses(fleet)


def _crosses(fleet: CoreFleet) -> bool:
    racks = {node: record.identity.domain.rack for node, record in fleet.state.nodes.items()}
    placed = fleet.spec().replica_nodes
    assert set(placed) == set(fleet.seats())
    return all(racks[node] != racks[copy] for node, copies in placed.items() for copy in copies)
