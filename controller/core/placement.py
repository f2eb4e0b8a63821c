"""Where copies go: to the next nodes in roster order, in other failure domains where that is possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from everstep.wire.v1.agent import Domain


def shared_domains(one: Domain, other: Domain) -> int:
    """How many of rack, switch and power unit fail together for both; an unnamed domain is shared with nobody."""
    pairs = ((one.rack, other.rack), (one.switch, other.switch), (one.power, other.power))
    return sum(1 for a, b in pairs if a and a == b)


def place_replicas(seats: Sequence[str], domains: Mapping[str, Domain], replicas: int) -> dict[str, tuple[str, ...]]:
    """For each node, the ``replicas - 1`` nodes that copy what it alone holds (fewer where the roster is small).

    Each is the nearest after it in the ring of ``seats`` among those that share fewest domains with the node and
    with the copies already placed. Every node receives, so a full ring spreads the load evenly.
    """
    return {node: _targets(index, seats, domains, replicas - 1) for index, node in enumerate(seats)}


def _targets(index: int, seats: Sequence[str], domains: Mapping[str, Domain], wanted: int) -> tuple[str, ...]:
    chosen: list[str] = []
    for _ in range(min(wanted, len(seats) - 1)):
        chosen.append(_nearest(index, seats, [seats[index], *chosen], domains))
    return tuple(chosen)


def _nearest(index: int, seats: Sequence[str], holders: Sequence[str], domains: Mapping[str, Domain]) -> str:
    best, least = "", 1 << 30
    for step in range(1, len(seats)):
        node = seats[(index + step) % len(seats)]
        if node in holders:
            continue
        shared = sum(shared_domains(domains[node], domains[holder]) for holder in holders)
        if shared < least:
            best, least = node, shared
        if least == 0:
            break
    return best
