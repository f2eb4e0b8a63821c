"""Seed random streams that do not depend on the past: one per (seed, step, replica).

A replica is one rank or, if the model is split, several ranks that draw the same numbers. Each pipeline stage has its
own stream. In exact mode a replica is a virtual rank, so that streams do not depend on the world size either.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

ALL_REPLICAS = -1  # replica number of the stream that all ranks share


def stream_seed(seed: int, step: int, replica: int, stage: int = 0) -> int:
    """Return a 63-bit seed, unrelated for neighbouring steps, replicas and stages."""
    return _hashed(f"{seed}:{step}:{replica}:{stage}" if stage else f"{seed}:{step}:{replica}")


def seed_step(seed: int, step: int, replica: int, stage: int = 0) -> None:
    """Seed torch, ``random`` and a loaded numpy. ``torch.manual_seed`` asks every kind of device: 65 us per step."""
    value = stream_seed(seed, step, replica, stage)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
    _seed_host(value)


def seed_loading(purpose: str, seed: int, *numbers: int) -> None:
    """Seed the host's streams, which no step uses, to load a ``sample``, ``batch`` or ``epoch``, by its numbers."""
    _seed_host(_hashed(":".join(map(str, (purpose, seed, *numbers)))))


def get_host_rng_state() -> tuple[Any, ...]:
    """Return the state of torch's CPU generator, ``random`` and, if it is loaded, numpy's global generator."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def set_host_rng_state(state: tuple[Any, ...]) -> None:
    """Restore what ``get_host_rng_state`` returned."""
    of_torch, of_python, of_numpy = state
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _hashed(key: str) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def _seed_host(value: int) -> None:
    torch.default_generator.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFF_FFFF)
