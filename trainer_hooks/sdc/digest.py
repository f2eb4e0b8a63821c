"""The digest that equal replicas must agree on: a position-weighted sum modulo 2^64 with odd random weights.

A sum with odd weights sees every single flipped bit, and with random ones the structured patterns that broken hardware
makes and that XOR fingerprints are blind to (even counts of the same bit, lane swaps, stuck tiles). It is independent
of the order of summation. As an integer matrix-vector product it runs near memory speed with Python's lock released.

It covers parameters. A corrupted moment reaches its parameter at the next step and is seen one step later; the shares
of the rank that is then named are replaced by the equal ones of other holders.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

WORD = 8
ROW_WORDS = 32768
"""A row of weights is 256 KiB: it stays in the second-level cache while the data streams past."""
SMALL_BYTES = 64 << 10
"""Smaller tensors are gathered into one buffer first: a product has a fixed cost of some microseconds."""
_SEED = 0x45565253544550
_MASK = (1 << 64) - 1
_weights: dict[torch.device, torch.Tensor] = {}


def _row_weights(device: torch.device) -> torch.Tensor:
    if device not in _weights:
        generator = torch.Generator().manual_seed(_SEED)
        draws = torch.randint(-(1 << 63), (1 << 63) - 1, (ROW_WORDS,), generator=generator)
        _weights[device] = (draws | 1).to(device)
    return _weights[device]


def _mix(n: int) -> int:
    """splitmix64, made odd: the weight of row ``n``."""
    z = (n + 1) * 0x9E3779B97F4A7C15 & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return (z ^ (z >> 31)) | 1


class WeightedDigest:
    """The digest of a fixed list of tensors, all on one device; buffers and weights are made once.

    Equal bytes in equal order give equal digests in any process. Not for use from two threads at once.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        large = [t for t in tensors if _viewable(t) and t.nbytes > SMALL_BYTES]
        self._gathered = [t for t in tensors if not (_viewable(t) and t.nbytes > SMALL_BYTES) and t.numel()]
        device = tensors[0].device if tensors else torch.device("cpu")
        self._weights = _row_weights(device)
        self._buffer, self._places = _gather_buffer(self._gathered, device)
        self._flat = [t.reshape(-1).view(torch.uint8) for t in large] + [self._buffer]
        rows = sum(-(-(flat.numel()) // (ROW_WORDS * WORD)) for flat in self._flat)
        mixed = [_mix(n) for n in range(rows)]
        self._row_keys = torch.tensor([m - (1 << 64) if m >> 63 else m for m in mixed], device=device)
        self._sums = torch.zeros(rows, dtype=torch.int64, device=device)

    def value(self) -> int:
        """The digest of the tensors' bytes now, 0 to 2^64 - 1."""
        with torch.no_grad():
            if self._gathered:
                torch._foreach_copy_(self._places, self._gathered)
            row = 0
            for flat in self._flat:
                row = self._add_rows(flat, row)
            return int((self._sums * self._row_keys).sum().item()) & _MASK

    def _add_rows(self, flat: torch.Tensor, row: int) -> int:
        """Writes the weighted sums of ``flat``'s rows from ``row`` on; returns the row after them."""
        words = flat[: flat.numel() // WORD * WORD].view(torch.int64)
        full = words.numel() // ROW_WORDS
        if full:
            self._sums[row : row + full] = _product(words[: full * ROW_WORDS].view(full, ROW_WORDS), self._weights)
        rest = words[full * ROW_WORDS :]
        tail = flat[words.numel() * WORD :]
        if rest.numel() or tail.numel():
            last = torch.zeros((), dtype=torch.int64, device=flat.device)
            if rest.numel():
                last = (rest * self._weights[: rest.numel()]).sum()
            if tail.numel():
                last = last + (tail.to(torch.int64) * self._weights[-tail.numel() :]).sum()
            self._sums[row + full] = last
        return row + -(-flat.numel() // (ROW_WORDS * WORD))


def _product(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Row sums. CUDA has no integer matrix product, so there the weighting and the sum are two passes."""
    return torch.mv(rows, weights) if rows.device.type == "cpu" else (rows * weights).sum(dim=1)


def _viewable(tensor: torch.Tensor) -> bool:
    """Whether the bytes can be read as 64-bit words where they lie."""
    return tensor.is_contiguous() and tensor.data_ptr() % WORD == 0


def _gather_buffer(tensors: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One buffer for the small tensors, each at a multiple of a word, and their views in it."""
    starts, at = [], 0
    for tensor in tensors:
        starts.append(at)
        at += -(-tensor.nbytes // WORD) * WORD
    buffer = torch.zeros(at, dtype=torch.uint8, device=device)
    places = [
        buffer[start : start + t.nbytes].view(t.dtype).view(t.shape) for start, t in zip(starts, tensors, strict=True)
    ]
    return buffer, places
