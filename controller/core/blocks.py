"""Rosters made of whole blocks: nodes that compute one tensor x pipeline replica together.

A block is a run of ``block`` consecutive seats. It is useful only as a whole, so a roster is always a whole number of
blocks. Where a job asks for it, the nodes of a block also share a failure domain, which is where the fast links are.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

from everstep.storage import why_not_storage
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import JobSpec


def least_seats(spec: JobSpec) -> int:
    """``min_nodes``, rounded up to whole blocks."""
    return -(-spec.min_nodes // spec.block_nodes) * spec.block_nodes


def most_seats(spec: JobSpec) -> int:
    """``max_nodes``, rounded down to whole blocks."""
    return spec.max_nodes // spec.block_nodes * spec.block_nodes


def contradiction(spec: JobSpec) -> str:
    """Why no roster can be what the job asks for, with the mend; empty where one can."""
    if spec.min_nodes > spec.max_nodes:
        return f"min_nodes {spec.min_nodes} is above max_nodes {spec.max_nodes}: no roster has so many and so few nodes"
    if least_seats(spec) > most_seats(spec):
        return (
            f"no whole number of blocks of {spec.block_nodes} nodes lies between {spec.min_nodes} and "
            f"{spec.max_nodes} nodes: give bounds with a multiple of {spec.block_nodes} between them"
        )
    if spec.block_within and spec.block_nodes == 1:
        return f"a block of one node is in one {spec.block_within} anyway: give block_nodes, or leave out block_within"
    return (why_not_storage(spec.spill.to) if spec.spill else "") or _no_parity(spec)


def _no_parity(spec: JobSpec) -> str:
    """Why no roster can have the parity that is asked for; with fewer members than asked for, any of four nodes can."""
    if spec.parity == 1:
        return "parity of one member would take twice what a copy takes: give 2 members or more, or none"
    if spec.parity and most_seats(spec) < 4:
        return (
            f"parity needs 4 nodes (2 members, and one more for P and for Q each), and the job has at most "
            f"{most_seats(spec)}: give it more nodes, or no parity"
        )
    if spec.parity and spec.replicas == 1 and least_seats(spec) < 4:
        return (
            f"with one copy and parity, nothing would be safe on fewer than 4 nodes (2 members, P and Q), and the job "
            f"goes on with {least_seats(spec)}: give min_nodes of 4 or more, or 2 copies beside the parity"
        )
    return ""


def domain_of(domain: Domain, within: str) -> str:
    """The name of the domain that a block must not leave; empty where the node names none."""
    return domain.rack if within == "rack" else domain.switch


class _Block(msgspec.Struct):
    """A block of the roster before: who is left of it, each in its place, and in which domain."""

    index: int
    domain: str
    seats: list[str | None]

    @property
    def missing(self) -> int:
        return self.seats.count(None)


def choose_seats(
    before: Sequence[str],
    able: Sequence[str],
    most: int,
    block: int = 1,
    domains: Mapping[str, str] | None = None,
) -> list[str]:
    """The next roster's nodes, at most ``most``: as many whole blocks as there can be, with as few changes.

    Blocks that lost nobody stay as they are. Those that lost least are made whole again: who comes new takes the
    place, and so the rank numbers, of one that is lost. A block that cannot be made whole is broken up, beginning with
    those of which least is left; its nodes mend others. A new block takes the seats of one that is gone, and only then
    seats at the end. Linear in the number of nodes.

    Args:
        able: all who may take part, in the order in which they are to be used where a seat is free.
        domains: where given, a block's nodes have the same domain, and nodes without one have no place.
    """
    if block == 1 and domains is None:
        return _one_by_one(before, able, most)
    region = {node: domains.get(node, "") if domains is not None else "any" for node in able}
    region = {node: domain for node, domain in region.items() if domain}
    room = {domain: count // block for domain, count in Counter(region.values()).items()}
    total = min(most // block, sum(room.values()))
    old = [_survivors(at // block, before[at : at + block], region, block) for at in range(0, len(before), block)]
    kept = _worth_keeping(old, room, total)
    placed = {node for one in kept.values() for node in one.seats if node is not None}
    free: dict[str, deque[str]] = {domain: deque() for domain in room}
    for node, domain in region.items():
        if node not in placed:
            free[domain].append(node)
    mended = {index: _filled(one.seats, free[one.domain]) for index, one in kept.items()}
    fresh = _new_blocks(region, free, room, total - len(kept), block)
    return _in_order(len(old), mended, fresh)


def _one_by_one(before: Sequence[str], able: Sequence[str], most: int) -> list[str]:
    """The same for blocks of one node."""
    may, was = set(able), set(before)
    spares = deque(node for node in able if node not in was)
    room = most - sum(1 for node in before if node in may)
    seats: list[str] = []
    for node in before:
        if node in may:
            seats.append(node)
        elif spares and room > 0:
            seats.append(spares.popleft())
            room -= 1
    return [*seats, *spares][:most]


def _survivors(index: int, seats: Sequence[str], region: Mapping[str, str], block: int) -> _Block:
    """What is left of a block. Nodes outside the domain of most of it do not belong to it any more."""
    here = Counter(region[node] for node in seats if node in region)
    domain = max(here, key=here.__getitem__) if here else ""
    left = [node if region.get(node) == domain else None for node in seats]
    return _Block(index, domain, [*left, *[None] * (block - len(left))])


def _worth_keeping(old: list[_Block], room: dict[str, int], total: int) -> dict[int, _Block]:
    """Up to ``total`` blocks, whole ones first, then those that lost least; takes their ``room`` in their domain."""
    kept: dict[int, _Block] = {}
    for one in sorted((b for b in old if b.domain), key=lambda b: (b.missing, b.index)):
        if len(kept) < total and room[one.domain] > 0:
            room[one.domain] -= 1
            kept[one.index] = one
    return kept


def _filled(seats: list[str | None], free: deque[str]) -> list[str]:
    return [node if node is not None else free.popleft() for node in seats]


def _new_blocks(
    region: Mapping[str, str], free: dict[str, deque[str]], room: dict[str, int], count: int, block: int
) -> deque[list[str]]:
    """``count`` blocks of free nodes; who comes first in the order of use decides in which domain."""
    blocks: deque[list[str]] = deque()
    for node, domain in region.items():
        if len(blocks) < count and room[domain] > 0 and free[domain] and free[domain][0] == node:
            room[domain] -= 1
            blocks.append([free[domain].popleft() for _ in range(block)])
    return blocks


def _in_order(places: int, mended: dict[int, list[str]], fresh: deque[list[str]]) -> list[str]:
    seats: list[str] = []
    for index in range(places):
        seats += mended[index] if index in mended else (fresh.popleft() if fresh else [])
    return seats + [node for one in fresh for node in one]
