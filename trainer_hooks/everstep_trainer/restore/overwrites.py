"""Detect restored tensors that the training function overwrites before its first step, as by a checkpoint of its own.

A script that loads its last file after ``run.track`` replaces newer state by older, and counts steps from the newer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from everstep_trainer.state.spots import Spots, SpotValues
from everstep_trainer.state.tensors import list_names
from everstep_trainer.state.tracked_state import TrackedState

log = logging.getLogger(__name__)

MAX_SHOWN = 3


class RestoredValues:
    """A few bytes of each parameter and of its optimizer state, as restored."""

    def __init__(self, state: TrackedState) -> None:
        self._state = state
        self._tensors = state.named_tensors()
        self._read = [(names, spots, spots.read()) for names, spots in _spots(self._tensors)]

    def overwritten(self) -> list[str]:
        """Return the names of tensors with other values now. Waits for GPUs."""
        now = self._state.named_tensors()
        found: list[str] = []
        for names, spots, before in self._read:
            # under FSDP a forward pass replaces shards by whole parameters, which are not comparable
            current = [now.get(name, self._tensors[name]) for name in names]
            alike = [
                tensor if _form(tensor) == _form(self._tensors[name]) else self._tensors[name]
                for name, tensor in zip(names, current, strict=True)
            ]
            after: SpotValues = Spots(alike).read()
            found += [names[index] for index in spots.changed(before, after)]
        return found

    def warn_if_overwritten(self, step: int, log_fields: Mapping[str, object], *, level: int = logging.WARNING) -> None:
        """Log tensors that no longer have the values of ``step``, which was restored."""
        if names := self.overwritten():
            log.log(
                level,
                "%s changed after run.track had restored step %d, so training continues after that step with other "
                "values. Load a checkpoint of your own before run.track, or only if run.last_finished_step is 0",
                list_names(names, MAX_SHOWN),
                step,
                extra=dict(log_fields),
            )


def _spots(tensors: Mapping[str, torch.Tensor]) -> list[tuple[list[str], Spots]]:
    """Return places in the tensors, apart for those on the host and on GPUs, with their names."""
    sides = [[name for name, tensor in tensors.items() if tensor.is_cuda == on_gpu] for on_gpu in (False, True)]
    return [(names, Spots([tensors[name] for name in names])) for names in sides if names]


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device
