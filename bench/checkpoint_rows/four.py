"""Rows of four ranks on four nodes: stalls, copies on other nodes, and restores after the loss of a node."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.checkpoint_rows.limits import loopback
from bench.checkpoint_rows.rank import Restores, Stalls, lean, restores, snapshots
from bench.checkpoint_rows.single import COMPUTE_TIMES, MEMCPY_BYTES_PER_S, MIB, stall_rows
from bench.checkpoint_rows.state import Size
from bench.checkpoint_rows.vault_nodes import Fleet, MemoryWatch
from bench.processes import ProcessPool
from bench.table import Row, marks
from everstep.ids import Version

NODES = ("n1", "n2", "n3", "n4")
SPARE = "n5"
REPLICAS = 2


def replicas(pool: ProcessPool, size: Size, repeats: int, judged: bool) -> list[Row]:
    """Measure four replicas. Each rank stores its part, so that two nodes hold every part."""
    with Fleet(NODES) as fleet:
        stalls, _ = _snapshots(pool, fleet, size, repeats)
    name = f"4 replicas of {size.nbytes / MIB:.0f} MiB"
    memcpy = _slowest(stalls, "memcpy")
    return [
        Row(f"{name}: memcpy of what each stores, all at once", memcpy * 1e3, "ms", against=_bytes(stalls)),
        *stall_rows(name, _merged(stalls), memcpy, judged),
    ]


def shards(pool: ProcessPool, size: Size, repeats: int, judged: bool) -> list[Row]:
    """Measure four FSDP2 shards with a copy of each on another node, before and after the loss of a node."""
    name = f"4 FSDP2 shards of {size.nbytes / MIB / 4:.0f} MiB"
    with Fleet(NODES) as fleet, MemoryWatch(fleet.memory) as watch:
        stalls, version = _snapshots(pool, fleet, size, repeats)
        most, stated = watch.most_bytes, fleet.stated_bytes()
        raw = loopback(pool, fleet.warm, len(NODES), size.nbytes, repeats)
        rows = [
            *_stalls(name, stalls, judged),
            *_replicated(name, stalls, raw, size, judged),
            *_memory(most, stated, size),
        ]
        filled = _restores(pool, fleet, NODES, size, repeats, version)
        rows += _own(name, filled, judged)
        fleet.lose(NODES[-1])
        fleet.start(SPARE)
        one_stream = loopback(pool, fleet.warm, 1, size.nbytes // 4, repeats)
        filled = _restores(pool, fleet, (*NODES[:3], SPARE), size, repeats, version)
        rows += _lost(name, filled, one_stream, judged)
        fleet.lose(SPARE)
        filled = _restores(pool, fleet, NODES[:3], size, repeats, version)
    took = median(max(restored.fill[number] for restored in filled) for number in range(repeats))
    total = f"{size.nbytes / MIB:.0f} MiB of FSDP2 state: 4 ranks to 3"
    against = f"{_from(filled)}, nothing from disk"
    return [*rows, Row(total, took, "s", *marks(judged, 1.5, 0.5), against)]


def short_of_memory(pool: ProcessPool, size: Size, judged: bool) -> list[Row]:
    """Measure the memory of four FSDP2 shards with two slots each, and two copies on another node."""
    with Fleet(NODES) as fleet, MemoryWatch(fleet.memory) as watch:
        spec = fleet.generation(NODES, REPLICAS)
        pool.run(lean, [(spec, rank, socket, size) for rank, socket in enumerate(fleet.sockets(NODES))])
        most, stated = watch.most_bytes, fleet.stated_bytes()
    against = f"2 slots x 2, and {(most - 4 * size.nbytes) / 16 / 1024:.0f} KiB a slot for all else"
    return [
        Row(
            "memory beside the state, r = 2, slots=2", round(most / size.nbytes, 2), "x", *marks(judged, 4, 4), against
        ),
        Row("memory, r = 2, slots=2: most over what the vaults state", most / stated, "x", 1.0, 1.0, f"{stated} bytes"),
    ]


def overlapped(pool: ProcessPool, size: Size, repeats: int, judged: bool) -> list[Row]:
    """Measure four FSDP2 shards that are copied during the next step."""
    name = f"4 FSDP2 shards of {size.nbytes / MIB / 4:.0f} MiB, overlap=True"
    with Fleet(NODES) as fleet:
        stalls, _ = _snapshots(pool, fleet, size, repeats, overlap=True)
    rows = stall_rows(name, _merged(stalls), _slowest(stalls, "memcpy"), judged)
    return [row for row in rows if "next step" in row.name]


def _snapshots(
    pool: ProcessPool, fleet: Fleet, size: Size, repeats: int, overlap: bool | None = None
) -> tuple[list[Stalls], Version]:
    spec = fleet.generation(NODES, REPLICAS)
    compute_s = max(0.05, COMPUTE_TIMES * size.nbytes / MEMCPY_BYTES_PER_S)
    warm = str(fleet.warm)
    each = [(spec, rank, s, warm, size, repeats, compute_s, overlap) for rank, s in enumerate(fleet.sockets(NODES))]
    stalls: list[Stalls] = pool.run(snapshots, each)
    return stalls, Version(spec.number, stalls[0].last)


def _restores(
    pool: ProcessPool, fleet: Fleet, nodes: Sequence[str], size: Size, repeats: int, version: Version
) -> list[Restores]:
    spec = fleet.generation(nodes, REPLICAS, floor=version)
    warm, sockets = str(fleet.warm), fleet.sockets(nodes)
    each = [(spec, rank, socket, warm, size, repeats, version.step) for rank, socket in enumerate(sockets)]
    filled: list[Restores] = pool.run(restores, each)
    return filled


def _slowest(stalls: Sequence[Stalls], phase: str) -> float:
    """Return the median over rounds of the slowest rank, since the other ranks wait for it."""
    slowest: float = median(max(values) for values in zip(*(getattr(rank, phase) for rank in stalls), strict=True))
    return slowest


def _merged(stalls: Sequence[Stalls]) -> Stalls:
    """Return the slowest rank's time of each round as the stalls of one rank."""
    merged = Stalls(max(rank.nbytes for rank in stalls))
    for phase in ("memcpy", "blocked", "under"):
        values = zip(*(getattr(rank, phase) for rank in stalls), strict=True)
        setattr(merged, phase, [max(of_round) for of_round in values])
    merged.back_to_back = max(rank.back_to_back for rank in stalls)
    return merged


