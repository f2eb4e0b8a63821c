"""The order in which leaves are summed: one binary tree over all of them, whoever holds which.

A node is the range ``[first, last)`` of its leaves. It is cut after the largest power of two of leaves that is less
than it has, so a tree is fixed by the number of its leaves alone. Floating-point addition is not associative: sums are
sure to be equal to the last bit only where they were taken along the same tree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


def cover(leaves: int, first: int, last: int) -> tuple[Node, ...]:
    """The largest nodes that lie in ``[first, last)``, from left to right: together they are that range."""
    return tuple(_covering((0, leaves), first, last))


def _covering(node: Node, first: int, last: int) -> Iterator[Node]:
    if node[1] <= first or last <= node[0]:
        return
    if first <= node[0] and node[1] <= last:
        yield node
        return
    for half in halves(node):
        yield from _covering(half, first, last)


def fold(node: Node, parts: Mapping[Node, T], add: Add[T]) -> T:
    """The sum of a node from those of nodes below it. ``parts`` covers the node once, with nodes of its tree."""
    if node in parts:
        return parts[node]
    left, right = halves(node)
    return add(fold(left, parts, add), fold(right, parts, add))


class Partial(Generic[T]):
    """The sums of a growing range of leaves, ``[first, first)`` at the start, with as few values held as can be."""

    def __init__(self, leaves: int, first: int, add: Add[T]) -> None:
        self._leaves = leaves
        self._next = first
        self._add = add
        self._parts: list[tuple[Node, T]] = []

    def append(self, value: T) -> None:
        """The next leaf's."""
        self._parts.append(((self._next, self._next + 1), value))
        self._next += 1
        while len(self._parts) > 1 and self._are_siblings(self._parts[-2][0], self._parts[-1][0]):
            (left, a), (right, b) = self._parts[-2:]
            self._parts[-2:] = [((left[0], right[1]), self._add(a, b))]

    @property
    def parts(self) -> list[tuple[Node, T]]:
        """One value for each node of the range's cover."""
        return self._parts

    def _are_siblings(self, left: Node, right: Node) -> bool:
        node = (0, self._leaves)
        while node[0] != left[0] or node[1] != right[1]:
            if node[1] - node[0] == 1:
                return False
            lower, upper = halves(node)
            if right[1] <= lower[1]:
                node = lower
            elif left[0] >= upper[0]:
                node = upper
            else:
                return False
        return halves(node) == (left, right)
