"""Parity groups of nodes without a common failure domain survive two losses; ungrouped nodes keep replicas."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_controller.core.checkpoints.parity import ParityGrouping, form_groups, lost_shards
from everstep_controller.core.checkpoints.placement import FailureDomains

names = st.sampled_from(["", "1", "2", "3", "4"])
any_site = st.builds(FailureDomains, rack=names, switch=names, power=names)
any_roster = st.lists(any_site, max_size=14)


def _named(sites: list[FailureDomains]) -> dict[str, FailureDomains]:
    return {f"n{at}": site for at, site in enumerate(sites)}


def _formed(sites: list[FailureDomains], parity: int) -> tuple[dict[str, FailureDomains], ParityGrouping]:
    named = _named(sites)
    return named, form_groups(list(named), named, parity)


def _told_apart(sites: dict[str, FailureDomains]) -> dict[str, FailureDomains]:
    """Remove the domains that contain every node, because no grouping could avoid them."""
    seen = list(sites.values())
    common = dict.fromkeys(("rack", "switch", "power"), seen[0]) if seen else {}
    dull = {kind for kind, value in common.items() if len({getattr(site, kind) for site in seen}) == 1 and value}
    return {
        node: FailureDomains(*("" if kind in dull else getattr(site, kind) for kind in ("power", "switch", "rack")))
        for node, site in sites.items()
    }


@given(any_roster, st.integers(0, 9))
def test_every_node_is_grouped_or_replicated_exactly_once(sites: list[FailureDomains], parity: int) -> None:
    named, grouping = _formed(sites, parity)
    counted = Counter(node for group in grouping.groups for node in group.members) + Counter(grouping.copy_only_nodes)
    assert counted == Counter(list(named))
    assert all(2 <= len(group.members) <= parity for group in grouping.groups)
    sizes = {len(group.members) for group in grouping.groups}
    assert not sizes or max(sizes) - min(sizes) <= 1


@given(any_roster, st.integers(0, 9))
def test_group_members_and_parity_nodes_share_no_domain(sites: list[FailureDomains], parity: int) -> None:
    named, grouping = _formed(sites, parity)
    apart = _told_apart(named)
    for group in grouping.groups:
        assert len(set(group.nodes)) == len(group.members) + 2
        assert not any(apart[first].count_shared(apart[other]) for first, other in combinations(group.nodes, 2))


@pytest.mark.promise("parity")
@given(any_roster, st.integers(2, 6), st.data())
def test_group_survives_two_losses_and_third_is_contained(
    sites: list[FailureDomains], parity: int, data: st.DataObject
) -> None:
    _, grouping = _formed(sites, parity)
    for group in grouping.groups:
        for gone in combinations(group.nodes, 2):
            assert lost_shards(grouping.groups, gone) == ()
        three = data.draw(st.sampled_from(list(combinations(group.nodes, 3))))
        lost = lost_shards(grouping.groups, three)
        assert set(lost) >= set(three) & set(group.members)
        assert all(
            len(set(three) & set(group.nodes)) == 3 for group in grouping.groups if set(group.members) & set(lost)
        )


def test_parity_nodes_are_loaded_evenly() -> None:
    sites = [FailureDomains(rack=f"r{at // 4}") for at in range(48)]
    _, grouping = _formed(sites, 4)
    load = Counter(node for group in grouping.groups for node in group.parity)
    assert len(grouping.groups) == 12
    assert max(load.values()) == 1


def test_ungrouped_node_is_named() -> None:
    _, grouping = _formed([FailureDomains() for _ in range(9)], 2)
    assert grouping.copy_only_nodes == ("n8",)
    assert grouping.explanation == (
        "4 groups of 2 nodes and 2 parities: each survives any 2 lost nodes; n8 shares failure domains with too many "
        "others and keeps copies"
    )
