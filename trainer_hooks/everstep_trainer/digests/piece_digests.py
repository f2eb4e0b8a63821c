"""Compute the digests of several tensors that add up, modulo 2^64, to their `combined_digest`.

Each tensor has a place in the combined digest, which follows from the sizes and dtypes of all. So a device can digest
any of the tensors in a few passes, and compare the sum with the sum of digests that were kept one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from everstep.native import CopyHash, copy_hash
from everstep_trainer.digests.digest import GROUP_BYTES, SMALL_BYTES, add_bytes, tensor_digest
from everstep_trainer.digests.digest_weights import ROW_BYTES, ROW_WORDS, WORD_BYTES, column_weights, row_keys


def places_of(kinds: Iterable[tuple[torch.dtype, int]]) -> list[int]:
    """Return the byte at which each of several tensors begins in their `combined_digest`, by dtypes and sizes."""
    places: dict[int, int] = {}
    small: dict[torch.dtype, list[tuple[int, int]]] = {}
    at = 0
    for index, (dtype, nbytes) in enumerate(kinds):
        if nbytes > SMALL_BYTES:
            places[index] = at
            at += -(-nbytes // ROW_BYTES) * ROW_BYTES
        else:
            small.setdefault(dtype, []).append((index, nbytes))
    for group in small.values():
        for index, nbytes in group:
            places[index] = at
            at += nbytes
        at = -(-at // GROUP_BYTES) * GROUP_BYTES
    return [places[index] for index in range(len(places))]


def separate_digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digest of each tensor at its place, which add up to `combined_digest`. For tensors on the host."""
    places = places_of((tensor.dtype, tensor.nbytes) for tensor in tensors)
    if copy_hash is not None:
        return torch.tensor(_weigh_each(copy_hash, tensors, places), dtype=torch.int64)
    digests = [digest_at(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
    return torch.stack(digests) if digests else torch.zeros(0, dtype=torch.int64)


def _weigh_each(native: CopyHash, tensors: Sequence[torch.Tensor], places: Sequence[int]) -> list[int]:
    """Return each digest by one call of the library, some microseconds for a small tensor."""
    plain = [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
    parts = np.array([(tensor.data_ptr(), tensor.nbytes) for tensor in plain], np.int64).reshape(-1, 2).T.copy()
    sources, sizes = (column.ctypes.data for column in parts)
    end = max((place + tensor.nbytes for place, tensor in zip(places, plain, strict=True)), default=0)
    keys = row_keys(0, -(-end // ROW_BYTES), torch.device("cpu"))
    weights, first_key = column_weights(torch.device("cpu")).data_ptr(), keys.data_ptr()
    found = []
    for number, place in enumerate(places):
        row, column = divmod(place, ROW_BYTES)
        at, key = WORD_BYTES * number, first_key + WORD_BYTES * row
        found.append(native.weigh(sources + at, sizes + at, 1, column, weights, ROW_WORDS, key))
    return found


def digest_at(tensor: torch.Tensor, place: int) -> torch.Tensor:
    """Return the digest of one tensor at its place."""
    return tensor_digest(tensor, offset=place // tensor.element_size())


def digest_at_places(tensors: Sequence[torch.Tensor], places: Sequence[int]) -> torch.Tensor:
    """Return the sum of the digests of tensors of one device at their places; small ones are gathered first."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    small: list[tuple[int, torch.Tensor]] = []
    for place, tensor in zip(places, tensors, strict=True):
        if tensor.nbytes > SMALL_BYTES:
            total += digest_at(tensor, place)
        else:
            small.append((place, tensor))
    if small:
        start = min(place for place, _ in small) // GROUP_BYTES * GROUP_BYTES
        end = max(place + tensor.nbytes for place, tensor in small)
        gathered = torch.zeros(end - start, dtype=torch.uint8, device=total.device)
        views = [gathered[at - start : at - start + t.nbytes].view(t.dtype).view(t.shape) for at, t in small]
        with torch.no_grad():
            torch._foreach_copy_(views, [tensor for _, tensor in small])
        add_bytes(total, gathered, start)
    return total
