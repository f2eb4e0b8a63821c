"""Place replicas on nodes that are unlikely to be lost together with the copied node.

Nodes form groups whose members copy each other and are far apart. Far fewer sets of nodes then hold copies together, so
fewer simultaneous losses cost a version (Cidon et al., Copysets, USENIX ATC 2013).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

import msgspec

from everstep_controller.core.records import NodeRecord

ReplicaTargets = dict[str, tuple[str, ...]]


class FailureDomains(msgspec.Struct, frozen=True, order=True):
    """Failure domains of a node. An empty name is shared with no other node."""

    power: str = ""
    switch: str = ""
    rack: str = ""
    driver: str = ""
    """GPU driver version; a weaker domain, since nodes may be evicted together for its faults."""

    @staticmethod
    def of(record: NodeRecord) -> FailureDomains:
        domain = record.identity.domain
        return FailureDomains(domain.power, domain.switch, domain.rack, record.identity.driver_version)

    def count_shared(self, other: FailureDomains) -> int:
        """Return the number of domains that both share."""
        return (
            (self.rack == other.rack and self.rack != "")
            + (self.switch == other.switch and self.switch != "")
            + (self.power == other.power and self.power != "")
        )

    def has_same_driver(self, other: FailureDomains) -> bool:
        """Return whether both have the same driver version."""
        return self.driver == other.driver and self.driver != ""


def place_replicas(
    seats: Sequence[str],
    domains: Mapping[str, FailureDomains],
    replicas: int,
    previous: Mapping[str, tuple[str, ...]] | None = None,
    skipped: frozenset[str] = frozenset(),
) -> ReplicaTargets:
    """Return, for each node, the ``replicas - 1`` nodes that copy what it alone holds (fewer in a small roster).

    A node's copies share as few domains with it and with each other as the roster allows in sequential choice. Among
    such choices the load is balanced first, and driver versions differ second. Placements in ``previous`` stay if they
    are no worse, because a vault with new copies has to find memory for them; some still move to relieve overloaded
    nodes. Nodes in ``skipped`` get no copies if there are enough others.
    """
    copies = min(replicas, len(seats)) - 1
    if copies < 1:
        return dict.fromkeys(seats, ())
    if len(seats) - len(skipped.intersection(seats)) <= copies:
        skipped = frozenset()
    market = _ReplicaPlacer(seats, domains, copies, skipped)
    kept = {node: chosen for node, chosen in (previous or {}).items() if market.accepts(node, chosen)}
    if kept:
        placed = market.complete(kept)
        market.rebalance(placed, placed.keys() - kept.keys())
        if max(market.load.values()) <= 2 * copies:
            return {node: placed[node] for node in seats}
        market = _ReplicaPlacer(seats, domains, copies, skipped)
    groups = min((_groups(order, copies) for order in _orders(seats, domains)), key=market.total_cost)
    placed = market.complete({node: chosen for node, chosen in groups.items() if market.accepts(node, chosen)})
    return {node: placed[node] for node in seats}


def _orders(seats: Sequence[str], sites: Mapping[str, FailureDomains]) -> tuple[list[str], list[str]]:
    """Return the nodes sorted by domain, widest first, and sorted by driver version before that."""
    by_domain = [node for _, _, node in sorted((sites[node], seat, node) for seat, node in enumerate(seats))]
    return by_domain, sorted(by_domain, key=lambda node: sites[node].driver)


def _groups(ordered: Sequence[str], copies: int) -> ReplicaTargets:
    """Return groups of ``copies + 1`` or one more, whose members are far apart in ``ordered``."""
    count = max(1, len(ordered) // (copies + 1))
    targets: ReplicaTargets = {}
    for first in range(count):
        ring = ordered[first::count]
        for at, node in enumerate(ring):
            targets[node] = tuple(ring[(at + step) % len(ring)] for step in range(1, copies + 1))
    return targets


LoadHeaps = dict[FailureDomains, list[tuple[int, int, str]]]
"""Heap of (load, seat, node) by failure domains."""


class _ReplicaPlacer:
    """Nodes with room for copies by failure domains, least loaded first."""

    def __init__(
        self, seats: Sequence[str], sites: Mapping[str, FailureDomains], copies: int, skipped: frozenset[str]
    ) -> None:
        self._sites = {node: sites[node] for node in seats}
        self._copies = copies
        self._passed_over = skipped
        self._nearest: dict[tuple[bool, tuple[FailureDomains, ...]], tuple[int, list[FailureDomains]]] = {}
        self._best: dict[tuple[bool, FailureDomains], int] = {}
        self.load = dict.fromkeys(seats, 0)

    @cached_property
    def _present(self) -> Counter[FailureDomains]:
        return Counter(site for node, site in self._sites.items() if node not in self._passed_over)

    def accepts(self, node: str, chosen: Sequence[str]) -> bool:
        if node not in self._sites or len(chosen) != self._copies:
            return False
        if any(other not in self._sites or other in self._passed_over for other in chosen):
            return False
        shared = self._shared(node, chosen)
        return shared == 0 or shared <= self._best_cost(node)

    def total_cost(self, targets: ReplicaTargets) -> tuple[int, int]:
        """Return the number of shared domains, and of pairs with one driver version, over all copies."""
        sites = self._sites
        weak = sum(sites[node].has_same_driver(sites[other]) for node, chosen in targets.items() for other in chosen)
        return sum(self._shared(node, chosen) for node, chosen in targets.items()), weak

    def _shared(self, node: str, chosen: Sequence[str]) -> int:
        if len(chosen) == 1:
            return self._sites[node].count_shared(self._sites[chosen[0]])
        sites = [self._sites[holder] for holder in (node, *chosen)]
        return sum(site.count_shared(other) for at, site in enumerate(sites) for other in sites[:at])

    def complete(self, given: ReplicaTargets) -> ReplicaTargets:
        """Return ``given``, completed by the best choice for every other node."""
        placed = dict(given)
        for chosen in given.values():
            for node in chosen:
                self.load[node] += 1
        if len(placed) == len(self._sites):
            return placed
        offers: LoadHeaps = defaultdict(list)
        for seat, (node, site) in enumerate(self._sites.items()):
            if node not in self._passed_over:
                offers[site].append((self.load[node], seat, node))
        for heap in offers.values():
            heapq.heapify(heap)
        for node in self._sites:
            if node not in placed:
                placed[node] = self._choose(node, offers)
        return placed

    def rebalance(self, placed: ReplicaTargets, newly: Iterable[str]) -> None:
        """Move copies from the replica nodes of newly placed nodes to less loaded ones that share no more domains."""
        replica_nodes = dict.fromkeys(replica_node for node in sorted(newly) for replica_node in placed[node])
        senders: defaultdict[str, list[str]] = defaultdict(list)
        for node, chosen in placed.items():
            for replica_node in chosen:
                if replica_node in replica_nodes:
                    senders[replica_node].append(node)
        for replica_node in replica_nodes:
            for sender in senders[replica_node]:
                free = [
                    n for n in self._sites if self.load[n] < self.load[replica_node] - 1 and n not in self._passed_over
                ]
                if not free:
                    break
                self._move_copy(placed, sender, replica_node, free)

    def _move_copy(self, placed: ReplicaTargets, sender: str, replica_node: str, free: Iterable[str]) -> None:
        site = self._sites[sender]
        for other in sorted(free, key=lambda node: (self.load[node], site.has_same_driver(self._sites[node]))):
            chosen = tuple(other if replica == replica_node else replica for replica in placed[sender])
            if other != sender and other not in placed[sender] and self.accepts(sender, chosen):
                placed[sender] = chosen
                self.load[replica_node] -= 1
                self.load[other] += 1
                return

    def _choose(self, node: str, offers: LoadHeaps) -> tuple[str, ...]:
        holders, names = [self._sites[node]], [node]
        for _ in range(self._copies):
            _, near = self._near(tuple(holders), node not in self._passed_over)
            heads = ((self._least_loaded(offers[site], names), site.has_same_driver(holders[0]), site) for site in near)
            (load, seat, other), _, site = min(heads, key=lambda head: (head[0][0], head[1], head[0][1]))
            offers[site].remove((load, seat, other))
            offers[site].append((load + 1, seat, other))
            heapq.heapify(offers[site])
            self.load[other] += 1
            holders.append(site)
            names.append(other)
        return tuple(names[1:])

    @staticmethod
    def _least_loaded(heap: list[tuple[int, int, str]], excluded: Sequence[str]) -> tuple[int, int, str]:
        return heap[0] if heap[0][2] not in excluded else min(offer for offer in heap if offer[2] not in excluded)

    def _near(self, holders: tuple[FailureDomains, ...], offers: bool) -> tuple[int, list[FailureDomains]]:
        """Return the minimum cost of a copy beside ``holders``, and its domains; ``offers``: the first has room."""
        known = self._nearest.get((offers, holders))
        if known is None:
            taken = Counter(holders if offers else holders[1:])
            costs = [
                (sum(site.count_shared(holder) for holder in holders), site)
                for site, count in self._present.items()
                if count > taken[site]
            ]
            least = min(cost for cost, _ in costs)
            known = self._nearest[offers, holders] = least, [site for cost, site in costs if cost == least]
        return known

    def _best_cost(self, node: str) -> int:
        """Return the cost of a node's copies if each is the best choice after the ones before it."""
        key = offers, site = node not in self._passed_over, self._sites[node]
        if key not in self._best:
            holders, total = [site], 0
            for _ in range(self._copies):
                cost, near = self._near(tuple(holders), offers)
                total += cost
                holders.append(near[0])
            self._best[key] = total
        return self._best[key]
