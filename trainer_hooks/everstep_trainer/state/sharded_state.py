"""An object whose tensors are parts of larger ones, cut by a framework that knows no DTensor, such as ZeRO's.

Such an object lists the parts itself, each with its box in the whole. They are then stored, divided over ranks and
restored at any world size like the shards of DTensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import msgspec
import torch

from everstep.layout.manifests import Box
from everstep_trainer.state.tensors import Holder


class Shard(msgspec.Struct, frozen=True):
    """This rank's part of a tensor."""

    name: str  # of the whole tensor, below the object's key
    shape: tuple[int, ...]  # of the whole tensor
    box: Box
    local: torch.Tensor  # view of the live memory with the size of ``box``
    container: Holder  # ``container[key]`` is the tensor that ``local`` is a view of
    key: Any


class ShardedState(ABC):
    """A tracked object that lists its shards.

    All ranks must give the same shapes to the same names, and together hold every element of each tensor. Ranks may
    hold equal boxes, which must then be equal bit for bit. ``state_dict`` holds everything that is no shard, equal on
    all ranks; ``load_state_dict`` is called on all ranks once the shards are filled, so it may run collectives.
    """

    @abstractmethod
    def shards(self) -> Iterator[Shard]:
        """Yield the shards of this rank that exist now; a tensor of which it has nothing is left out."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Return whether no further shards will be made, as once an optimizer has made its state."""

    @abstractmethod
    def create_missing(self, stored: Mapping[str, torch.dtype]) -> None:
        """Create shards that exist in a version to restore, whose tensors are ``stored``, and not here yet."""

    @property
    @abstractmethod
    def optimizers(self) -> Collection[torch.optim.Optimizer]:
        """The optimizers whose state holds shards; state that a failed restore created is taken from them again."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the rest of the state."""

    @abstractmethod
    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Load the rest of the state, and update what is computed from the shards."""
