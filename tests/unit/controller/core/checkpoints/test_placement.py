"""Replicas go to nodes in other failure domains than the node that they copy, and their load is even."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.wire.v1.agent import Domain
from everstep_controller.core.checkpoints.placement import FailureDomains, place_replicas
from tests.support.fleet.core_fleet import CoreFleet

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
    return sum(sites[first].count_shared(sites[other]) for first, other in combinations(nodes, 2))


def _least_shared(sites: dict[str, FailureDomains], node: str, copies: int) -> int:
    """The optimum, by trying every choice of replica nodes."""
    others = [other for other in sites if other != node]
    return min(_shared(sites, (node, *chosen)) for chosen in combinations(others, min(copies, len(others))))


def _fleet_of(racks: int, per_rack: int) -> dict[str, FailureDomains]:
    """Each rack has a switch of its own, and two racks share a power unit."""
    return {
        f"n{rack}-{at}": FailureDomains(rack=f"r{rack}", switch=f"s{rack}", power=f"p{rack // 2}", driver="d1")
        for rack in range(racks)
        for at in range(per_rack)
    }


@pytest.mark.promise("copies-across-domains")
@given(rosters)
def test_first_replica_shares_the_fewest_domains(sites: list[FailureDomains]) -> None:
    named = _named(sites)
    placed = place_replicas(list(named), named, 2)
    for node, copies in placed.items():
        if len(named) > 1:
            assert _shared(named, (node, *copies)) == _least_shared(named, node, 1)


def test_replicas_cross_driver_versions() -> None:
    racks = _fleet_of(racks=8, per_rack=4)
    drivers = {"n0": "d1", "n1": "d1", "n2": "d1", "n3": "d1"}
    sites = {
        node: FailureDomains(site.power, site.switch, site.rack, drivers.get(node.split("-")[0], "d2"))
        for node, site in racks.items()
    }
    placed = place_replicas(list(sites), sites, 2)
    assert not any(sites[node].has_same_driver(sites[copy]) for node, (copy,) in placed.items())


@given(st.integers(2, 40), st.integers(2, 4))
def test_nodes_replicate_within_small_groups(count: int, replicas: int) -> None:
    nodes = {f"n{at}": FailureDomains(rack=f"r{at}") for at in range(count)}
    placed = place_replicas(list(nodes), nodes, replicas)
    sets = {frozenset((node, *copies)) for node, copies in placed.items()}
    assert len(sets) <= max(1, count // replicas) + count % replicas * replicas
    assert set(Counter(copy for copies in placed.values() for copy in copies).values()) == {min(replicas, count) - 1}


@given(st.integers(0, 31), st.integers(0, 7))
def test_replacing_one_node_moves_few_replicas(lost: int, rack: int) -> None:
    sites = _fleet_of(racks=8, per_rack=4)
    before = place_replicas(list(sites), sites, 2)
    gone = list(sites)[lost]
    seats = [node if node != gone else "spare" for node in sites]
    after_sites = sites | {"spare": FailureDomains(rack=f"r{rack}", switch=f"s{rack}", power=f"p{rack // 2}")}
    after = place_replicas(seats, after_sites, 2, before)
    moved = sum(after[node] != before[node] for node in seats if node != "spare")
    assert 1 <= moved <= 3, "only the replica without a node moves, and two more if the spare shares its domains"
    assert all(_shared(after_sites, (node, *copies)) == 0 for node, copies in after.items())


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
    assert _crosses(fleet), "three nodes share a rack, so all three copy to the fourth"
    fleet.resume()
    fleet.leave("n5")
    assert _crosses(fleet)


def _crosses(fleet: CoreFleet) -> bool:
    racks = {node: record.identity.domain.rack for node, record in fleet.state.nodes.items()}
    placed = fleet.spec().replica_nodes
    assert set(placed) == set(fleet.seats())
    return all(racks[node] != racks[copy] for node, copies in placed.items() for copy in copies)
