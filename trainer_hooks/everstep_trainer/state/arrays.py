"""Tracked objects of frameworks other than torch: arrays that are replaced in each step, never changed in place.

Such an object shows its arrays as boxes of named tensors. A snapshot may then be copied at any time, since a new step
makes new arrays. A restore fills fresh memory, of which the object makes its arrays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec
import torch

from everstep.layout.manifests import Box, Extent


class ArrayPart(msgspec.Struct, frozen=True):
    """One box of an array that this rank holds."""

    name: str  # below the key of the tracked object
    shape: Extent  # of the whole array
    box: Box
    local: torch.Tensor  # contiguous memory of the size of ``box``


@runtime_checkable
class ArraySource(Protocol):
    """A tracked object that holds arrays; ``state_dict`` and ``load_state_dict`` are for its small Python state."""

    def array_parts(self) -> Sequence[ArrayPart]:
        """Return the arrays' boxes on this rank, each once; the same object until an array was replaced. The memory
        of a part stays as it is while the part is referenced."""

    def make_restore_parts(self, names: Collection[str]) -> Sequence[ArrayPart]:
        """Return the boxes of the named arrays with fresh memory, to be filled with stored values."""

    def adopt_restored(self) -> None:
        """Replace the arrays of the last ``make_restore_parts`` by its filled parts."""

    def state_dict(self) -> dict[str, Any]:
        """Return the values that are no arrays."""

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Replace the values that are no arrays."""
