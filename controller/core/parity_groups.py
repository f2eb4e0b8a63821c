"""Which nodes are kept by parity instead of by copies: groups of k nodes, and two others that hold P and Q of them.

A group bears the loss of any two of its k + 2 nodes and takes 2/k of its members' memory, where a copy takes all of it.
It is formed only of nodes no two of which share a rack, a switch or a power unit, so that a domain costs it one of
them. Whoever finds no such group stays on copies, which need but one other domain: parity never takes away safety
that copies have. A domain that has every node in it says nothing and is left out of account.

Members are taken from the most crowded domains first. Where domains are nested (racks within switches within power
units) no other way of taking them makes more groups; where they overlap otherwise, some may be missed.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import msgspec

from controller.core.placement import Site
from controller.core.wording import named
from everstep.wire.v1.parity import NodeGroup

FEWEST_MEMBERS = 2
"""One member with two parities would take twice what a copy takes; two take the same and bear a second loss."""

BORNE = 2
"""Losses of a group's nodes that it bears: P and Q."""

Domain = tuple[str, str]
"""Kind and name."""

Domains = tuple[Domain, ...]
Load = tuple[int, int, str]
"""Parities held, seat, node."""


class Grouping(msgspec.Struct, frozen=True):
    """Every seat is in one group or among ``on_copies``. ``sentence`` says why it is so."""

    groups: tuple[NodeGroup, ...]
    on_copies: tuple[str, ...]
    sentence: str


