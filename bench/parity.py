"""Making parity, and bytes from parity, against a copy of the same bytes on this machine.

    python -m bench.parity [--quick] [--mib 64] [--json FILE]

One thread. GB/s count the members' bytes (k times the length of one); a figure is the best of several passes, and all
passes take turns, so that a busy moment of the machine meets every one of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from everstep_agent.vault.parity import galois
from everstep_agent.vault.parity.shards import parity_bytes

from bench.table import Row, finish, parser_of

COPY = "copy (numpy), one member"
FLOOR, AIM = 1 / 3, 1 / 2
"""P and Q of four members, of a copy in the same run: a third of it is what doubling the bytes of 64-bit words in
place reaches (6.8 GB/s where a copy takes 20, on an EPYC)."""

Words = npt.NDArray[np.uint64]
Pass = tuple[str, int, Callable[[], object]]


def main() -> int:
    """Prints the table; the exit status."""
    parser = parser_of("parity", __doc__)
    parser.add_argument("--mib", type=int, default=64, help="of one member; more than the caches hold")
    options = parser.parse_args()
    return measure(options.mib << 20, 3 if options.quick else 15, options.json)


def measure(length: int, repeats: int, json_path: Path | None) -> int:
    """Takes all passes ``repeats`` times and prints them in one table; the exit status."""
    passes = [copy(length), only_xor(4, length)]
    for k in (2, 4, 8):
        passes += of_group(k, length)
    best = {name: 0.0 for name, _, _ in passes}
    for _ in range(repeats):
        for name, count, work in passes:
            begun = time.perf_counter()
            work()
            best[name] = max(best[name], count / (time.perf_counter() - begun) / 1e9)
    rows = [_row(name, best) for name, _, _ in passes]
    return finish(f"parity of members of {length >> 20} MiB", rows, json_path)


def _row(name: str, best: dict[str, float]) -> Row:
    judged = name == "P and Q, k = 4"
    return Row(
        name,
        best[name],
        "GB/s",
        floor=FLOOR * best[COPY] if judged else None,
        aim=AIM * best[COPY] if judged else None,
        against="" if name == COPY else f"{best[name] / best[COPY]:.2f} of a copy",
        smaller_is_better=False,
    )


def copy(length: int) -> Pass:
    """The limit: every byte read and written once."""
    source, into = _noise(1, length)[0], np.ones(length // 8, np.uint64)
    return COPY, length, lambda: np.copyto(into, source)


def only_xor(k: int, length: int) -> Pass:
    """P without Q: one loss."""
    members, p = [w.data.cast("B") for w in _noise(k, length)], bytearray(parity_bytes(length))
    return f"P only, k = {k}", k * length, lambda: galois.encode(members, p=memoryview(p))


def of_group(k: int, length: int) -> list[Pass]:
    """P and Q; and each kind of loss made good, counted by the members' bytes as well."""
    members = [words.data.cast("B") for words in _noise(k, length)]
    p, q = (memoryview(bytearray(parity_bytes(length))) for _ in range(2))
    galois.encode(members, p, q)
    into = {number: memoryview(bytearray(length)) for number in (0, k - 1)}
    without = [None, *members[1:]]
    neither = [None, *members[1:-1], None]
    count = k * length
    return [
        (f"P and Q, k = {k}", count, lambda: galois.encode(members, p, q)),
        (f"a member from P, k = {k}", count, lambda: galois.recover(without, p, None, {0: into[0]})),
        (f"a member from Q, k = {k}", count, lambda: galois.recover(without, None, q, {0: into[0]})),
        (f"two members, k = {k}", count, lambda: galois.recover(neither, p, q, into)),
    ]


def _noise(count: int, length: int) -> list[Words]:
    source = np.random.default_rng(1)
    return [source.integers(0, 1 << 63, length // 8, dtype=np.uint64) for _ in range(count)]


if __name__ == "__main__":
    raise SystemExit(main())
