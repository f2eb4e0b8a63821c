"""Compute digests of tensors: position-weighted sums modulo 2^64 of their raw bits, with odd random weights.

Odd weights detect every single flipped bit. Random weights detect the structured patterns of broken hardware that XOR
fingerprints miss (even counts of the same bit, lane swaps, stuck tiles). `digest_weights` tells the weight of each half
of a word at each position. The sum does not depend on the order of summation, and the sums of consecutive ranges add up
to the digest of the whole, wherever they are cut.

On the CPU the native library adds at memory speed, without Python's lock. On a GPU one Triton kernel does. Elsewhere
plain torch adds in several passes.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import torch
from torch._utils import _flatten_dense_tensors
from torch.distributed.tensor import DTensor

from everstep.native import CopyHash, copy_hash
from everstep_trainer.digests.digest_weights import (
    ROW_BYTES,
    ROW_WORDS,
    WORD_BYTES,
    column_weights,
    high_half,
    row_keys,
    split_weights,
)

BLOCK_ROWS = 1024  # rows multiplied at once, 256 MiB: bounds the intermediate product on a GPU without Triton
CPU_BLOCK_ROWS = 2  # 512 KiB: what a pass leaves in a cache, the next one finds there
SMALL_BYTES = 64 << 10  # smaller tensors are gathered first: a product has a fixed cost of some microseconds
GROUP_BYTES = 16  # gathered tensors of one dtype begin at a multiple of this
STAGED_BYTES = 1 << 20
"""Bytes staged at once where a tensor's bytes cannot be read in place as aligned words."""
_MASK = (1 << 64) - 1


# ---- digests of one tensor and of several


