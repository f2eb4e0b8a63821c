"""Groups of nodes that stand apart, two losses of which bear nothing; and whom no group can take stays on copies."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

import pytest
from everstep_controller.core.checkpoints.parity import ParityGrouping, form_groups, lost_shards
from everstep_controller.core.checkpoints.placement import FailureDomains
from hypothesis import given
from hypothesis import strategies as st

from everstep.ids import Version
from everstep.wire.v1.vault_reports import Protection

names = st.sampled_from(["", "1", "2", "3", "4"])
any_site = st.builds(FailureDomains, rack=names, switch=names, power=names)
any_roster = st.lists(any_site, max_size=14)
nested_roster = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 1), st.integers(0, 1)), max_size=24).map(
    lambda places: [FailureDomains(power=f"{p}", switch=f"{p}.{s}", rack=f"{p}.{s}.{r}") for p, s, r in places]
)
"""Racks within switches within power units."""


def _named(sites: list[FailureDomains]) -> dict[str, FailureDomains]:
    return {f"n{at}": site for at, site in enumerate(sites)}


def _formed(sites: list[FailureDomains], parity: int) -> tuple[dict[str, FailureDomains], ParityGrouping]:
    named = _named(sites)
    return named, form_groups(list(named), named, parity)


def _told_apart(sites: dict[str, FailureDomains]) -> dict[str, FailureDomains]:
    """Without the domains that every node is in: no choice could avoid those."""
    seen = list(sites.values())
    common = dict.fromkeys(("rack", "switch", "power"), seen[0]) if seen else {}
    dull = {kind for kind, one in common.items() if len({getattr(site, kind) for site in seen}) == 1 and one}
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
        assert not any(apart[one].count_shared(apart[other]) for one, other in combinations(group.nodes, 2))


@given(nested_roster, st.integers(2, 5))
def test_grouping_is_maximal_in_nested_domains(sites: list[FailureDomains], parity: int) -> None:
    named, grouping = _formed(sites, parity)
    apart = _told_apart(named)
    widest = min(parity, len(named) - 2)
    assert len(grouping.copy_only_nodes) <= len(named) - max(
        (_most_taken(apart, k) for k in range(2, widest + 1)), default=0
    )


def _most_taken(apart: dict[str, FailureDomains], k: int) -> int:
    """Nested domains fall into classes of nodes that share something. Groups of ``k`` from different classes: as many
    as there are when no class gives more than one node to each (a flow; Gale 1957); each needs two classes more."""
    left, classes = list(apart), []
    while left:
        together, found = [left.pop(0)], True
        while found:
            found = [n for n in left if any(apart[n].count_shared(apart[one]) for one in together)]
            left = [n for n in left if n not in found]
            together += found
        classes.append(len(together))
    if len(classes) < k + 2:
        return 0
    groups = max(count for count in range(len(apart) // k + 1) if sum(min(c, count) for c in classes) >= count * k)
    return groups * k


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
        assert all(len(set(three) & set(one.nodes)) == 3 for one in grouping.groups if set(one.members) & set(lost))


def test_parity_nodes_are_loaded_evenly() -> None:
    sites = [FailureDomains(rack=f"r{at // 4}") for at in range(48)]
    _, grouping = _formed(sites, 4)
    load = Counter(node for group in grouping.groups for node in group.parity)
    assert len(grouping.groups) == 12
    assert max(load.values()) == 1


def test_group_size_shrinks_with_the_number_of_racks() -> None:
    _, grouping = _formed([FailureDomains(rack=f"r{at % 6}") for at in range(24)], 8)
    assert {len(group.members) for group in grouping.groups} == {4}
    assert grouping.explanation == (
        "6 groups of 4 nodes and 2 parities (up to 8 were asked for; the roster and its domains allow 4): "
        "each survives any 2 lost nodes"
    )


def test_three_racks_fall_back_to_replicas() -> None:
    _, grouping = _formed([FailureDomains(rack=f"r{at % 3}") for at in range(30)], 4)
    assert grouping.groups == ()
    assert grouping.explanation == (
        "all 30 nodes keep copies: parity needs 4 nodes of which no two share a rack, switch or power unit"
    )


def test_domain_shared_by_all_nodes_is_ignored() -> None:
    _, grouping = _formed([FailureDomains(power="p", rack=f"r{at}") for at in range(6)], 4)
    assert len(grouping.groups) == 2


def test_ungrouped_node_is_named() -> None:
    _, grouping = _formed([FailureDomains() for _ in range(9)], 2)
    assert grouping.copy_only_nodes == ("n8",)
    assert grouping.explanation == (
        "4 groups of 2 nodes and 2 parities: each survives any 2 lost nodes; n8 shares failure domains with too many "
        "others and keeps copies"
    )


@given(any_roster, st.integers(2, 6), st.integers(1, 8))
def test_every_rank_of_grouped_node_is_in_one_shard_group(sites: list[FailureDomains], parity: int, nproc: int) -> None:
    named, grouping = _formed(sites, parity)
    kept = Protection(version=Version(1, 1), seats=tuple(named), nproc_per_node=nproc, groups=grouping.groups)
    shards = list(kept.shards())
    of_rank = {rank: node for one in shards for rank, node in one.members}
    place = {node: at for at, node in enumerate(named)}
    assert sorted(of_rank) == sorted(
        place[node] * nproc + local_rank
        for group in grouping.groups
        for node in group.members
        for local_rank in range(nproc)
    )
    assert all(place[node] == rank // nproc for rank, node in of_rank.items())
    assert sum(len(one.members) for one in shards) == len(of_rank)
    assert [one.group for one in shards] == list(range(len(shards)))
    assert all(not {node for _, node in one.members} & set(one.parity) for one in shards)
