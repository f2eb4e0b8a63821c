"""Random streams that do not depend on what happened before: one per (seed, step, replica).

A replica is one rank or, where the model is split, several, which then draw the same; each stage of a pipeline has a
stream of its own. In exact mode it is a virtual rank, so that streams do not depend on the world size either.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

import torch

ALL_REPLICAS = -1
"""In the place of a replica: a stream that all ranks have alike."""


def stream_seed(seed: int, step: int, replica: int, stage: int = 0) -> int:
    """63 bits, unrelated for neighbouring steps, replicas and stages."""
    key = f"{seed}:{step}:{replica}:{stage}" if stage else f"{seed}:{step}:{replica}"
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_step(seed: int, step: int, replica: int, stage: int = 0) -> None:
    """Seeds torch (the CPU and all CUDA devices), ``random`` and, where it is loaded, numpy's global generator.

    Not by ``torch.manual_seed``: that asks every kind of device there could be, which costs 65 us a step.
    """
    value = stream_seed(seed, step, replica, stage)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
    _seed_host(value)


def seed_sample(seed: int, step: int, position: int) -> None:
    """The same for the sample at ``position`` of a step's global batch, on the host: streams that no rank has."""
    _seed_host(_host_seed("sample", seed, step, position))


def seed_batch(seed: int, step: int, first_position: int) -> None:
    """For what is made of the samples from ``first_position`` on, once they are there: no sample's stream."""
    _seed_host(_host_seed("batch", seed, step, first_position))


def seed_epoch(seed: int, epoch: int) -> None:
    """For an epoch of data that are read one after another, from its beginning: no sample's stream."""
    _seed_host(_host_seed("epoch", seed, epoch, 0))


def get_host_rng_state() -> tuple[Any, ...]:
    """Where torch's CPU generator, ``random`` and, where it is loaded, numpy's global one stand."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.random.get_state()


def set_host_rng_state(state: tuple[Any, ...]) -> None:
    """Back to what ``get_host_rng_state`` gave."""
    of_torch, of_python, of_numpy = state
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    if of_numpy is not None:
        sys.modules["numpy"].random.set_state(of_numpy)


def _host_seed(purpose: str, seed: int, step: int, position: int) -> int:
    digest = hashlib.blake2b(f"{purpose}:{seed}:{step}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _seed_host(value: int) -> None:
    torch.default_generator.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFF_FFFF)
