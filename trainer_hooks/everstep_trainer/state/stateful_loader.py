"""Track torchdata's StatefulDataLoader, whose state belongs to one rank."""

from __future__ import annotations

import sys
from typing import Any

from everstep_trainer.data.loader import end_workers
from everstep_trainer.state.python_state import PerRankState

_FIX = (
    "Use run.loader, whose samples are a function of the step, or keep the number of ranks (everstep-launch --nnodes "
    "N:N)"
)


def is_stateful_loader(tracked: object) -> bool:
    """Return whether the object is a StatefulDataLoader; torchdata need not be installed."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(tracked, module.StatefulDataLoader)


class PerRankLoader(PerRankState):
    """A tracked StatefulDataLoader, restorable only with the same number of data-parallel ranks."""

    def __init__(self, loader: Any, rank: int, world_size: int) -> None:
        super().__init__(loader, rank, world_size, label="a StatefulDataLoader", noun="data-parallel rank", fix=_FIX)

    def close(self) -> None:
        """End the workers without waiting for them."""
        iterator = getattr(self._tracked, "_iterator", None)
        if iterator is not None:
            end_workers(iterator)