def form_groups(seats: Sequence[str], sites: Mapping[str, Site], parity: int) -> Grouping:
    """Groups of at most k nodes of the roster, all of k or as alike as can be, where k, at most ``parity``, is the
    largest of those that leave the fewest nodes without a group: safety first, and then the least memory.

    k falls with the roster: a group needs two nodes more than its members, in as many domains.
    """
    domains = _domains(seats, sites)
    best: tuple[NodeGroup, ...] = ()
    for k in range(min(parity, len(seats) - BORNE), FEWEST_MEMBERS - 1, -1):
        for sizes in (_alike(len(seats), k), [k] * (len(seats) // k)):
            if not best or len(seats) - sum(sizes) < _left(best, seats):
                groups = _form(seats, domains, sizes)
                best = groups if not best or _left(groups, seats) < _left(best, seats) else best
    grouped = {node for group in best for node in group.members}
    left = tuple(node for node in seats if node not in grouped)
    return Grouping(best, left, _why(best, left, parity, len(seats)))


def _alike(nodes: int, k: int) -> list[int]:
    """Sizes of the fewest groups with at most ``k`` members each that take all nodes; none where one of them would have
    too few."""
    count = -(-nodes // k)
    least, larger = divmod(nodes, count)
    return [least + 1] * larger + [least] * (count - larger) if least >= FEWEST_MEMBERS else []


def _left(groups: Collection[NodeGroup], seats: Collection[str]) -> int:
    """How many nodes are in no group."""
    return len(seats) - sum(len(group.members) for group in groups)


def _why(groups: Sequence[NodeGroup], left: Sequence[str], asked: int, seats: int) -> str:
    if not groups:
        return (
            f"all {seats} nodes keep copies: parity needs {FEWEST_MEMBERS + BORNE} nodes of which no two share a rack, "
            "switch or power unit"
        )
    sizes = sorted({len(group.members) for group in groups})
    k = " or ".join(map(str, sizes))
    of = f"{len(groups)} group{'s' if len(groups) > 1 else ''} of {k} nodes and 2 parities"
    why_k = "" if asked in sizes else f" (up to {asked} were asked for; the roster and its domains allow {k})"
    if not left:
        return f"{of}{why_k}: each bears any two losses"
    return f"{of}{why_k}: each bears any two losses; {named(left)} found no {sizes[0]} apart and keep{_s(left)} copies"


def _s(nodes: Sequence[str]) -> str:
    return "s" if len(nodes) == 1 else ""


# --- forming -----------------------------------------------------------------------------------------------------


def _domains(seats: Sequence[str], sites: Mapping[str, Site]) -> dict[str, Domains]:
    """By node the domains that it shares with some of the others, and not with all of them."""
    named_ = {
        node: tuple(
            (kind, name) for kind, name in (("power", site.power), ("switch", site.switch), ("rack", site.rack)) if name
        )
        for node in seats
        for site in (sites[node],)
    }
    crowd = Counter(domain for domains in named_.values() for domain in domains)
    return {node: tuple(d for d in domains if 1 < crowd[d] < len(seats)) for node, domains in named_.items()}


def _form(seats: Sequence[str], domains: Mapping[str, Domains], sizes: Iterable[int]) -> tuple[NodeGroup, ...]:
    """Groups of these sizes, until one cannot be had."""
    crowds = _Crowds(seats, domains)
    homes = _Homes(seats, domains)
    groups: list[NodeGroup] = []
    for size in sizes:
        members = crowds.take(size)
        parity = homes.take(members) if members else None
        if parity is None:
            break
        groups.append(NodeGroup(members=members, parity=parity))
    return tuple(groups)


class _Crowds:
    """The nodes without a group by their domains, those in the most crowded ones first."""

    def __init__(self, seats: Sequence[str], domains: Mapping[str, Domains]) -> None:
        self._left = Counter(domain for node in seats for domain in domains[node])
        self._nodes: dict[Domains, deque[str]] = {}
        for node in seats:
            self._nodes.setdefault(domains[node], deque()).append(node)
        self._heap = [(-self._crowd(place), at, place) for at, place in enumerate(self._nodes)]
        heapq.heapify(self._heap)

    def _crowd(self, place: Domains) -> int:
        return max((self._left[domain] for domain in place), default=1)

    def take(self, k: int) -> tuple[str, ...]:
        """``k`` nodes of which no two share a domain; none where these cannot be had."""
        taken: list[str] = []
        used: set[Domain] = set()
        aside: list[tuple[int, int, Domains]] = []
        while self._heap and len(taken) < k:
            crowd, at, place = heapq.heappop(self._heap)
            now = self._crowd(place)
            if now < -crowd:  # others of its domains are in a group by now
                heapq.heappush(self._heap, (-now, at, place))
                continue
            aside.append((crowd, at, place))
            if used.isdisjoint(place):
                room = 1 if place else k - len(taken)
                taken += [self._nodes[place].popleft() for _ in range(min(room, len(self._nodes[place])))]
                used.update(place)
                self._left.subtract(place)
        for entry in aside:
            if self._nodes[entry[2]]:
                heapq.heappush(self._heap, entry)
        return tuple(taken) if len(taken) == k else ()


class _Homes:
    """All nodes by their domains, as homes of parity: those that hold the least first."""

    def __init__(self, seats: Sequence[str], domains: Mapping[str, Domains]) -> None:
        self._nodes: dict[Domains, list[Load]] = {}
        for seat, node in enumerate(seats):
            self._nodes.setdefault(domains[node], []).append((0, seat, node))
        self._heap = [(loads[0], place) for place, loads in self._nodes.items()]
        heapq.heapify(self._heap)
        self._domains = domains

    def take(self, members: Sequence[str]) -> tuple[str, str] | None:
        """Two nodes that share no domain with a member or with each other, nor are one."""
        used = {domain for node in members for domain in self._domains[node]}
        aside: list[Domains] = []
        chosen: list[str] = []
        while self._heap and len(chosen) < BORNE:
            _, place = heapq.heappop(self._heap)
            aside.append(place)
            if used.isdisjoint(place):
                chosen += self._least(place, members, 1 if place else BORNE - len(chosen))
                used.update(place)
        for place in aside:
            heapq.heappush(self._heap, (self._nodes[place][0], place))
        return (chosen[0], chosen[1]) if len(chosen) == BORNE else None

    def _least(self, place: Domains, members: Sequence[str], count: int) -> list[str]:
        loads, aside, found = self._nodes[place], [], list[str]()
        while loads and len(found) < count:
            load, seat, node = heapq.heappop(loads)
            if node in members:
                aside.append((load, seat, node))
            else:
                aside.append((load + 1, seat, node))
                found.append(node)
        for entry in aside:
            heapq.heappush(loads, entry)
        return found


# --- losses ------------------------------------------------------------------------------------------------------


def lost_shards(groups: Collection[NodeGroup], gone: Collection[str]) -> tuple[str, ...]:
    """Nodes whose shards no group can make again without these nodes."""
    return tuple(node for group in groups for node in _lost(group, gone))


def _lost(group: NodeGroup, gone: Collection[str]) -> tuple[str, ...]:
    """Members whose shards are gone for good without these nodes."""
    if sum(node in gone for node in group.nodes) <= BORNE:
        return ()
    return tuple(node for node in group.members if node in gone)


def explain(groups: Sequence[NodeGroup], gone: Collection[str]) -> Iterator[str]:
    """A sentence for each group that these losses touch."""
    for number, group in enumerate(groups):
        missing = [node for node in group.nodes if node in gone]
        if missing:
            yield f"group {number} ({len(group.nodes)} nodes) is without {named(missing)}: {_outcome(group, gone)}"


def _outcome(group: NodeGroup, gone: Collection[str]) -> str:
    away = [node for node in group.members if node in gone]
    if lost := _lost(group, gone):
        return f"more than two of it are gone, and what {named(lost)} stored cannot be made again"
    if not away:
        return "no member is, and parity can be made anew"
    return f"what {named(away)} stored is made again from the others"
