"""Kill two nodes at once, repeatedly, and count the committed versions that are lost.

There are six nodes, each a failure domain of its own with a real vault process and a rank that holds unique state. A
version is committed: all ranks have sealed it, and its copies are acknowledged. While the next version is being copied,
two nodes die with their memory, and empty ones replace them. All ranks restore.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from bench.checkpoint_rows.vault_nodes import Fleet
from bench.table import Row
from everstep.errors import NotRestorable
from everstep.ids import Version
from everstep.wire.v1.training import FindingRaised, GenerationSpec, VersionSealed
from everstep.wire.v1.vault_reports import Protection
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState

NODES = tuple(f"n{number}" for number in range(1, 7))
EIGHT = tuple(f"n{number}" for number in range(1, 9))
"""Nodes of two groups of four, each with its parity in the other."""
PARITY = 4
ELEMENTS = 16 << 10
LARGE_ELEMENTS = 4 << 20
"""16 MiB, so that padding of the last 256 KiB stripe has little weight."""
COMMITTED, NEXT = 1, 2
SEAL_S, RESTORE_S = 30.0, 90.0
MOMENT_S = 0.02
"""Seconds after the beginning of the next version within which two nodes die. Its copies take about as long."""


@dataclass
class Outcome:
    """Results of all double kills.

    ``killed``: the killed pairs in order. ``lost``: pairs whose loss cost the committed version. ``newer``: number of
    restores that found the next version complete.
    """

    killed: list[tuple[str, ...]] = field(default_factory=list)
    lost: list[tuple[str, ...]] = field(default_factory=list)
    newer: int = 0


class Held(nn.Module):
    """State that only one rank holds, with its expected value at a step."""

    def __init__(self, rank: int, elements: int = ELEMENTS) -> None:
        super().__init__()
        self.rank = rank
        self.held: torch.Tensor
        self.register_buffer("held", torch.zeros(elements))

    def become(self, generation: int, step: int) -> None:
        self.held.copy_(self._at(generation, step))

    def require(self, version: Version) -> None:
        expected = self._at(version.generation, version.step)
        assert torch.equal(self.held, expected), f"rank {self.rank} restored other bytes as {version}"

    def _at(self, generation: int, step: int) -> torch.Tensor:
        return torch.arange(self.held.numel(), dtype=torch.float32) + self.rank + 10 * step + 100 * generation


def double_kills(kills: int, replicas: int, seed: int = 1, parity: int = 0) -> Outcome:
    """Kill two random nodes at random moments.

    ``replicas``: copies of each byte. ``parity``: members of a parity group that protects committed versions, or 0.
    """
    chance, outcome = random.Random(seed), Outcome()
    nodes = EIGHT if parity else NODES
    with _quiet(), Fleet(nodes) as fleet:
        clients = {node: VaultClient(fleet.vaults[node].socket) for node in nodes}
        try:
            for _ in range(kills):
                _kill_two(fleet, clients, replicas, parity, chance, outcome)
        finally:
            for client in clients.values():
                client.close()
    return outcome


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings, since failed copies are expected here."""
    log = logging.getLogger("everstep_trainer")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _kill_two(
    fleet: Fleet,
    clients: dict[str, VaultClient],
    replicas: int,
    parity: int,
    chance: random.Random,
    outcome: Outcome,
) -> None:
    nodes = tuple(clients)
    spec = fleet.generation(nodes, replicas, parity=parity)
    victims = tuple(sorted(chance.sample(sorted(nodes), 2)))
    committed = Version(spec.number, COMMITTED)
    kept: list[Protection] = []

    def safe(_: int) -> None:
        if parity:
            kept.append(fleet.protect(committed, nodes, parity))

    _train(spec, clients, safe, lambda: fleet.lose(*victims), victims, chance.uniform(0, MOMENT_S))
    fleet.start(*victims)
    for node in victims:
        clients[node].close()
        clients[node] = VaultClient(fleet.vaults[node].socket)
    protection = kept[0] if kept else None
    again = fleet.generation(nodes, replicas, floor=committed, parity=parity, protection=protection)
    restored = _restore(again, clients)
    outcome.killed.append(victims)
    if restored is None:
        outcome.lost.append(victims)
    else:
        assert restored >= committed, f"{restored} was restored, {committed} was committed"
        outcome.newer += restored > committed