def tensor_digest(tensor: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
    """Return the digest of a tensor's raw bits as one signed 64-bit number on its device; on a GPU only enqueued.

    Args:
        tensor: Of any dtype and layout; of a DTensor, this rank's part.
        offset: The place of the tensor's first element in a larger flat tensor. The digests of consecutive ranges of
            one flat tensor then add up, modulo 2^64, to the digest of the whole.
    """
    if torch.compiler.is_compiling():
        result: torch.Tensor = weighted_digest(tensor, offset * tensor.element_size())
        return result
    return _digest_at(tensor, offset * tensor.element_size())


def joined_digest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the `tensor_digest` of one flat tensor that consists of ``tensors``, on their device.

    Args:
        tensors: At least one; of one dtype and on one device.
    """
    return _joined_at(tensors, 0)


def combined_digest(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one digest of several tensors in their order, on the first one's device; see `tensor_digest`.

    Small tensors of one dtype are gathered first, so that a long list of them costs little more than their bytes.
    """
    with torch.no_grad():
        parts = [_local(tensor) for tensor in tensors]
        device = parts[0].device if parts else torch.device("cpu")
        total = torch.zeros((), dtype=torch.int64, device=device)
        at = 0
        small: list[torch.Tensor] = []
        for part in parts:
            if part.nbytes > SMALL_BYTES:
                total += _digest_at(part, at).to(device)
                at += _up_to(ROW_BYTES, part.nbytes)
            else:
                small.append(part)
        for group in _by_dtype(small):
            at = _up_to(GROUP_BYTES, _add_small(total, group, at))
        return total


def _add_small(total: torch.Tensor, tensors: list[torch.Tensor], start: int) -> int:
    """Add the weighted sum of small tensors of one dtype, one after the other; return the place after them."""
    if copy_hash is not None and total.device.type == "cpu":
        there = [_plain(t if t.device == total.device else t.to(total.device)).contiguous() for t in tensors]
        total += _weigh_natively(copy_hash, there, start)
        return start + sum(tensor.nbytes for tensor in there)
    for gathered in _gathered(tensors, total.device):
        add_bytes(total, gathered, start)
        start += gathered.numel()
    return start


def _gathered(tensors: list[torch.Tensor], device: torch.device) -> Iterator[torch.Tensor]:
    """Yield the bytes of small tensors of one dtype, many at once. On the CPU as many as its caches hold."""
    count, nbytes = len(tensors), sum(tensor.nbytes for tensor in tensors)
    if device.type == "cpu":
        count = max(1, count * STAGED_BYTES // max(nbytes, 1))
    for first in range(0, len(tensors), count):
        some = [_plain(t if t.device == device else t.to(device)) for t in tensors[first : first + count]]
        flat: torch.Tensor = _flatten_dense_tensors(some)  # type: ignore[no-untyped-call]
        yield flat.view(torch.uint8)


def _by_dtype(tensors: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups.values()


def _up_to(multiple: int, count: int) -> int:
    return -(-count // multiple) * multiple


def to_unsigned(digest: torch.Tensor) -> int:
    """Return an enqueued digest as a number from 0 to 2^64 - 1. Waits for the GPU."""
    return int(digest.item()) & _MASK


def to_hex(digest: torch.Tensor) -> str:
    """Return an enqueued digest as 16 hexadecimal digits. Waits for the GPU."""
    return f"{to_unsigned(digest):016x}"


def float_hex(value: torch.Tensor) -> str:
    """Return the bits of a number in float64 as 16 hexadecimal digits. Waits for the GPU."""
    return to_hex(value.double().view(torch.int64))


@torch.library.custom_op("everstep::weighted_digest", mutates_args=())
def weighted_digest(tensor: torch.Tensor, start: int) -> torch.Tensor:
    """Return the digest of a tensor that begins at byte ``start`` of a larger one; torch.compile keeps the call."""
    return _digest_at(tensor, start)


@weighted_digest.register_fake
def _fake_digest(tensor: torch.Tensor, start: int) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device=tensor.device)


def _digest_at(tensor: torch.Tensor, start: int) -> torch.Tensor:
    return _joined_at([tensor], start)


def _joined_at(tensors: Sequence[torch.Tensor], start: int) -> torch.Tensor:
    """Return the digest of tensors of one device, one after the other from byte ``start`` on."""
    parts = [_plain(_local(tensor).detach()).contiguous() for tensor in tensors]
    if copy_hash is not None and parts[0].device.type == "cpu":
        return torch.tensor(_weigh_natively(copy_hash, parts, start))
    with torch.no_grad():
        total = torch.zeros((), dtype=torch.int64, device=parts[0].device)
        for part in parts:
            add_bytes(total, part.view(-1).view(torch.uint8), start)
            start += part.nbytes
        return total


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bytes are its values: torch conjugates and negates complex numbers lazily."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_complex() or tensor.is_neg() else tensor


# ---- sums of bytes at a position


def add_bytes(total: torch.Tensor, flat: torch.Tensor, start: int) -> None:
    """Add the weighted sum of contiguous bytes, which begin at byte ``start``, to ``total``, an int64 beside them."""
    kernel = _kernel() if flat.is_cuda else None
    if kernel is not None:
        kernel(total, flat, start)
    elif copy_hash is not None and flat.device.type == "cpu":
        total += _weigh_natively(copy_hash, [flat], start)
    else:
        add_bytes_by_rows(total, flat, start)


@cache
def _kernel() -> Callable[[torch.Tensor, torch.Tensor, int], None] | None:
    """Return `add_bytes` of the Triton kernel; None where Triton is missing."""
    try:
        from everstep_trainer.digests import digest_kernel
    except ImportError:
        return None
    return digest_kernel.add_bytes


def _weigh_natively(native: CopyHash, tensors: Sequence[torch.Tensor], start: int) -> int:
    """Return the weighted sum of contiguous tensors on the host, one after the other, as a signed number."""
    sources = array("Q", [tensor.data_ptr() for tensor in tensors])
    sizes = array("Q", [tensor.nbytes for tensor in tensors])
    row, place = divmod(start, ROW_BYTES)
    host = torch.device("cpu")
    keys, weights = row_keys(row, -(-(place + sum(sizes)) // ROW_BYTES), host), column_weights(host)
    of, size_of = sources.buffer_info()[0], sizes.buffer_info()[0]
    return native.weigh(of, size_of, len(tensors), place, weights.data_ptr(), ROW_WORDS, keys.data_ptr())


def add_bytes_by_rows(total: torch.Tensor, flat: torch.Tensor, start: int) -> None:
    """Add the weighted sum as `add_bytes` does, in plain torch."""
    size = flat.numel()
    is_readable = flat.data_ptr() % WORD_BYTES == 0 and flat.storage_offset() % WORD_BYTES == 0
    if start % WORD_BYTES == 0 and is_readable:
        words = size // WORD_BYTES
        _add_words(total, flat[: words * WORD_BYTES].view(torch.int64), start // WORD_BYTES)
        flat, start = flat[words * WORD_BYTES :], start + words * WORD_BYTES
    if not flat.numel():
        return
    # The bytes of a word that belong to another range are zero here: they add nothing.
    before = start % WORD_BYTES
    room = min(STAGED_BYTES, _up_to(WORD_BYTES, before + flat.numel()))
    staged = torch.zeros(room, dtype=torch.uint8, device=flat.device)
    while flat.numel():
        count = min(flat.numel(), staged.numel() - before)
        used = _up_to(WORD_BYTES, before + count)
        staged[before : before + count] = flat[:count]
        staged[before + count : used] = 0
        _add_words(total, staged[:used].view(torch.int64), (start - before) // WORD_BYTES)
        staged[:WORD_BYTES] = 0
        flat, start, before = flat[count:], start + count, 0


def _add_words(total: torch.Tensor, words: torch.Tensor, first: int) -> None:
    """Add the weighted sum of words, which begin at word ``first``."""
    low, high = split_weights(words.device)
    row, column = divmod(first, ROW_WORDS)
    head = min(words.numel(), ROW_WORDS - column) if column else 0
    rows = (words.numel() - head) // ROW_WORDS
    block = CPU_BLOCK_ROWS if words.device.type == "cpu" else BLOCK_ROWS

    def add_row(some: torch.Tensor, at: int, row: int) -> None:
        product = some * low[at : at + some.numel()] + high_half(some) * high[at : at + some.numel()]
        total.add_(product.sum() * row_keys(row, 1, words.device)[0])

    if head:
        add_row(words[:head], column, row)
        row += 1
    for begin in range(0, rows, block):
        count = min(block, rows - begin)
        some = words[head + begin * ROW_WORDS : head + (begin + count) * ROW_WORDS].view(count, ROW_WORDS)
        if words.device.type == "cpu":
            sums = torch.mv(some, low).addmv_(high_half(some), high)
        else:  # CUDA has no integer matrix product
            sums = (some * low + high_half(some) * high).sum(dim=1)
        total += (sums * row_keys(row + begin, count, words.device)).sum()
    if head + rows * ROW_WORDS < words.numel():
        add_row(words[head + rows * ROW_WORDS :], 0, row + rows)


# ---- digests of the same tensors again and again


class PlacedDigest:
    """The `tensor_digest` at one offset, of one tensor after another; on the host in a few microseconds.

    For one thread at a time.

    Args:
        like: A tensor with the device, dtype and size of all.
        offset: The place of their first element in a larger flat tensor.
    """

    def __init__(self, like: torch.Tensor, offset: int) -> None:
        self.offset = offset
        self._native = copy_hash if like.device.type == "cpu" else None
        row, self._place = divmod(offset * like.element_size(), ROW_BYTES)
        self._source, self._size = array("Q", [0]), array("Q", [like.nbytes])
        if self._native is not None:
            host = torch.device("cpu")
            self._keys = row_keys(row, -(-(self._place + like.nbytes) // ROW_BYTES), host)
            self._weights = column_weights(host)

    def of(self, tensor: torch.Tensor) -> torch.Tensor | int:
        """Return the digest: a number on the host, else a tensor as of `tensor_digest`; see `sum_of`."""
        if self._native is None:
            return tensor_digest(tensor, offset=self.offset)
        plain = _plain(tensor.detach()).contiguous()
        self._source[0] = plain.data_ptr()
        of, size_of = self._source.buffer_info()[0], self._size.buffer_info()[0]
        keys, weights = self._keys.data_ptr(), self._weights.data_ptr()
        return self._native.weigh(of, size_of, 1, self._place, weights, ROW_WORDS, keys)


def sum_of(digests: Sequence[torch.Tensor | int]) -> torch.Tensor:
    """Return the sum, modulo 2^64, of digests of one device; at least one."""
    if isinstance(digests[0], torch.Tensor):
        return torch.stack([torch.as_tensor(digest) for digest in digests]).sum()
    total = sum(map(int, digests)) & _MASK
    return torch.tensor(total - (total >> 63 << 64))


class WeightedDigest:
    """The `combined_digest` of a fixed list of tensors; its buffers are on the first one's device.

    For one thread at a time.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        device = tensors[0].device if tensors else torch.device("cpu")
        large = [t for t in tensors if t.nbytes > SMALL_BYTES]
        small = [t for group in _by_dtype(t for t in tensors if t.nbytes <= SMALL_BYTES) for t in group]
        buffer, places = _gather_buffer(small, device)
        self._copies = [(place, tensor) for place, tensor in zip(places, small, strict=True) if tensor.nbytes]
        self._flat = [self._as_bytes(t, device) for t in large] + [buffer]
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        column_weights(device)

    def _as_bytes(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
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
            total, at = torch.zeros_like(self._total), 0
            for flat in self._flat:
                add_bytes(total, flat, at)
                at += _up_to(ROW_BYTES, flat.numel())
            return total

    def value(self) -> int:
        """Return the digest, 0 to 2^64 - 1."""
        return to_unsigned(self.enqueue())


def _gather_buffer(tensors: list[torch.Tensor], device: torch.device) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return one buffer for small tensors in the order of their dtypes, and their views in it."""
    starts, at, last = [], 0, None
    for tensor in tensors:
        if tensor.dtype != last:
            at, last = _up_to(GROUP_BYTES, at), tensor.dtype
        starts.append(at)
        at += tensor.nbytes
    buffer = torch.zeros(at, dtype=torch.uint8, device=device)
    places = [buffer[at : at + t.nbytes].view(t.dtype).view(t.shape) for at, t in zip(starts, tensors, strict=True)]
    return buffer, places
