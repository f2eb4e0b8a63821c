"""Checkpoints in memory beside the machine's own limits and beside what others do, in one run.

    python -m bench.checkpoint [--quick] [--repeats 5] [--no-peers] [--only NAME] [--curve FILE.png]
        [--json FILE]

1 GiB of fp32 in 64 tensors on one rank, and 4 x 256 MiB on four ranks of four nodes: real vault processes, snapshots
and restores as a training run makes them, every byte looked at after a restore. Limits (memcpy into warm shared
memory, raw loopback TCP) are taken in turns with what is held against them. Floors and aims are set for these sizes:
in the quick size the rows that depend on it are not judged. Each process computes on one thread, as launchers have it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from bench.checkpoint_rows import four, other_checkpoints, single, transfer
from bench.checkpoint_rows.curves import curves
from bench.checkpoint_rows.state import Size
from bench.processes import ProcessPool
from bench.table import Row, finish, parser_of, run_parts

TENSORS, TENSOR_BYTES, QUICK_TENSOR_BYTES = 64, 16 << 20, 1 << 20
SMALL_TENSORS = 1000
REPEATS, QUICK_REPEATS = 5, 3


def parts(pool: ProcessPool, options: argparse.Namespace) -> list[tuple[str, Callable[[], list[Row]]]]:
    """Return the measurements by name, in order."""
    judged = not options.quick
    each = QUICK_TENSOR_BYTES if options.quick else TENSOR_BYTES
    one, repeats = Size(TENSORS, each), options.repeats
    found: list[tuple[str, Callable[[], list[Row]]]] = [
        ("one rank", lambda: single.large(pool, one, repeats, judged)),
        ("many tensors", lambda: single.small(pool, SMALL_TENSORS, max(repeats, 10))),
        ("a slot to a peer", lambda: transfer.replicated(pool, one.nbytes, repeats, judged)),
        ("a slot from a peer", lambda: transfer.read(pool, one.nbytes // 4, repeats, judged)),
        ("four replicas", lambda: four.replicas(pool, Size(TENSORS, each // 4, "replicas"), repeats, judged)),
        ("four shards", lambda: four.shards(pool, Size(TENSORS, each, "shards"), repeats, judged)),
        ("four shards, overlapped", lambda: four.overlapped(pool, Size(TENSORS, each, "shards"), repeats, judged)),
        ("four shards in two slots", lambda: four.short_of_memory(pool, Size(TENSORS, each, "shards"), judged)),
    ]
    if not options.no_peers:
        found.append(("peers", lambda: other_checkpoints.rows(pool, one, repeats, slow=not options.quick)))
    return [part for part in found if not options.only or options.only in part[0]]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("checkpoint", __doc__)
    parser.add_argument("--repeats", type=int, help=f"of each measurement (default {REPEATS}; quick {QUICK_REPEATS})")
    parser.add_argument("--no-peers", action="store_true", help="leave torch.save, DCP and NVIDIA's out")
    parser.add_argument("--only", help="run the parts whose name contains this")
    parser.add_argument("--curve", type=Path, metavar="PNG", help="instead: growth of stall and restore, drawn")
    options = parser.parse_args(argv)
    options.repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    return options


def main(argv: list[str]) -> int:
    options = parse(argv)
    with ProcessPool(["bench.checkpoint_rows.rank"]) as pool:
        if options.curve:
            return finish("Growth of stall and restore", curves(pool, options.curve, options.quick), options.json)
        rows = run_parts(parts(pool, options), options.json)
    return finish("Checkpoints in memory", rows, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
