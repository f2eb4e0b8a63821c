"""Work that one node does alone, and whose right result is known: products of matrices, and patterns in memory.

The products are exact whatever the order of summation: small integers, whose sums stay below 2**24, the last integer
that a single-precision float counts to. So the result does not depend on the kernel, the library or the number of
partial sums, and one wrong element is a wrong computation. Tensor cores take such operands in TF32 without rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from agent.probes.arithmetic import row
from everstep.wire.v1.directives import RunProbe

TILE = 64
LARGEST = 8
"""Of the operands: 64 * 8 * 8192 is 2**22."""
MATMUL_SIZE_CPU = 512
MATMUL_SIZE_CUDA = 8192
MATMUL_SEED = 20_240_607

MEMORY_CPU_BYTES = 64 << 20
"""Of the host: enough to leave its caches, little enough to do beside a job."""
MEMORY_CUDA_SHARE = 0.5
"""Of what is free on a GPU."""
CHUNK_BYTES = 256 << 20
PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)
"""All zeros, all ones, and every second bit either way; addresses follow."""

Rows = tuple[tuple[int, float, float], ...]
Doing = Callable[[str], None]


class ProbeFault(Exception):
    """A probe could not be done; the message says why."""


class WrongResult(ProbeFault):
    """A probe was done, and what came out is wrong; the message says where."""


def devices() -> list[torch.device]:
    """Every GPU, or the CPU where there is none."""
    return [torch.device("cuda", index) for index in range(torch.cuda.device_count())] or [torch.device("cpu")]


def synchronize(device: torch.device) -> None:
    """Waits for what was started on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- products ----------------------------------------------------------------------------------------------------


def compute(probe: RunProbe, doing: Doing) -> Rows:
    """The same product several times on each device. Rows: bytes of the product, median seconds, no bandwidth.

    Raises WrongResult for an element that differs from the known one.
    """
    return tuple(_products(device, max(2, probe.repeats), doing) for device in devices())


def _products(device: torch.device, repeats: int, doing: Doing) -> tuple[int, float, float]:
    size = MATMUL_SIZE_CUDA if device.type == "cuda" else MATMUL_SIZE_CPU
    doing(f"matrix products on {device}")
    left, right, known = known_product(size, device)
    torch.backends.cuda.matmul.allow_tf32 = True
    times = []
    for attempt in range(repeats):
        begun = time.perf_counter()
        product = left @ right
        synchronize(device)
        times.append(time.perf_counter() - begun)
        _compare(product, known, f"product {attempt + 1} of {repeats} on {device}")
    return row(1, known.numel() * known.element_size(), times)


def known_product(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two matrices and their product, worked out in integers by the CPU from one tile of each; rows and columns have
    signs of their own, so that no two tiles are alike."""
    generator = torch.Generator().manual_seed(MATMUL_SEED)
    one, other = (torch.randint(-LARGEST, LARGEST + 1, (TILE, TILE), generator=generator) for _ in range(2))
    signs = (torch.randint(0, 2, (size,), generator=generator) * 2 - 1 for _ in range(2))
    rows, columns = (sign.to(device, torch.float32) for sign in signs)
    times = size // TILE
    left, right, known = (
        tile.to(device, torch.float32).repeat(times, times) for tile in (one, other, one @ other * times)
    )
    return left * rows[:, None], right * columns[None, :], known * rows[:, None] * columns[None, :]


def _compare(found: torch.Tensor, known: torch.Tensor, what: str) -> None:
    if torch.equal(found, known):
        return
    wrong = (found != known).nonzero()
    place = wrong[0].tolist()
    raise WrongResult(
        f"{what} is wrong in {len(wrong)} of {known.numel()} places, first at {place}: "
        f"{found[tuple(place)].item():.9g} instead of {known[tuple(place)].item():.9g}"
    )


# --- memory ------------------------------------------------------------------------------------------------------


def memory(_probe: RunProbe, doing: Doing) -> Rows:
    """Patterns written to each device's memory and read back. Rows: bytes, seconds and bytes per second of writing and
    reading all patterns. Raises WrongResult for a word that is not what was written."""
    return tuple(_memory(device, doing) for device in devices())


def _memory(device: torch.device, doing: Doing) -> tuple[int, float, float]:
    size = MEMORY_CPU_BYTES
    if device.type == "cuda":
        size = int(torch.cuda.mem_get_info(device)[0] * MEMORY_CUDA_SHARE)
    doing(f"patterns in {size >> 20} MiB of {device}")
    chunks = [torch.empty(part // 8, dtype=torch.int64, device=device) for part in _parts(size)]
    begun = time.perf_counter()
    for pattern in PATTERNS:
        for chunk in chunks:
            chunk.fill_(pattern)
        for chunk in chunks:
            _check_words(chunk, pattern, device)
    _addresses(chunks, device)
    synchronize(device)
    seconds = time.perf_counter() - begun
    moved = 2 * (len(PATTERNS) + 1) * size
    return size, seconds, moved / seconds


def _parts(size: int) -> Iterator[int]:
    while size > 0:
        yield max(8, min(size, CHUNK_BYTES))
        size -= CHUNK_BYTES


def _check_words(chunk: torch.Tensor, pattern: int, device: torch.device) -> None:
    wrong = int((chunk != pattern).sum())
    if wrong:
        raise WrongResult(f"{wrong} words of {device}'s memory do not hold pattern {pattern & (1 << 64) - 1:#018x}")


def _addresses(chunks: list[torch.Tensor], device: torch.device) -> None:
    """Each word holds its own number: finds addresses that fall together."""
    first = 0
    for chunk in chunks:
        torch.arange(first, first + chunk.numel(), out=chunk)
        first += chunk.numel()
    first = 0
    for chunk in chunks:
        wrong = int((chunk != torch.arange(first, first + chunk.numel(), device=device)).sum())
        if wrong:
            raise WrongResult(f"{wrong} words of {device}'s memory do not hold their own number")
        first += chunk.numel()
