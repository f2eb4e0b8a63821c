"""A tracked object that lists its shards, as a framework without DTensors would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from everstep.layout.manifests import Box
from everstep_trainer.state.sharded_state import Shard, ShardedState

LENGTH = 10  # divides neither by 3 nor by 4


class SlicedState(ShardedState):
    """A rank's slice of a flat tensor of master weights, which an optimizer trains."""

    def __init__(self, rank: int, world: int) -> None:
        self.size = -(-LENGTH // world)
        self.start = min(rank * self.size, LENGTH)
        self.master = [torch.arange(self.start, self.start + self.size, dtype=torch.float32).requires_grad_()]
        self.optimizer = torch.optim.Adam(self.master)

    def shards(self) -> Iterator[Shard]:
        length = min(self.size, LENGTH - self.start)
        moments = self.optimizer.state.get(self.master[0], {})
        held: list[tuple[str, Any, Any]] = [("master", self.master, 0)]
        held += [(key, moments, key) for key in moments if key != "step"]
        for name, container, key in held if length else ():
            local = container[key].detach().narrow(0, 0, length)
            yield Shard(name, (LENGTH,), Box((self.start,), (length,)), local, container, key)

    def is_complete(self) -> bool:
        return bool(self.optimizer.state)

    def create_missing(self, stored: Mapping[str, torch.dtype]) -> None:
        for key, dtype in stored.items():
            if key != "master":
                self.optimizer.state[self.master[0]][key] = torch.zeros(self.size, dtype=dtype)

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def state_dict(self) -> dict[str, Any]:
        return {"lr": self.optimizer.param_groups[0]["lr"]}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self.optimizer.param_groups[0]["lr"] = stored["lr"]

    def update(self) -> None:
        self.master[0].grad = torch.ones(self.size)
        self.optimizer.step()
