"""The mean over all virtual ranks of what each rank has of its own, the same to the last bit on any number of ranks.

Each rank adds up the subtrees that it has whole. An all-to-all hands each rank its slice of all of them, it adds along
the rest of the tree, an all-gather hands the sums back. The wire carries a ring's bytes times the subtrees of a rank,
of which there are at most 2 log2(V), and one where V divides by a power of two of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from trainer_hooks.exact.assign import virtual_in_turn, virtual_of
from trainer_hooks.exact.tree import Add, Node, Partial, cover, fold
from trainer_hooks.waits import Waits

all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""By its name from torch 2.13 on; the older one warns there."""


class Room:
    """Memory of a mean that is taken in every step: pages are touched once."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[object, ...], torch.Tensor] = {}

    def of(self, name: str, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Zeros at first, then what was left there."""
        key = (name, like.dtype, like.device, shape)
        if key not in self._tensors:
            self._tensors[key] = like.new_zeros(shape)
        return self._tensors[key]


def exchange(
    parts: Sequence[tuple[Node, torch.Tensor]],
    covers: Sequence[tuple[Node, ...]],
    like: torch.Tensor,
    room: Room,
    waits: Waits,
    group: dist.ProcessGroup | None = None,
) -> dict[Node, torch.Tensor]:
    """This rank's slice of what all ranks of ``group`` have: ``[ceil(n / ranks)]`` of each node. A collective.

    Args:
        parts: what this rank has, ``[n]`` of each node.
        covers: the nodes of each rank, which all of them know.
        like: of ``[n]``, for a rank that has nothing.
    """
    width = max(1, -(-like.numel() // len(covers)))
    sent = room.of("sent", like, len(covers), len(parts), width)
    for i, (_, values) in enumerate(parts):
        for r, piece in enumerate(torch.split(values, width)):
            sent[r, i, : piece.numel()] = piece
    sizes = [len(nodes) * width for nodes in covers]
    received = room.of("received", like, sum(sizes))
    own = [len(parts) * width] * len(covers)
    with waits.on(like.device):
        dist.all_to_all_single(received, sent.view(-1), output_split_sizes=sizes, input_split_sizes=own, group=group)
    nodes = [node for nodes in covers for node in nodes]
    return dict(zip(nodes, received.view(-1, width), strict=True))


class VirtualMean:
    """One rank's part in means over ``virtual_ranks``; without a process group it plays them all."""

    def __init__(self, virtual_ranks: int, rank: int, world_size: int, waits: Waits) -> None:
        self.virtual_ranks = virtual_ranks
        self.world_size = world_size
        self.waits = waits
        self._rank = rank
        self._deal(virtual_of)

    def deal_in_turn(self) -> None:
        """Ranks play ``virtual_in_turn`` from here on. Before the first step, on all ranks."""
        self._deal(virtual_in_turn)

    def _deal(self, played: Callable[[int, int, int], range]) -> None:
        of_all = [played(rank, self.world_size, self.virtual_ranks) for rank in range(self.world_size)]
        self.mine = of_all[self._rank]
        self.passes = max(map(len, of_all))
        self._covers = [cover(self.virtual_ranks, leaves) for leaves in of_all]

    def partial(self, add: Add[torch.Tensor] = torch.Tensor.add_) -> Partial[torch.Tensor]:
        """For this rank's own values, one of each of its virtual ranks."""
        return Partial(self.virtual_ranks, add)

    def mean(self, partial: Partial[torch.Tensor], room: Room) -> torch.Tensor:
        """The mean of all virtual ranks' values, which are ``[n]`` of one dtype and device. A collective.

        It lies in ``room``, or where a value did.
        """
        parts = partial.parts
        assert tuple(node for node, _ in parts) == self._covers[self._rank], "one value of each virtual rank"
        if len(self._covers) == 1:
            return self._fold(dict(parts))
        like = parts[0][1]
        mine = self._fold(exchange(parts, self._covers, like, room, self.waits))
        whole = room.of("whole", mine, len(self._covers) * mine.numel())
        with self.waits.on(mine.device):
            all_gather(whole, mine)
        return whole[: like.numel()]

    def mean_of(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same of one scalar of each of this rank's virtual ranks. Those of repeated passes come last."""
        partial = self.partial()
        for leaf, value in zip(self.mine, values[: len(self.mine)], strict=True):
            partial.put((leaf, leaf + 1), value.detach().clone().reshape(1))
        return self.mean(partial, Room())[0]

    def _fold(self, parts: dict[Node, torch.Tensor]) -> torch.Tensor:
        """Divided here and nowhere else: where one divides is part of the rounding."""
        total = fold((0, self.virtual_ranks), parts, torch.Tensor.add_)
        return total.div_(self.virtual_ranks)
