"""Find non-persistent buffers that training changes: running values, unlike constants and caches, must be stored.

A module declares a buffer non-persistent because it can be computed again. Most are constants, such as rotary tables,
or caches that grow. A buffer whose values change in the same form is neither.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from everstep_trainer.state.spots import Spots, SpotValues
from everstep_trainer.state.supported import unsupported_reason
from everstep_trainer.state.tensors import list_names, local_part

log = logging.getLogger(__name__)

MAX_STORED_BYTES = 16 << 20
"""Larger ones, such as key-value caches, are only named: their copies would cost each step too much."""
MAX_SHOWN = 3

NamedBuffer = tuple[str, Mapping[Any, Any], Any, torch.Tensor]
"""A buffer's full name, its container, its key there, and the buffer."""


class UnstoredBuffers:
    """Non-persistent buffers as recorded. On GPUs they are looked at ever more rarely, since a look waits for work."""

    def __init__(self, buffers: Iterable[NamedBuffer]) -> None:
        self._buffers = {
            name: (place, key, buffer)
            for name, place, key, buffer in buffers
            if not unsupported_reason(local_part(buffer)) and buffer.numel()
        }
        self._record()
        self._looks = 0
        self._large: set[str] = set()

    def pop_changing(self) -> set[str]:
        """Return the names of buffers to be stored from now on, and forget them; warn once of those too large."""
        found = self._replaced()
        self._looks += 1
        for names, spots, before in self._read:
            # the numbers of looks at which a GPU is waited for are powers of two
            if spots.is_on_gpu and (self._looks & (self._looks - 1)):
                continue
            if spots.is_in_place():
                found |= {names[index] for index in spots.changed(before, spots.read(again=True))}
        if not found:
            return found
        large = {name for name in found if self._buffers[name][2].nbytes > MAX_STORED_BYTES}
        self._warn_large(large - self._large)
        self._large |= large
        for name in found:
            del self._buffers[name]
        self._record()
        return found - large

    def _replaced(self) -> set[str]:
        """Return the names of buffers that were replaced by others of the same form and other values."""
        others = {name: (place, key, place.get(key)) for name, (place, key, _) in self._buffers.items()}
        others = {name: other for name, other in others.items() if other[2] is not self._buffers[name][2]}
        found = set()
        for name, (place, key, other) in others.items():
            buffer = self._buffers.pop(name)[2]
            if other is None or unsupported_reason(local_part(other)) or not other.numel():
                continue
            self._buffers[name] = place, key, other
            if (other.shape, other.dtype, other.device) == (buffer.shape, buffer.dtype, buffer.device):
                one, two = Spots([local_part(buffer)]), Spots([local_part(other)])
                if one.changed(one.read(), two.read()):
                    found.add(name)
        if others:
            self._record()
        return found

    def _record(self) -> None:
        self._read: list[tuple[list[str], Spots, SpotValues]] = []
        for on_gpu in (False, True):
            names = [name for name, (_, _, buffer) in self._buffers.items() if buffer.is_cuda == on_gpu]
            if names:
                spots = Spots([local_part(self._buffers[name][2]).detach() for name in names])
                self._read.append((names, spots, spots.read()))

    def _warn_large(self, names: set[str]) -> None:
        if names:
            log.warning(
                "%s changes in training, is a non-persistent buffer, and too large to be stored each step: after a "
                "loss it begins anew. Make it persistent to store it; ignore this if it is computed again",
                list_names(sorted(names), MAX_SHOWN),
            )
