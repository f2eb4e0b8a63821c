"""Compute the digest that equal replicas must agree on: a position-weighted sum modulo 2^64 with odd random weights.

Odd weights detect every single flipped bit. Random weights detect the structured patterns of broken hardware that XOR
fingerprints miss (even counts of the same bit, lane swaps, stuck tiles). The sum does not depend on the order of
summation. As an integer matrix-vector product it runs near memory speed without Python's lock. The digest covers
parameters: a corrupted moment reaches its parameter at the next step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

WORD_BYTES = 8
ROW_WORDS = 32768  # a row of weights is 256 KiB: it stays in the second-level cache while the data streams past
ROW_BYTES = ROW_WORDS * WORD_BYTES
BLOCK_ROWS = 1024  # rows multiplied at once, 256 MiB: bounds the intermediate product on a GPU
SMALL_BYTES = 64 << 10  # smaller tensors are gathered first: a product has a fixed cost of some microseconds
_SEED = 0x45565253544550
_MASK = (1 << 64) - 1


@cache
def _row_weights(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(_SEED)
    draws = torch.randint(-(1 << 63), (1 << 63) - 1, (ROW_WORDS,), generator=generator)
    return (draws | 1).to(device)


def _mix(n: int) -> int:
    """Return the weight of row ``n``: splitmix64, made odd."""
    z = (n + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return (z ^ (z >> 31)) | 1


class WeightedDigest:
    """The digest of a fixed list of tensors; its buffers are on the first one's device. For one thread at a time."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device if tensors else torch.device("cpu")
        small = [t for t in tensors if 0 < t.nbytes <= SMALL_BYTES]
        large = [t for t in tensors if t.nbytes > SMALL_BYTES]
        self._weights = _row_weights(device)
        buffer, places = _gather_buffer(small, device)
        self._copies = list(zip(places, small, strict=True))
        self._flat = [self._as_uint32_words(t, device) for t in large] + [buffer]
        rows = sum(-(-flat.numel() // ROW_BYTES) for flat in self._flat)
        keys = torch.tensor([_mix(n) for n in range(rows)], dtype=torch.uint64)
        self._row_keys = keys.view(torch.int64).to(device)
        self._sums = torch.zeros(rows, dtype=torch.int64, device=device)

    def _as_uint32_words(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the tensor's bytes in place, or a buffer to copy them to if they cannot be read there as words."""
        if tensor.device == device and tensor.is_contiguous() and tensor.data_ptr() % WORD_BYTES == 0:
            return tensor.detach().reshape(-1).view(torch.uint8)
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        self._copies.append((copy, tensor.detach()))
        return copy.reshape(-1).view(torch.uint8)

    def enqueue(self) -> torch.Tensor:
        """Return the digest as a tensor of one signed 64-bit number; on a GPU it is only enqueued."""
        with torch.no_grad():
            if self._copies:
                torch._foreach_copy_([to for to, _ in self._copies], [of for _, of in self._copies])
            row = 0
            for flat in self._flat:
                row = self._add_rows(flat, row)
            return (self._sums * self._row_keys).sum()

    def value(self) -> int:
        """Return the digest, 0 to 2^64 - 1."""
        return to_unsigned(self.enqueue())

    def _add_rows(self, flat: torch.Tensor, row: int) -> int:
        """Write the weighted sums of ``flat``'s rows from ``row`` on; return the row after them."""
        words = flat[: flat.numel() // WORD_BYTES * WORD_BYTES].view(torch.int64)
        full = words.numel() // ROW_WORDS
        for first in range(0, full, BLOCK_ROWS):
            some = words[first * ROW_WORDS : min(first + BLOCK_ROWS, full) * ROW_WORDS].view(-1, ROW_WORDS)
            # CUDA has no integer matrix product
            sums = torch.mv(some, self._weights) if some.device.type == "cpu" else (some * self._weights).sum(dim=1)
            self._sums[row + first : row + first + len(some)] = sums
        rest, tail = words[full * ROW_WORDS :], flat[words.numel() * WORD_BYTES :]
        if rest.numel() or tail.numel():
            self._sums[row + full] = self._weighted(rest) + self._weighted(tail.to(torch.int64), rest.numel())
        return row + -(-flat.numel() // ROW_BYTES)

    def _weighted(self, words: torch.Tensor, first: int = 0) -> torch.Tensor:
        return (words * self._weights[first : first + words.numel()]).sum()


def to_unsigned(digest: torch.Tensor) -> int:
    """Return an enqueued digest as a number from 0 to 2^64 - 1. Waits for the GPU."""
    return int(digest.item()) & _MASK


def _gather_buffer(tensors: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one buffer for the small tensors, each aligned to a word, and their views in it."""
    starts, at = [], 0
    for tensor in tensors:
        starts.append(at)
        at += -(-tensor.nbytes // WORD_BYTES) * WORD_BYTES
    buffer = torch.zeros(at, dtype=torch.uint8, device=device)
    places = [buffer[at : at + t.nbytes].view(t.dtype).view(t.shape) for at, t in zip(starts, tensors, strict=True)]
    return buffer, places
