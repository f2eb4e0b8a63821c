"""Random streams that do not depend on what happened before: one per (seed, step, rank)."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def stream_seed(seed: int, step: int, rank: int) -> int:
    """63 bits, unrelated for neighbouring steps and ranks."""
    digest = hashlib.blake2b(f"{seed}:{step}:{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seeds torch (the CPU and all CUDA devices), ``random`` and, where it is loaded, numpy's global generator.

    Not by ``torch.manual_seed``: that asks every kind of device there could be, which costs 65 us a step.
    """
    value = stream_seed(seed, step, rank)
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFF_FFFF)
