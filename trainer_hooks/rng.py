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
    """Seeds torch (all devices), ``random`` and, where it is loaded, numpy's global generator."""
    value = stream_seed(seed, step, rank)
    torch.manual_seed(value)
    random.seed(value)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(value & 0xFFFF_FFFF)
