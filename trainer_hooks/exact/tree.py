"""The order in which leaves are summed: one binary tree over all of them, whoever holds which.

A node is the range ``[first, last)`` of its leaves. It is cut after the largest power of two of leaves that is less
than it has, so a tree is fixed by the number of its leaves alone. Floating-point addition is not associative: sums are
sure to be equal to the last bit only where they were taken along the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")
Node = tuple[int, int]
Add = Callable[[T, T], T]
"""``add(left, right)``; may write over ``left``, and is handed neither of them again."""


def halves(node: Node) -> tuple[Node, Node]:
    """The two children of a node of two leaves or more."""
    first, last = node
    middle = first + (1 << ((last - first - 1).bit_length() - 1))
    return (first, middle), (middle, last)


def cover(leaves: int, chosen: Iterable[int]) -> tuple[Node, ...]:
    """The fewest nodes that together have the chosen leaves and no others, from left to right."""
    nodes: Partial[None] = Partial(leaves, lambda left, right: None)
    for leaf in chosen:
        nodes.put((leaf, leaf + 1), None)
    return tuple(node for node, _ in nodes.parts)


def fold(node: Node, parts: Mapping[Node, T], add: Add[T]) -> T:
    """The sum of a node from those of nodes below it. ``parts`` covers the node once, with nodes of its tree."""
    if node in parts:
        return parts[node]
    left, right = halves(node)
    return add(fold(left, parts, add), fold(right, parts, add))


class Partial(Generic[T]):
    """Sums of nodes that come in any order, each leaf once, with as few values held as can be."""

    def __init__(self, leaves: int, add: Add[T]) -> None:
        self._leaves = leaves
        self._add = add
        self._held: dict[Node, T] = {}

    def put(self, node: Node, value: T) -> None:
        """What a leaf or a whole node has."""
        while node != (0, self._leaves):
            left, right = halves(self._parent(node))
            other = right if node == left else left
            if other not in self._held:
                break
            known = self._held.pop(other)
            value = self._add(value, known) if node == left else self._add(known, value)
            node = (left[0], right[1])
        self._held[node] = value

    @property
    def parts(self) -> list[tuple[Node, T]]:
        """One value for each node of the cover of what has come, from left to right."""
        return sorted(self._held.items(), key=lambda part: part[0])

    def _parent(self, node: Node) -> Node:
        parent = (0, self._leaves)
        while node not in (below := halves(parent)):
            parent = below[0] if node[1] <= below[0][1] else below[1]
        return parent
