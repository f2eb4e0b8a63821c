"""Store a script's own random generators: torch.Generator, numpy's generators and random.Random.

Ranks may draw alike or each from a stream of its own, and may begin to differ at any step. So each rank stores its own
state, which returns to the same rank. Another rank takes it only if all stored states are equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from everstep.errors import NotRestorable
from everstep_trainer.state.python_state import FIELDS, PerRankState
from everstep_trainer.state.python_value_codec import encode_blob

_Generator = torch.Generator | np.random.Generator | np.random.BitGenerator | np.random.RandomState | random.Random


def is_generator(tracked: object) -> bool:
    """Return whether the object is a random generator whose state can be read."""
    return isinstance(tracked, _Generator) and not isinstance(tracked, random.SystemRandom)


def wrap_generators(objects: Mapping[str, object], rank: int, world_size: int) -> dict[str, object]:
    """Return the objects, random generators among them with ``state_dict`` and ``load_state_dict``."""
    return {
        key: GeneratorState(tracked, rank, world_size, key) if is_generator(tracked) else tracked
        for key, tracked in objects.items()
    }


class GeneratorState(PerRankState):
    """A tracked random generator of one rank."""

    def __init__(self, generator: Any, rank: int, world_size: int, key: str) -> None:
        fix = (
            "Its stored states differ between ranks: derive its seed from the step, or keep the number of ranks "
            "(everstep-launch --nnodes N:N)"
        )
        super().__init__(_Stateful(generator, key), rank, world_size, label=key, fix=fix)

    def is_own(self, stored: Any) -> bool:
        """Return whether this rank stored the state, among as many ranks as now."""
        is_known = isinstance(stored, Mapping) and stored.keys() == FIELDS
        return is_known and (stored["rank"], stored["world_size"]) == (self._rank, self._world)

    def adopt(self, stored: Iterable[Any]) -> Any:
        """Return the state for this rank, given several ranks' states: the first, as its own if all are equal."""
        first, *others = stored
        if not isinstance(first, Mapping) or first.keys() != FIELDS:
            return first
        wanted = encode_blob(first["state"])
        if any(encode_blob(other["state"]) != wanted for other in others):
            return first
        return {**first, "rank": self._rank, "world_size": self._world}


class _Stateful:
    """A random generator with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, generator: Any, key: str) -> None:
        self._generator, self._key = generator, key

    def state_dict(self) -> dict[str, Any]:
        return {"kind": self._kind(), "state": self._access()[0]()}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """Load the state. Raises NotRestorable for the state of another kind of generator."""
        if stored["kind"] != self._kind():
            raise NotRestorable(
                f"{self._key} is a generator of the kind {self._kind()}, and was stored as {stored['kind']}: make it "
                "as before, or leave it out of run.track to begin a new stream"
            )
        self._access()[1](stored["state"])

    def _kind(self) -> str:
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return f"torch on {generator.device.type}"
        if isinstance(generator, random.Random):
            return "random.Random"
        return f"numpy {_bit_generator(generator).state['bit_generator']}"

    def _access(self) -> tuple[Callable[[], Any], Callable[[Any], object]]:
        """Return the functions that read and write the state."""
        generator = self._generator
        if isinstance(generator, torch.Generator):
            return generator.get_state, generator.set_state
        if isinstance(generator, np.random.RandomState):  # also keeps a number drawn in advance
            return lambda: generator.get_state(legacy=False), generator.set_state
        if isinstance(generator, random.Random):
            return lambda: _packed(generator), lambda state: _load_packed(generator, state)
        bits = _bit_generator(generator)
        return lambda: bits.state, lambda state: setattr(bits, "state", state)


def _bit_generator(generator: Any) -> Any:
    if isinstance(generator, np.random.RandomState):
        return generator._bit_generator
    return generator.bit_generator if isinstance(generator, np.random.Generator) else generator


def _packed(generator: random.Random) -> list[Any]:
    """Return the state with its 625 words as an array, which is encoded 100 times as fast as a tuple."""
    version, words, gauss_next = generator.getstate()
    return [version, np.array(words, np.uint32), gauss_next]


def _load_packed(generator: random.Random, state: list[Any]) -> None:
    version, words, gauss_next = state
    generator.setstate((version, tuple(words.tolist()), gauss_next))
