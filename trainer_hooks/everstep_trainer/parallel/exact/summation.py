"""Compute means over all virtual ranks with the same bits on any number of physical ranks.

Each rank adds up the subtrees that it has completely. An all-to-all gives each rank its slice of all of them, it adds
along the rest of the tree, and an all-gather returns the sums. The traffic is a ring's bytes times the subtrees of a
rank: at most 2 log2(V), and one if V divides by a power of two of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial as partial_of
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from everstep_trainer.base.progress import CollectiveTimer
from everstep_trainer.parallel.lane import Communicator, Lane, all_gather

# ---- assignment of virtual ranks to physical ranks


def contiguous_virtual_ranks(rank: int, world_size: int, virtual_ranks: int) -> range:
    """Return the virtual ranks of ``rank``: neighbours, whose values can be added before they are sent."""
    return range(rank * virtual_ranks // world_size, (rank + 1) * virtual_ranks // world_size)


def interleaved_virtual_ranks(rank: int, world_size: int, virtual_ranks: int) -> range:
    """Return the virtual ranks of ``rank``, interleaved, so that the n-th ones of all ranks can be added at once."""
    return range(rank, virtual_ranks, world_size)


# ---- tree: the order in which leaves are summed, one binary tree whichever rank holds them
#
# A node is the range ``[first, last)`` of its leaves. It is cut after the largest power of two of leaves that is less
# than it has, so the number of leaves alone determines a tree. Floating-point addition is not associative: sums are
# certain to have equal bits only along the same tree.

T = TypeVar("T")
TreeNode = tuple[int, int]
Add = Callable[[T, T], T]  # ``add(left, right)``; may overwrite ``left``, and receives neither of them again


def children(node: TreeNode) -> tuple[TreeNode, TreeNode]:
    """Return the two children of a node of two leaves or more."""
    first, last = node
    middle = first + (1 << ((last - first - 1).bit_length() - 1))
    return (first, middle), (middle, last)


def minimal_cover(leaves: int, chosen: Iterable[int]) -> tuple[TreeNode, ...]:
    """Return the fewest nodes that together have the chosen leaves and no others, from left to right."""
    nodes: PartialSums[None] = PartialSums(leaves, lambda left, right: None)
    for leaf in chosen:
        nodes.add((leaf, leaf + 1), None)
    return tuple(node for node, _ in nodes.parts)


def sum_subtree(node: TreeNode, parts: Mapping[TreeNode, T], add: Add[T]) -> T:
    """Return the sum of a node from sums of nodes below it; ``parts`` covers the node once, with nodes of its tree."""
    if node in parts:
        return parts[node]
    left, right = children(node)
    return add(sum_subtree(left, parts, add), sum_subtree(right, parts, add))


class PartialSums(Generic[T]):
    """Sums of nodes that arrive in any order, each leaf once, holding as few values as possible."""

    def __init__(self, leaves: int, add: Add[T]) -> None:
        self._leaves, self._add = leaves, add
        self._held: dict[TreeNode, T] = {}

    def add(self, node: TreeNode, value: T) -> None:
        """Add the value of a leaf or a whole node."""
        while node != (0, self._leaves):
            left, right = children(self._parent(node))
            other = right if node == left else left
            if other not in self._held:
                break
            known = self._held.pop(other)
            value = self._add(value, known) if node == left else self._add(known, value)
            node = (left[0], right[1])
        self._held[node] = value

    @property
    def parts(self) -> list[tuple[TreeNode, T]]:
        """One value for each node of the minimal cover of the added leaves, from left to right."""
        return sorted(self._held.items(), key=lambda part: part[0])

    def _parent(self, node: TreeNode) -> TreeNode:
        parent = (0, self._leaves)
        while node not in (below := children(parent)):
            parent = below[0] if node[1] <= below[0][1] else below[1]
        return parent


class Workspace:
    """Reused memory for a mean in every step, so that pages are touched once."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[object, ...], torch.Tensor] = {}
        self._halves: list[Workspace] = []

    def half(self, number: int) -> Workspace:
        """Return one of two further workspaces, for exchanges of which one begins before the one before has ended."""
        self._halves = self._halves or [Workspace(), Workspace()]
        return self._halves[number % 2]

    def get(self, name: str, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return a tensor: zeros at first, later with its old content."""
        key = (name, like.dtype, like.device, shape)
        if key not in self._tensors:
            self._tensors[key] = like.new_zeros(shape)
        return self._tensors[key]


def exchange_slices(
    parts: Sequence[tuple[TreeNode, torch.Tensor]],
    covers: Sequence[tuple[TreeNode, ...]],
    like: torch.Tensor,
    workspace: Workspace,
    communicator: Communicator,
) -> dict[TreeNode, torch.Tensor]:
    """Return this rank's slice of all ranks' parts: ``[ceil(n / ranks)]`` per node. A collective. ``parts``: this
    rank's ``[n]`` per node; ``covers``: each rank's nodes; ``like``: ``[n]``, for a rank without values."""
    width = max(1, -(-like.numel() // len(covers)))
    sent = workspace.get("sent", like, len(covers), len(parts), width)
    for i, (_, values) in enumerate(parts):
        for r, piece in enumerate(torch.split(values, width)):
            sent[r, i, : piece.numel()] = piece
    sizes = [len(nodes) * width for nodes in covers]
    received = workspace.get("received", like, sum(sizes))
    own = [len(parts) * width] * len(covers)
    communicator.all_to_all(received, sent.view(-1), sizes, own)
    nodes = [node for nodes in covers for node in nodes]
    return dict(zip(nodes, received.view(-1, width), strict=True))


EXCHANGED_ELEMENTS = 1 << 22
"""Elements of a mean that are exchanged together; the next ones are added meanwhile."""


class VirtualMean:
    """One rank's part in means over ``virtual_ranks``; without a process group it plays them all."""

    def __init__(
        self, virtual_ranks: int, rank: int, world_size: int, timer: CollectiveTimer, lane: Lane | None = None
    ) -> None:
        """Make the part of ``rank``. ``lane``: over all ranks, if there are several."""
        if virtual_ranks < world_size:
            raise ValueError(
                f"{virtual_ranks} virtual ranks leave some of {world_size} ranks without work: "
                f"take virtual_ranks={world_size} or more (any number, the same throughout a run)"
            )
        self.virtual_ranks, self.world_size = virtual_ranks, world_size
        self.timer, self.lane, self._rank = timer, lane, rank
        self._assign_virtual_ranks(contiguous_virtual_ranks)

    def interleave_ranks(self) -> None:
        """Use ``interleaved_virtual_ranks`` from now on. Before the first step, on all ranks."""
        self._assign_virtual_ranks(interleaved_virtual_ranks)

    def _assign_virtual_ranks(self, assign: Callable[[int, int, int], range]) -> None:
        of_all = [assign(rank, self.world_size, self.virtual_ranks) for rank in range(self.world_size)]
        self.mine = of_all[self._rank]
        self.passes = max(map(len, of_all))
        self._covers = [minimal_cover(self.virtual_ranks, leaves) for leaves in of_all]

    def new_partial_sums(self, add: Add[torch.Tensor] = torch.Tensor.add_) -> PartialSums[torch.Tensor]:
        """Return empty sums for this rank's own values, one per virtual rank."""
        return PartialSums(self.virtual_ranks, add)

    def mean(self, partial: PartialSums[torch.Tensor], workspace: Workspace) -> torch.Tensor:
        """Return the mean of all virtual ranks' values, ``[n]``, in ``workspace`` or a value's memory. A collective."""
        parts = partial.parts
        assert tuple(node for node, _ in parts) == self._covers[self._rank], "one value of each virtual rank"
        if self.lane is None:
            return self._mean_of_parts(dict(parts))
        like, world = parts[0][1], self.world_size
        whole = workspace.get("whole", like, like.numel() + world)
        step = max(1, EXCHANGED_ELEMENTS // world) * world
        for number, begin in enumerate(range(0, like.numel(), step)):
            some = [(node, values[begin : begin + step]) for node, values in parts]
            self.lane.submit(partial_of(self._mean_of_some, some, whole[begin:], workspace.half(number)))
        self.lane.wait()
        return whole[: like.numel()]

    def _mean_of_some(
        self,
        parts: Sequence[tuple[TreeNode, torch.Tensor]],
        whole: torch.Tensor,
        workspace: Workspace,
        communicator: Communicator,
    ) -> Iterator[None]:
        """Write the mean of these elements to the begin of ``whole``."""
        mine = self._mean_of_parts(exchange_slices(parts, self._covers, parts[0][1], workspace, communicator))
        width = mine.numel()
        slices = workspace.get("slices", mine, self.world_size, width)
        slices[0] = mine
        wait = communicator.all_gather(whole[: self.world_size * width], slices, [width] * self.world_size)
        yield
        wait()

    def mean_of_scalars(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the mean of one scalar per virtual rank; those of repeated passes come last and are ignored."""
        partial = self.new_partial_sums()
        for leaf, value in zip(self.mine, values[: len(self.mine)], strict=True):
            partial.add((leaf, leaf + 1), value.detach().clone().reshape(1))
        return self.mean(partial, Workspace())[0]

    def _mean_of_parts(self, parts: dict[TreeNode, torch.Tensor]) -> torch.Tensor:
        """Return the sum divided by the number of virtual ranks; the place of the division affects the rounding."""
        total = sum_subtree((0, self.virtual_ranks), parts, torch.Tensor.add_)
        return total.div_(self.virtual_ranks)


# ---- norm of gradients, added in an order that does not depend on sharding
#
# A row of a parameter (along the sharded dimension, or the first if unsharded) is on one rank. Ranks add the squares of
# their rows, and each adds the sums of all rows. Halves are added element by element: sum kernels use another order for
# other shapes and numbers of threads.

_EPSILON = 1e-6  # added to the norm, as by torch.nn.utils.clip_grad_norm_


@torch.no_grad()
def clip_grad_norm_fixed_order(params: Iterable[torch.Tensor], max_norm: float, timer: CollectiveTimer) -> torch.Tensor:
    """Scale gradients to a 2-norm of at most ``max_norm`` as torch does; a collective if they are sharded. Returns the
    norm before: a scalar of float32, or float64 if a gradient is. Raises TypeError for an unknown layout."""
    if isinstance(params, torch.Tensor):
        params = [params]
    gradients = [parameter.grad for parameter in params if parameter.grad is not None]
    if not gradients:
        return torch.zeros(())
    squares = _of_all_rows([_rows(gradient) for gradient in gradients], gradients, timer)
    norm = _pairwise(torch.stack([_pairwise(rows[None])[0] for rows in squares])[None])[0].sqrt()
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for gradient in gradients:
        _local(gradient).mul_(scale)
    return norm


def _of_all_rows(
    squares: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], waits: CollectiveTimer
) -> Sequence[torch.Tensor]:
    """Return the sums of squares of all rows of each gradient, from those of the local rows."""
    every = list(squares)
    by_group: dict[dist.ProcessGroup, list[int]] = {}
    for place, gradient in enumerate(gradients):
        if isinstance(gradient, DTensor) and gradient.device_mesh.size(-1) > 1:
            mesh = gradient.device_mesh
            by_group.setdefault(mesh.get_group(mesh.ndim - 1), []).append(place)
    for group, places in by_group.items():
        ways = dist.get_world_size(group)
        counts = [gradients[place].shape[_dim(gradients[place])] for place in places]
        widths = [-(-count // ways) for count in counts]
        dtype = torch.float64 if any(squares[p].dtype == torch.float64 for p in places) else torch.float32
        own = squares[places[0]].new_zeros(sum(widths), dtype=dtype)
        for place, piece in zip(places, torch.split(own, widths), strict=True):
            piece[: squares[place].numel()] = squares[place]
        whole = own.new_empty(ways * own.numel())
        with waits.measure(own.device):
            all_gather(whole, own, group=group)
        for place, count, rows in zip(places, counts, torch.split(whole.view(ways, -1), widths, dim=1), strict=True):
            every[place] = rows.reshape(-1)[:count].to(squares[place].dtype)
    wide = torch.float64 if any(rows.dtype == torch.float64 for rows in every) else torch.float32
    return [rows.to(wide) for rows in every]


def _rows(gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each local row, ``[rows]`` in float32 or float64."""
    local = _local(gradient)
    if local.ndim == 0:
        local = local[None]
    moved = local.movedim(_dim(gradient), 0)
    width = moved.shape[1:].numel()
    wide = torch.float64 if local.dtype == torch.float64 else torch.float32
    return _pairwise(moved.reshape(moved.shape[0], width).to(wide).square())


def _pairwise(values: torch.Tensor) -> torch.Tensor:
    """Reduce ``[n, m]`` to ``[n]`` by adding the right half to the left one repeatedly. Overwrites ``values``."""
    while (width := values.shape[1]) > 1:
        half = (width + 1) // 2
        values[:, : width - half] += values[:, half:]
        values = values[:, :half]
    return values.sum(1) if values.shape[1] == 0 else values[:, 0]


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _dim(gradient: torch.Tensor) -> int:
    """Return the sharded dimension."""
    if not isinstance(gradient, DTensor):
        return 0
    *replicated, shard = gradient.placements
    if not isinstance(shard, Shard) or not all(isinstance(placement, Replicate) for placement in replicated):
        raise TypeError(f"a gradient is laid out as {gradient.placements}: only layouts of fully_shard are supported")
    return shard.dim