def _train(
    spec: GenerationSpec,
    clients: dict[str, VaultClient],
    committed: Callable[[int], None],
    lose: Any,
    victims: tuple[str, ...],
    at_s: float,
    elements: int = ELEMENTS,
) -> None:
    """Commit a version on all ranks, begin the next one, and call ``lose`` ``at_s`` seconds later.

    ``committed`` is called with the bytes of the committed version.
    """
    store, changed, safe = HashStore(), threading.Condition(), dict[int, int]()

    def hear(report: VersionSealed | FindingRaised) -> None:
        assert isinstance(report, VersionSealed)
        with changed:
            if report.version.step == COMMITTED and report.commit_candidate and report.durable:
                safe[report.rank] = report.bytes
            changed.notify_all()

    models = [Held(member.rank, elements) for member in spec.roster]
    snapshotters = []
    for member, model in zip(spec.roster, models, strict=True):
        state = TrackedState({"model": model})
        model.become(spec.number, COMMITTED)
        snapshotters.append(Snapshotter(clients[member.node], state, spec, member, store, hear))
    try:
        _begin(snapshotters, COMMITTED)
        with changed:
            assert changed.wait_for(lambda: len(safe) == len(models), SEAL_S), (
                f"only the versions of ranks {safe} are durable"
            )
        committed(sum(safe.values()))
        for model in models:
            model.become(spec.number, NEXT)
        _begin(snapshotters, NEXT)
        time.sleep(at_s)
        lose()
    finally:
        for member, snapshotter in zip(spec.roster, snapshotters, strict=True):
            snapshotter.close(finish=member.node not in victims)


def _begin(snapshotters: list[Snapshotter], step: int) -> None:
    """Begin a snapshot on all ranks in parallel, since its plan needs all of them."""
    threads = [threading.Thread(target=lambda rank=rank: (rank.begin(step), rank.wait())) for rank in snapshotters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _restore(spec: GenerationSpec, clients: dict[str, VaultClient]) -> Version | None:
    """Restore on all ranks, check every byte, and return the version, or None if no version can be restored."""
    store = HashStore()
    results: dict[int, Version | Exception | None] = {}

    def fill(rank: int) -> None:
        member, model = spec.roster[rank], Held(rank)
        restoration = Restoration(clients[member.node], spec, member, store)
        try:
            version = restoration.fill(TrackedState({"model": model})).version
            assert version is not None
            model.require(version)
            results[rank] = version
        except NotRestorable:
            results[rank] = None
        except Exception as error:  # noqa: BLE001 - raised again below, in the calling thread
            results[rank] = error
        finally:
            restoration.close()

    each = [threading.Thread(target=fill, args=(member.rank,), daemon=True) for member in spec.roster]
    for thread in each:
        thread.start()
    for thread in each:
        thread.join(RESTORE_S)
    for value in results.values():
        if isinstance(value, Exception):
            raise value
    assert len(results) == len(spec.roster), "a rank did not end its restore"
    assert len(set(results.values())) == 1, f"ranks restored different versions: {results}"
    restored = results[0]
    assert not isinstance(restored, Exception)
    return restored


def rows(kills: int, replicas: int) -> list[Row]:
    """Return rows with the number of lost versions, and of restores that found the next version complete."""
    outcome = double_kills(kills, replicas)
    name = f"{len(outcome.killed)} double kills, r = {replicas}"
    pairs = f"a node and its copy: {len(set(outcome.lost))} of {len(set(outcome.killed))} pairs"
    against = pairs if outcome.lost else "real vaults, six failure domains"
    return [
        Row(f"{name}: committed versions lost", len(outcome.lost), "", 0, 0, against),
        Row(f"{name}: restored the version on its way", outcome.newer, ""),
    ]


def parity_rows(kills: int) -> list[Row]:
    """Return the same rows with parity of committed versions in place of copies, and the memory of parity."""
    outcome = double_kills(kills, replicas=1, parity=PARITY)
    name = f"{len(outcome.killed)} double kills, parity {PARITY} + 2 and no copies"
    share = parity_share()
    return [
        Row(f"{name}: committed versions lost", len(outcome.lost), "", 0, 0, "real vaults, eight failure domains"),
        Row(f"{name}: restored the version on its way", outcome.newer, ""),
        Row(f"parity {PARITY} + 2: memory of P and Q, against the state", share, "x", 0.51, 0.5, "a copy: 1x"),
    ]


def parity_share() -> float:
    """Return the bytes of P and Q relative to the bytes of the version's shards, by the vaults' own counters."""
    sealed: list[int] = []
    with _quiet(), Fleet(EIGHT) as fleet:
        clients = {node: VaultClient(fleet.vaults[node].socket) for node in EIGHT}
        spec = fleet.generation(EIGHT, 1, parity=PARITY)
        version = Version(spec.number, COMMITTED)

        def safe(nbytes: int) -> None:
            fleet.protect(version, EIGHT, PARITY)
            sealed.append(nbytes)

        try:
            _train(spec, clients, safe, lambda: None, (), 0.0, LARGE_ELEMENTS)
        finally:
            for client in clients.values():
                client.close()
        made = sum(vault.statistics().counters["parity_bytes"] for vault in fleet.vaults.values())
    return made / sealed[0]
