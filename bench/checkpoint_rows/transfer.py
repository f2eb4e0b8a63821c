"""Rows of one vault that copies a slot to another: from the report of a sealed slot to the peer's acknowledgement."""

from __future__ import annotations

from statistics import median

from bench.checkpoint_rows.limits import loopback
from bench.checkpoint_rows.rank import replications
from bench.checkpoint_rows.single import MIB, marks
from bench.checkpoint_rows.vault_nodes import Fleet
from bench.processes import ProcessPool
from bench.table import Row

STREAMS = (1, 2, 4)
FIRST = 2
"""Number of measured copies into pages not touched before: one for each slot."""


def replicated(pool: ProcessPool, nbytes: int, repeats: int, judged: bool) -> list[Row]:
    """Measure one stream against one raw stream, and several against the best rate of several raw streams."""
    raw, ours = {}, {}
    for streams in STREAMS:
        with Fleet(("n1", "n2"), streams) as fleet:
            spec = fleet.generation(("n1", "n2"), 2)
            before = loopback(pool, fleet.warm, streams, nbytes, repeats)
            ours[streams] = pool.one(replications, spec, fleet.vaults["n1"].socket, nbytes, "n2", repeats)
            raw[streams] = median(before + loopback(pool, fleet.warm, streams, nbytes, repeats))
    rates = {streams: nbytes / median(took[FIRST:]) / 1e9 for streams, took in ours.items()}
    limits = {streams: nbytes / took / 1e9 for streams, took in raw.items()}
    best = max(limits, key=lambda streams: limits[streams])
    name = f"slot of {nbytes / MIB:.0f} MiB to a peer"
    rows = [Row(f"raw loopback, streams: {streams}", limit, "GB/s") for streams, limit in limits.items()]
    rows += [Row(f"{name}, streams: {streams}", rate, "GB/s") for streams, rate in rates.items()]
    return [
        *rows,
        Row(
            f"{name}, one stream against raw",
            rates[1] / limits[1],
            "x",
            *marks(judged, 0.7, 0.9),
            "1 raw stream",
            smaller_is_better=False,
        ),
        Row(
            f"{name}, best against best raw",
            max(rates.values()) / limits[best],
            "x",
            *marks(judged, 0.7, 0.9),
            f"the best raw one, {best} streams",
            smaller_is_better=False,
        ),
        Row(f"{name}, the very first", nbytes / ours[2][0] / 1e9, "GB/s", against="pages of the copy not there yet"),
    ]
