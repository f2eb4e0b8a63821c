"""Make the odd random weights of digests: the same on every device, for words at any position.

Words of 8 bytes are in rows. Each half of a word is multiplied with a 32-bit weight of its column, and a row's sum with
a 64-bit key. The halves are weighted apart because of the modulus: of the product of bit 63 with a weight, only the
weight's lowest bit would be left, and all odd weights are alike in it.
"""

from __future__ import annotations

from functools import cache

import torch

WORD_BYTES = 8
ROW_WORDS = 32768  # a row of weights is 256 KiB: it stays in the second-level cache while the data streams past
ROW_BYTES = ROW_WORDS * WORD_BYTES
CACHED_ROWS = 4096  # keys of the first rows are kept on each device: those of 1 GiB
HALF_MASK = (1 << 32) - 1
_SEED = 0x45565253544550


@cache
def column_weights(device: torch.device) -> torch.Tensor:
    """Return the odd weights of a row's words, each the weights of both halves: the low half's in its low bits."""
    generator = torch.Generator().manual_seed(_SEED)
    draws = torch.randint(-(1 << 63), (1 << 63) - 1, (ROW_WORDS,), generator=generator)
    return (draws | (1 << 32 | 1)).to(device)


@cache
def split_weights(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights of whole words and of their high halves that give the same sum without low halves."""
    both = column_weights(device)
    low = both & HALF_MASK
    return low, high_half(both) - (low << 32)


def high_half(words: torch.Tensor) -> torch.Tensor:
    """Return the high halves as numbers from 0 to 2^32 - 1."""
    return (words >> 32) & HALF_MASK


def row_keys(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the odd keys of ``count`` rows from ``first`` on."""
    if first + count <= CACHED_ROWS:
        return _first_row_keys(device)[first : first + count]
    return _made_row_keys(first, count).to(device)


@cache
def _first_row_keys(device: torch.device) -> torch.Tensor:
    return _made_row_keys(0, CACHED_ROWS).to(device)


def _made_row_keys(first: int, count: int) -> torch.Tensor:
    """Return splitmix64 of the rows' numbers, made odd."""
    z = torch.arange(first + 1, first + 1 + count) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted_right(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted_right(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted_right(z, 31)) | 1


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shifted_right(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return a logical shift; torch shifts signed numbers arithmetically."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
