"""Tracked objects whose state is one rank's, and fits no other: how far it has read its own file, say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from everstep.errors import NotRestorable

FIELDS = frozenset({"rank", "world_size", "state"})
"""Of what is stored of such an object."""


class OfOneRank:
    """Stands in for a tracked object: its state is given back to the rank that stored it, at the same world size.

    Args:
        called: what it is, for messages. ranks: what counts as a rank. mend: what to do where it cannot be restored.
    """

    def __init__(
        self, tracked: Any, rank: int, world_size: int, *, called: str, mend: str, ranks: str = "rank"
    ) -> None:
        self._tracked = tracked
        self._rank = rank
        self._world = world_size
        self._called = called
        self._ranks = ranks
        self._mend = mend

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self._rank, "world_size": self._world, "state": self._tracked.state_dict()}

    def load_state_dict(self, stored: Any) -> None:
        """Raises NotRestorable for the state of another rank, or of another number of them."""
        if not isinstance(stored, Mapping) or stored.keys() != FIELDS:
            raise NotRestorable(f"what is stored of {self._called} does not say whose it is. {self._mend}")
        if stored["world_size"] != self._world:
            raise NotRestorable(
                f"{self._called} was stored on {stored['world_size']} {self._ranks}s, and there are {self._world} now: "
                f"its state cannot be split anew. {self._mend}"
            )
        if stored["rank"] != self._rank:
            raise NotRestorable(
                f"{self._called} of {self._ranks} {self._rank} was lost with its process: that of "
                f"{stored['rank']} does not fit in its place. {self._mend}"
            )
        self._tracked.load_state_dict(stored["state"])


def apart(objects: Mapping[str, object], names: Sequence[str], rank: int, world_size: int) -> dict[str, object]:
    """The objects, with those of ``names`` as this rank's own. Raises TypeError or ValueError for what cannot be."""
    if isinstance(names, str):
        raise TypeError(f"per_rank takes a list of names: per_rank=[{names!r}]")
    for name in names:
        if name not in objects:
            raise ValueError(f"per_rank names {name}, which is not tracked")
        if isinstance(objects[name], torch.nn.Module | torch.optim.Optimizer | list | tuple):
            raise TypeError(f"per_rank names {name}: modules and optimizers are stored by their tensors' layout")
        if not hasattr(objects[name], "state_dict") or not hasattr(objects[name], "load_state_dict"):
            raise TypeError(
                f"{name} is a {type(objects[name]).__qualname__}, which has no state_dict and load_state_dict"
            )
    return {
        key: OfOneRank(tracked, rank, world_size, called=key, mend=_mend(key)) if key in names else tracked
        for key, tracked in objects.items()
    }


def marks_of(objects: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """For each such object a tensor of this rank's own, by its name. Checkpoints of others have none.

    A version lacks such a tensor where a rank's slot is gone, so it is not whole, and the one before serves. And what a
    rank alone has of tensors is copied to other nodes, with its Python state.
    """
    return {f"{key}.of_rank": torch.zeros(1) for key, tracked in objects.items() if isinstance(tracked, OfOneRank)}


def _mend(key: str) -> str:
    return (
        f"Derive it from the step, go on with the ranks that there were (everstep-launch --nnodes N:N), or leave {key} "
        "out of per_rank where any rank's state will do"
    )
