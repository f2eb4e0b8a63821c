"""torchdata's StatefulDataLoader among tracked objects: a state that is one rank's, and fits no other."""

from __future__ import annotations

import sys
from typing import Any

from everstep.errors import NotRestorable
from trainer_hooks.loading.loader import end_workers

_MEND = (
    "Use run.loader, whose samples are a function of the step, or go on with the ranks that there were "
    "(everstep-launch --nnodes N:N)"
)


def is_stateful_loader(tracked: object) -> bool:
    """Whether it is one; torchdata need not be installed."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(tracked, module.StatefulDataLoader)


class OfOneRank:
    """Stands in for a StatefulDataLoader: its state is given back to the rank that stored it, at the same world size.

    Where workers are, and how far each was, is a matter of one rank; no other number of ranks can go on from there
    without samples that are skipped or repeated. ``load_state_dict`` raises NotRestorable there.

    Ranks count as data goes by them (``Run.data_parallel``): those of one replica are at the same samples.
    """

    def __init__(self, loader: Any, rank: int, world_size: int) -> None:
        self._loader = loader
        self._rank = rank
        self._world = world_size

    def state_dict(self) -> dict[str, Any]:
        return {"rank": self._rank, "world_size": self._world, "state": self._loader.state_dict()}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        if stored["world_size"] != self._world:
            raise NotRestorable(
                f"a StatefulDataLoader was stored on {stored['world_size']} data-parallel ranks, and there are "
                f"{self._world} now: its state cannot be split anew. {_MEND}"
            )
        if stored["rank"] != self._rank:
            raise NotRestorable(
                f"the StatefulDataLoader of data-parallel rank {self._rank} was lost with its process, and that of "
                f"{stored['rank']} is at other samples. {_MEND}"
            )
        self._loader.load_state_dict(stored["state"])

    def close(self) -> None:
        """Ends the workers; does not wait for them."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            end_workers(iterator)
