"""The mean over all virtual ranks of what each rank has of its own, the same to the last bit on any number of ranks.

Each rank adds up the subtrees that it has whole. An all-to-all hands each rank its slice of all of them, it adds along
the rest of the tree, an all-gather hands the sums back. The wire carries a ring's bytes times the subtrees of a rank,
of which there are at most 2 log2(V), and one where V divides by a power of two of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from trainer_hooks.exact.assign import virtual_of
from trainer_hooks.exact.tree import Add, Node, Partial, cover, fold
from trainer_hooks.waits import Waits

_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""By its name from torch 2.13 on; the older one warns there."""


class Room:
    """Memory of a mean that is taken in every step: pages are touched once."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def of(self, name: str, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Zeros at first, then what was left there."""
        if name not in self._tensors:
            self._tensors[name] = like.new_zeros(shape)
        return self._tensors[name]


class VirtualMean:
    """One rank's part in means over ``virtual_ranks``; without a process group it plays them all."""

    def __init__(self, virtual_ranks: int, rank: int, world_size: int, waits: Waits) -> None:
        self.virtual_ranks = virtual_ranks
        self.mine = virtual_of(rank, world_size, virtual_ranks)
        self._waits = waits
        ranges = [virtual_of(r, world_size, virtual_ranks) for r in range(world_size)]
        self._covers = [cover(virtual_ranks, r.start, r.stop) for r in ranges]
        self._rank = rank

    def partial(self, add: Add[torch.Tensor] = torch.Tensor.add_) -> Partial[torch.Tensor]:
        """For this rank's own values, one of each of its virtual ranks, in their order; ``add`` is ``add_`` to all."""
        return Partial(self.virtual_ranks, self.mine.start, add)

    def mean(self, partial: Partial[torch.Tensor], room: Room) -> torch.Tensor:
        """The mean of all virtual ranks' values, which are ``[n]`` of one dtype and device. A collective.

        It lies in ``room``, or where a value did.
        """
        parts = partial.parts
        assert tuple(node for node, _ in parts) == self._covers[self._rank], "one value of each virtual rank"
        if len(self._covers) == 1:
            return self._fold(dict(parts))
        count, width = parts[0][1].numel(), self._width(parts[0][1].numel())
        sent = room.of("sent", parts[0][1], len(self._covers), len(parts), width)
        for i, (_, values) in enumerate(parts):
            for r, piece in enumerate(torch.split(values, width)):
                sent[r, i, : piece.numel()] = piece
        mine = self._fold(self._exchange(sent, width, room))
        whole = room.of("whole", mine, len(self._covers) * width)
        with self._waits.on(mine.device):
            _all_gather(whole, mine)
        return whole[:count]

    def mean_of(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """The same of one scalar of each of this rank's virtual ranks."""
        partial = self.partial()
        for value in values:
            partial.append(value.detach().clone().reshape(1))
        return self.mean(partial, Room())[0]

    def _width(self, count: int) -> int:
        return max(1, -(-count // len(self._covers)))

    def _exchange(self, sent: torch.Tensor, width: int, room: Room) -> dict[Node, torch.Tensor]:
        """This rank's slice of every rank's subtrees."""
        sizes = [len(nodes) * width for nodes in self._covers]
        received = room.of("received", sent, sum(sizes))
        own = [sent.shape[1] * width] * len(self._covers)
        with self._waits.on(sent.device):
            dist.all_to_all_single(received, sent.view(-1), output_split_sizes=sizes, input_split_sizes=own)
        nodes = [node for nodes in self._covers for node in nodes]
        return dict(zip(nodes, received.view(-1, width), strict=True))

    def _fold(self, parts: dict[Node, torch.Tensor]) -> torch.Tensor:
        """Divided here and nowhere else: where one divides is part of the rounding."""
        total = fold((0, self.virtual_ranks), parts, torch.Tensor.add_)
        return total.div_(self.virtual_ranks)
