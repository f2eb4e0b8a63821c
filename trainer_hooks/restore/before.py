"""What a restore that is given up must leave no trace of: the tracked state as it was before."""

from __future__ import annotations

import torch

from trainer_hooks.state import TrackedState


class Before:
    """Tracked state as it is when this is made.

    Args:
        values: whether the tensors' values are to come back as well, of which copies are held in host memory.
    """

    def __init__(self, state: TrackedState, *, values: bool) -> None:
        self._state = state
        self._held = [(o, {parameter: dict(held) for parameter, held in o.state.items()}) for o in state.optimizers]
        live = state.tensors() if values else []
        self._values = [(tensor.local, tensor.local.to("cpu", copy=True)) for tensor in live]

    def undo(self) -> None:
        """Optimizers have the state that they had, and tensors their values, where those were to come back. Else the
        tensors hold what was tried last, for another version to be read over it."""
        for optimizer, held in self._held:
            optimizer.state.clear()
            optimizer.state.update(held)
        with torch.no_grad():
            for live, value in self._values:
                live.copy_(value)
        if self._values:
            self._state.settle()
