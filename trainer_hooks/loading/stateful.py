"""torchdata's StatefulDataLoader among tracked objects: a state that is one rank's, and fits no other."""

from __future__ import annotations

import sys
from typing import Any

from trainer_hooks.loading.workers import end_workers
from trainer_hooks.one_rank import OfOneRank

_MEND = (
    "Use run.loader, whose samples are a function of the step, or go on with the ranks that there were "
    "(everstep-launch --nnodes N:N)"
)


def is_stateful_loader(tracked: object) -> bool:
    """Whether it is one; torchdata need not be installed."""
    module = sys.modules.get("torchdata.stateful_dataloader")
    return module is not None and isinstance(tracked, module.StatefulDataLoader)


class OwnLoader(OfOneRank):
    """Stands in for a StatefulDataLoader.

    Where workers are, and how far each was, is a matter of one rank; no other number of ranks can go on from there
    without samples that are skipped or repeated.

    Ranks count as data goes by them (``Run.data_parallel``): those of one replica are at the same samples.
    """

    def __init__(self, loader: Any, rank: int, world_size: int) -> None:
        super().__init__(
            loader, rank, world_size, called="a StatefulDataLoader", ranks="data-parallel rank", mend=_MEND
        )

    def close(self) -> None:
        """Ends the workers; does not wait for them."""
        iterator = getattr(self._tracked, "_iterator", None)
        if iterator is not None:
            end_workers(iterator)