def _bytes(stalls: Sequence[Stalls]) -> str:
    return f"{max(rank.nbytes for rank in stalls) / MIB:.0f} MiB each"


def _stalls(name: str, stalls: list[Stalls], judged: bool) -> list[Row]:
    memcpy = _slowest(stalls, "memcpy")
    first = Row(f"{name}: memcpy of the same, all at once", memcpy * 1e3, "ms", against=_bytes(stalls))
    return [first, *stall_rows(name, _merged(stalls), memcpy, judged)]


def _replicated(name: str, stalls: list[Stalls], raw: list[float], size: Size, judged: bool) -> list[Row]:
    """Measure from ``begin`` until all four nodes have acknowledged their copies, including copying and hashing."""
    assert all(rank.replicas for rank in stalls), "a share has no copy"
    took = _slowest(stalls, "sealed")
    share = (size.nbytes / took) / (size.nbytes / median(raw))
    against = f"4 raw streams at once, {size.nbytes / median(raw) / 1e9:.2f} GB/s"
    return [
        Row(f"{name}: begun until copied to all other nodes", took * 1e3, "ms"),
        Row(f"{name}: the same against raw streams", share, "x", against=against, smaller_is_better=False),
    ]


def _memory(most: int, stated: int, size: Size) -> list[Row]:
    state = size.nbytes
    return [
        Row("memory beside the state, r = 2: most in /dev/shm", most / state, "x", 4.0, 4.0, "2 slots x 2"),
        Row("memory, r = 2: most over what the vaults state", most / stated, "x", 1.0, 1.0, f"{stated / MIB:.0f} MiB"),
    ]


def _own(name: str, filled: list[Restores], judged: bool) -> list[Row]:
    took = median(max(restored.fill[number] for restored in filled) for number in range(len(filled[0].fill)))
    memcpy = median(max(restored.memcpy[number] for restored in filled) for number in range(len(filled[0].memcpy)))
    against = f"memcpy back, all at once, {memcpy * 1e3:.1f} ms"
    return [
        Row(f"{name}: restored from own slots", took * 1e3, "ms", against=_from(filled)),
        Row(f"{name}: the same against memcpy back", took / memcpy, "x", *marks(judged, 1.5, 1.1), against),
    ]


def _lost(name: str, filled: list[Restores], raw: list[float], judged: bool) -> list[Row]:
    """Measure the spare's rank, which reads all its bytes over the network while the others restore theirs."""
    spare_rank = filled[-1]
    assert spare_rank.sources["own"] + spare_rank.sources["node"] == 0, spare_rank.sources
    nbytes = spare_rank.sources["remote"]
    fill = median(spare_rank.fill)
    rate, limit = nbytes / fill / 1e9, nbytes / median(raw) / 1e9
    against = f"one raw loopback stream, {limit:.2f} GB/s"
    return [
        Row(f"{name}: a lost node's shard from a peer", fill * 1e3, "ms"),
        Row(
            f"{name}: the same against one raw stream",
            rate / limit,
            "x",
            *marks(judged, 0.6, 0.85),
            against,
            smaller_is_better=False,
        ),
    ]


def _from(filled: Sequence[Restores]) -> str:
    total: dict[str, int] = {}
    for restored in filled:
        for source, nbytes in restored.sources.items():
            total[source] = total.get(source, 0) + nbytes
    return ", ".join(f"{nbytes / MIB:.0f} MiB {source}" for source, nbytes in sorted(total.items()) if nbytes)
