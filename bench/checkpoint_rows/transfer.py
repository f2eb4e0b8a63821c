"""Rows of one slot between two vaults: copied to the other, and read from it by a rank, without other readers."""

from __future__ import annotations

import time
from statistics import median

import numpy as np
import torch

from bench.checkpoint_rows.limits import loopback
from bench.checkpoint_rows.rank import replications
from bench.checkpoint_rows.single import MIB
from bench.checkpoint_rows.vault_nodes import JOB, Fleet
from bench.processes import ProcessPool
from bench.table import Row, marks
from everstep.ids import Version
from everstep.wire.v1.local import SlotInfo
from everstep_trainer.slots.byte_moves import TensorCopies, split_into_batches
from everstep_trainer.slots.remote_slots import SlotStreams
from everstep_trainer.slots.vault_client import VaultClient

STREAMS = (1, 2, 4)
FIRST = 2
"""Number of measured copies into pages not touched before: one for each slot."""
HOLDER, READER = "n1", "n2"


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
    ]


def read(pool: ProcessPool, nbytes: int, repeats: int, judged: bool) -> list[Row]:
    """Measure reads, against one raw stream before and after."""
    with Fleet((HOLDER, READER)) as fleet:
        fleet.generation((HOLDER, READER), 1)
        raw = loopback(pool, fleet.warm, 1, nbytes, repeats)
        took = pool.one(reads, fleet.vaults[HOLDER].socket, fleet.vaults[READER].socket, nbytes, repeats)
        raw += loopback(pool, fleet.warm, 1, nbytes, repeats)
    limit = nbytes / median(raw) / 1e9
    against = f"one raw loopback stream, {limit:.2f} GB/s"
    name = f"slot of {nbytes / MIB:.0f} MiB from a peer"
    ratio = median(raw) / median(took)
    return [
        Row(name, median(took) * 1e3, "ms", against=against),
        Row(f"{name} against one raw stream", ratio, "x", *marks(judged, 0.6, 0.85), against, smaller_is_better=False),
    ]


def reads(holder: str, reader: str, nbytes: int, repeats: int) -> list[float]:
    """Return the seconds of each read from the vault ``holder`` by a rank of the vault ``reader``."""
    there, here = VaultClient(holder), VaultClient(reader)
    try:
        slot, target = _fill(there, nbytes), torch.zeros(nbytes, dtype=torch.uint8)
        took = [_read_s(here, slot, target) for _ in range(repeats + 1)]
        assert torch.equal(target.view(torch.int64), torch.arange(nbytes // 8)), "the bytes read are wrong"
        return took[1:]  # the first read has to connect
    finally:
        there.close()
        here.close()


def _fill(vault: VaultClient, nbytes: int) -> SlotInfo:
    """Seal a slot of numbers, and return its description."""
    version = Version(1, 1)
    view = vault.open_segment(JOB, 0, nbytes + (1 << 20), slots=1).view
    payload = view.begin(0, 0, version, b"a manifest", nbytes)
    np.frombuffer(payload, np.int64)[:] = np.arange(nbytes // 8)
    view.seal(0)
    return SlotInfo(node=HOLDER, rank=0, version=version, path="", slot=0, replica=False, manifest_digest="")


def _read_s(vault: VaultClient, slot: SlotInfo, target: torch.Tensor) -> float:
    began = time.perf_counter()
    moves = TensorCopies()
    moves.add(target, [(0, target.nbytes)])
    streams = SlotStreams(vault, JOB, split_into_batches(slot, moves.table()))
    try:
        failures = streams.finish()
    finally:
        streams.close()
    took = time.perf_counter() - began
    assert not failures, failures
    return took
