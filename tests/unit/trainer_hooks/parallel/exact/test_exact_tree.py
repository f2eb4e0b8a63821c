"""Sums along one tree are bit-identical, regardless of how its leaves are distributed over ranks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_trainer.base.progress import CollectiveTimer
from everstep_trainer.parallel.exact.summation import (
    PartialSums,
    TreeNode,
    VirtualMean,
    children,
    contiguous_virtual_ranks,
    interleaved_virtual_ranks,
    minimal_cover,
    sum_subtree,
)

counts = st.integers(1, 70)


def all_nodes(node: TreeNode) -> set[TreeNode]:
    if node[1] - node[0] == 1:
        return {node}
    left, right = children(node)
    return {node} | all_nodes(left) | all_nodes(right)


def add_as_text(left: str, right: str) -> str:
    """Return an addition whose result shows its order."""
    return f"({left}+{right})"


def sum_by_recursion(node: TreeNode) -> str:
    """Return the sum of a node, by recursion over its whole subtree."""
    if node[1] - node[0] == 1:
        return str(node[0])
    left, right = children(node)
    return add_as_text(sum_by_recursion(left), sum_by_recursion(right))


@given(counts)
def test_tree_has_each_leaf_once_and_minimal_depth(leaves: int) -> None:
    nodes = all_nodes((0, leaves))
    assert {node for node in nodes if node[1] - node[0] == 1} == {(n, n + 1) for n in range(leaves)}
    depth = max(sum(other[0] <= n < other[1] for other in nodes) for n in range(leaves))
    assert depth == (leaves - 1).bit_length() + 1


@given(st.data(), counts)
def test_partial_sum_in_any_order_equals_its_cover(data: st.DataObject, leaves: int) -> None:
    chosen = data.draw(st.lists(st.integers(0, leaves - 1), unique=True))
    growing: PartialSums[str] = PartialSums(leaves, add_as_text)
    for n, leaf in enumerate(chosen, 1):
        growing.add((leaf, leaf + 1), str(leaf))
        assert tuple(node for node, _ in growing.parts) == minimal_cover(leaves, chosen[:n])
    assert dict(growing.parts) == {node: sum_by_recursion(node) for node in minimal_cover(leaves, chosen)}


@pytest.mark.promise("exact-mode")
@pytest.mark.parametrize("deal", [contiguous_virtual_ranks, interleaved_virtual_ranks])
@given(data=st.data(), virtual=counts)
def test_sum_is_bit_identical_on_any_number_of_ranks(
    deal: Callable[[int, int, int], range], data: st.DataObject, virtual: int
) -> None:
    world = data.draw(st.integers(1, virtual))
    chance = random.Random(virtual)
    values = [chance.uniform(-1, 1) * 10 ** chance.randint(-8, 8) for _ in range(virtual)]
    parts: dict[TreeNode, float] = {}
    for rank in range(world):
        mine = deal(rank, world, virtual)
        partial: PartialSums[float] = PartialSums(virtual, lambda a, b: a + b)
        for v in mine:
            partial.add((v, v + 1), values[v])
        parts |= dict(partial.parts)

    def sequential(node: TreeNode) -> float:
        return (
            values[node[0]] if node[1] - node[0] == 1 else sequential(children(node)[0]) + sequential(children(node)[1])
        )

    assert sum_subtree((0, virtual), parts, lambda a, b: a + b) == sequential((0, virtual))


@pytest.mark.parametrize("deal", [contiguous_virtual_ranks, interleaved_virtual_ranks])
@given(data=st.data(), virtual=counts)
def test_virtual_ranks_are_dealt_evenly(
    deal: Callable[[int, int, int], range], data: st.DataObject, virtual: int
) -> None:
    world = data.draw(st.integers(1, virtual))
    played = [deal(rank, world, virtual) for rank in range(world)]
    assert sorted(v for mine in played for v in mine) == list(range(virtual))
    assert {len(mine) for mine in played} <= {virtual // world, virtual // world + 1}


def test_more_ranks_than_virtual_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="virtual_ranks=5 or more"):
        VirtualMean(4, 0, 5, CollectiveTimer(bool))
