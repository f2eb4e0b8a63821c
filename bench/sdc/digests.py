"""Digests against silent corruption: their rate beside a copy of the same bytes, and the faults that they miss.

One thread. A rate is the best of several passes, and all passes take turns, so that a busy moment of the machine meets
every one of them. Faults are injected into a matrix of 64 x 64 fp32 values, in the shapes that hardware makes.
"""

from __future__ import annotations

import random
import time
import zlib
from collections.abc import Callable

import torch

from bench.table import Row
from everstep_trainer.digests.digest import combined_digest, tensor_digest, to_unsigned

FLOOR, AIM = 0.5, 0.9
"""Of the rate of a copy, which reads and writes each byte."""
LENGTH = 64 << 20
"""Bytes of digested data; more than the caches hold."""
COPY, SMALL_COPY = "copy", "copy, small tensors"
SMALL_BYTES = 4096
WIDTH = 64

Pass = tuple[str, str, int, Callable[[], object]]


def measure(*, quick: bool) -> list[Row]:
    """Measure rates and misses, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return [*rates(LENGTH, 3 if quick else 25), *misses(500 if quick else 20_000)]
    finally:
        torch.set_num_threads(threads)


# ---- rates


def rates(length: int, repeats: int) -> list[Row]:
    """One row for each pass; digests are judged by the copy of the same bytes."""
    passes = list(passes_of(length))
    best = dict.fromkeys((name for name, _, _, _ in passes), 0.0)
    for _ in range(repeats):
        for name, _, count, work in passes:
            begun = time.perf_counter()
            work()
            best[name] = max(best[name], count / (time.perf_counter() - begun) / 1e9)
    return [_rate_row(name, best[name], best[copy] if copy else None) for name, copy, _, _ in passes]


def _rate_row(name: str, rate: float, copy: float | None) -> Row:
    if copy is None:
        return Row(name, rate, "GB/s")
    against = f"{rate / copy:.2f} of a copy"
    return Row(name, rate, "GB/s", FLOOR * copy, AIM * copy, against, smaller_is_better=False)


def passes_of(length: int) -> list[Pass]:
    """Name, the copy to compare with, bytes and work of each pass."""
    words = torch.randint(-(1 << 62), 1 << 62, (length // 8,))
    single, half = words.view(torch.float32), words.view(torch.bfloat16)
    target = torch.empty_like(words)
    small = list(words.view(-1, SMALL_BYTES // 8).clone().view(torch.float32))
    small_targets = [torch.empty_like(tensor) for tensor in small]
    return [
        (COPY, "", length, lambda: target.copy_(words)),
        ("digest, fp32", COPY, length, lambda: tensor_digest(single)),
        ("digest, bf16", COPY, length, lambda: tensor_digest(half)),
        ("digest, bf16 from an odd element on", COPY, length, lambda: tensor_digest(half, offset=1)),
        (SMALL_COPY, "", length, lambda: torch._foreach_copy_(small_targets, small)),
        (f"digest, {len(small)} tensors of 4 KiB", SMALL_COPY, length, lambda: combined_digest(small)),
    ]


# ---- faults that are missed


def weighted(data: torch.Tensor) -> int:
    return to_unsigned(tensor_digest(data))


def xor(data: torch.Tensor) -> int:
    return int(torch.hash_tensor(data).item())


def crc32(data: torch.Tensor) -> int:
    return zlib.crc32(data.numpy().tobytes())


def plain_sum(data: torch.Tensor) -> int:
    return int(data.view(torch.int32).sum().item())


DETECTORS = {"weighted sum": weighted, "XOR (torch.hash_tensor)": xor, "CRC32": crc32, "plain sum of bits": plain_sum}

Fault = Callable[[torch.Tensor, list[int], random.Random], None]


def places(chance: random.Random) -> list[int]:
    """Flat indices: one value 35 %, four at equal distances 35 %, 32 lanes in a row 20 %, a column 10 %."""
    kind, at = chance.random(), chance.randrange(WIDTH * WIDTH)
    if kind < 0.35:
        return [at]
    if kind < 0.7:
        return [(at + 8 * number) % (WIDTH * WIDTH) for number in range(4)]
    if kind < 0.9:
        return [(at // 32 * 32 + lane) % (WIDTH * WIDTH) for lane in range(32)]
    return list(range(at % WIDTH, WIDTH * WIDTH, WIDTH))


def _mask(count: int, chance: random.Random) -> int:
    mask = sum(1 << bit for bit in chance.sample(range(32), count))
    return mask - (1 << 32) if mask >> 31 else mask


def flipped(least: int, most: int) -> Fault:
    """Flip the same bits in all places."""

    def fault(bits: torch.Tensor, where: list[int], chance: random.Random) -> None:
        bits[where] ^= _mask(chance.randint(least, most), chance)

    return fault


def stuck(bits: torch.Tensor, where: list[int], chance: random.Random) -> None:
    """One bit reads as 1 in all places."""
    bits[where] |= _mask(1, chance)


def replaced(bits: torch.Tensor, where: list[int], chance: random.Random) -> None:
    """Other values."""
    values = torch.tensor([chance.gauss(0.0, 1.0) for _ in where])
    bits[where] = values.view(torch.int32)


def swapped(bits: torch.Tensor, where: list[int], chance: random.Random) -> None:
    """Two halves of the places have changed places; a single value with its neighbour."""
    if len(where) == 1:
        where = [where[0], where[0] ^ 1]
    half = len(where) // 2
    bits[where] = bits[[*where[half:], *where[:half]]]


def doubled(fault: Fault) -> Fault:
    """The fault in an even number of places: a single one also hits the value after it."""

    def twice(bits: torch.Tensor, where: list[int], chance: random.Random) -> None:
        fault(bits, where if len(where) > 1 else [where[0], where[0] ^ 1], chance)

    return twice


FAULTS: dict[str, Fault] = {
    "1 bit": flipped(1, 1),
    "2 to 4 bits": flipped(2, 4),
    "5 bits and more": flipped(5, 32),
    "1 bit, even count of places": doubled(flipped(1, 1)),
    "a bit stuck at 1": stuck,
    "values replaced": replaced,
    "lanes swapped": swapped,
}


def misses(trials: int) -> list[Row]:
    """The share of faults after which each digest is as before; a fault that changes no bit is none."""
    chance = random.Random(24)
    generator = torch.Generator().manual_seed(24)
    clean = torch.randn(WIDTH * WIDTH, generator=generator)
    expected = {name: detect(clean) for name, detect in DETECTORS.items()}
    rows = []
    total = dict.fromkeys(DETECTORS, 0)
    for kind, fault in FAULTS.items():
        missed, done = dict.fromkeys(DETECTORS, 0), 0
        while done < trials:
            data = clean.clone()
            fault(data.view(torch.int32), places(chance), chance)
            if data.view(torch.int32).equal(clean.view(torch.int32)):
                continue
            done += 1
            for name, detect in DETECTORS.items():
                missed[name] += detect(data) == expected[name]
        for name, count in missed.items():
            total[name] += count
            rows.append(_miss_row(f"{kind}: missed by {name}", name, 100.0 * count / trials))
    rows += [_miss_row(f"all: missed by {name}", name, 100.0 * n / trials / len(FAULTS)) for name, n in total.items()]
    return rows


def _miss_row(title: str, detector: str, percent: float) -> Row:
    is_judged = detector == "weighted sum"
    return Row(title, percent, "%", 0.0 if is_judged else None, 0.0 if is_judged else None)
