"""Ranks whose tracked tensors change at different steps: all make a new plan, and their versions are whole again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.errors import Unavailable
from everstep.ids import Version
from everstep.layout.manifests import Box
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import FindingKind, Severity
from everstep.wire.v1.training import FindingRaised, RestoreRule
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.slots import layout_exchange
from everstep_trainer.slots.layout_exchange import LayoutExchange, LayoutRound, RoundSuperseded
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot import planner, snapshotter
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.layout import Layout, TensorPart
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import Vaults, map_segment, vaults

WORLD = (("n1", 0), ("n1", 1))
DEADLINE_S = 60.0


class Model(nn.Module):
    """A model with a buffer that training changes from some step on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(64, 64)
        self.register_buffer("dropped", torch.zeros(4))


class Pair:
    """Two ranks of a node, in threads, step by step beside each other.

    Args:
        dropped, trained: by rank, from which step on its buffer changes, and its expert is trained.
    """

    def __init__(self, fleet: Vaults, dropped: tuple[int, int] = (1, 1), trained: tuple[int, int] = (1, 1)) -> None:
        vault = fleet.start("n1")
        fleet.configure()
        self.changes = max(*dropped, *trained)
        self._dropped, self._trained = dropped, trained
        self._directory = fleet.segments / "n1" / JOB
        self._clients = [VaultClient(str(vault.run_dir / "vault.sock")) for _ in WORLD]
        self._give_up_at = time.perf_counter() + DEADLINE_S
        self._beside = threading.Barrier(2, action=self._look)
        self._enough = False
        self.objects = [self._built(number) for number in range(2)]

    def _built(self, number: int) -> dict[str, Any]:
        model, expert = Model(), nn.Linear(8, 8)
        optimizer = torch.optim.AdamW([*model.parameters(), *expert.parameters()])
        return {"model": model, f"expert{number}": expert, "optimizer": optimizer}

    def train(self) -> None:
        """Train until both ranks have stored a step after the last change."""
        spec, store = generation(1, ranks=WORLD), HashStore()

        def run(number: int) -> None:
            state, member = TrackedState(self.objects[number]), spec.roster[number]
            snapshots = Snapshotter(self._clients[number], state, spec, member, store, lambda _: None)
            step = 0
            while not self._enough:
                step += 1
                self._beside.wait(DEADLINE_S)
                snapshots.wait()
                self._step(number, step)
                snapshots.begin(step)
            snapshots.close(finish=True)

        self._both(run)

    def _step(self, number: int, step: int) -> None:
        objects = self.objects[number]
        for parameter in objects["model"].parameters():
            parameter.grad = torch.full_like(parameter, step)
        for parameter in objects[f"expert{number}"].parameters():
            parameter.grad = torch.ones_like(parameter) if step >= self._trained[number] else None
        objects["optimizer"].step()
        if step >= self._dropped[number]:
            objects["model"].dropped += 1 + number

    def _look(self) -> None:
        after = [version for version in self.stored_by_both() if version.step > self.changes]
        self._enough = bool(after) or time.perf_counter() > self._give_up_at

    def stored_by_both(self) -> set[Version]:
        paths = [self._directory / f"own-{number}" for number in range(2)]
        return set.intersection(*(_sealed(path) if path.exists() else set() for path in paths))

    def restore(self) -> list[tuple[Version | None, dict[str, Any]]]:
        spec, store = generation(2, ranks=WORLD, restore=RestoreRule()), HashStore()
        found: dict[int, tuple[Version | None, dict[str, Any]]] = {}

        def run(number: int) -> None:
            objects = self._built(number)
            restoration = Restoration(self._clients[number], spec, spec.roster[number], store)
            found[number] = restoration.fill(TrackedState(objects)).version, objects

        self._both(run)
        return [found[number] for number in range(2)]

    def _both(self, run: Any) -> None:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def close(self) -> None:
        for client in self._clients:
            client.close()


def _sealed(path: Path) -> set[Version]:
    return {header.version for _, header in map_segment(path).sealed_slots()}


@pytest.fixture
def fleet(program_forks: ForkPool, monkeypatch: pytest.MonkeyPatch) -> Iterator[Vaults]:
    monkeypatch.setattr(layout_exchange, "ROUND_CHECK_S", 0.05)
    monkeypatch.setattr(snapshotter, "ROUND_CHECK_S", 0.05)
    with vaults(program_forks) as made:
        yield made


@pytest.mark.promise("changing-layout")
@pytest.mark.parametrize(
    ("dropped", "trained"),
    [((3, 6), (1, 1)), ((9, 4), (1, 1)), ((5, 1000), (1, 1)), ((1, 1), (6, 3)), ((1, 1), (4, 4)), ((12, 3), (5, 8))],
)
def test_ranks_with_different_change_steps_store_whole_versions(
    fleet: Vaults, dropped: tuple[int, int], trained: tuple[int, int]
) -> None:
    pair = Pair(fleet, dropped, trained)
    try:
        pair.changes = max(step for step in (*dropped, *trained) if step < 1000)
        pair.train()
        restored = pair.restore()
        versions = {version for version, _ in restored}
        assert len(versions) == 1
        (version,) = versions
        assert version is not None
        assert version.step > pair.changes
        for number, (_, objects) in enumerate(restored):
            changed = max(0, version.step + 1 - dropped[number]) * (1 + number)
            assert objects["model"].dropped.tolist() == [changed] * 4
            expert = objects[f"expert{number}"].weight
            assert objects["optimizer"].state[expert]["step"].item() == version.step + 1 - trained[number]
    finally:
        pair.close()


def layout(size: int) -> Layout:
    return Layout((TensorPart("t", "float32", 4, (size,), Box((0,), (size,))),))


class Ranks:
    """Layout exchanges of several ranks over one store, which counts its checks."""

    def __init__(self, world: int) -> None:
        self.checks = 0
        self.store = HashStore()
        self.stop = threading.Event()
        self.each = [LayoutExchange(self, rank, world, SYSTEM_CLOCK, self.stop) for rank in range(world)]  # type: ignore[arg-type]

    def check(self, keys: list[str]) -> bool:
        self.checks += 1
        return self.store.check(keys)

    def set(self, key: str, value: Any) -> None:
        self.store.set(key, value)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.store.multi_get(keys)

    def exchange(self, *layouts: tuple[Layout, int]) -> list[LayoutRound]:
        """Pass the ranks' layouts at once, and return the round of each rank."""
        made: dict[int, LayoutRound] = {}

        def run(rank: int) -> None:
            while rank not in made:
                try:
                    made[rank] = self.each[rank].layouts(*layouts[rank], DEADLINE_S)
                except RoundSuperseded:
                    continue

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(layouts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [made[rank] for rank in range(len(layouts))]


@pytest.mark.promise("changing-layout")
def test_round_starts_at_the_last_step_of_any_rank() -> None:
    ranks, first = Ranks(3), layout(1)
    rounds = ranks.exchange((first, 0), (first, 4), (layout(2), 3))
    assert {(each.number, each.since_step) for each in rounds} == {(0, 4)}
    assert [each.parts[0].shape for each in rounds[0].layouts] == [(1,), (1,), (2,)]
    assert rounds[0].layouts[0] is rounds[0].layouts[1]


def test_unchanged_rank_joins_a_round_opened_by_another() -> None:
    ranks, first, second = Ranks(2), layout(1), layout(2)
    ranks.exchange((first, 0), (first, 0))
    with pytest.raises(Unavailable):
        ranks.each[1].layouts(second, 7, 0.01)
    rounds = ranks.exchange((first, 9), (second, 8))
    assert {(each.number, each.since_step) for each in rounds} == {(1, 9)}
    assert [each.parts[0].shape for each in rounds[1].layouts] == [(1,), (2,)]


def test_store_is_polled_rarely_and_not_during_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layout_exchange, "ROUND_CHECK_S", 3600.0)
    ranks, first, second = Ranks(2), layout(1), layout(2)
    ranks.exchange((first, 0), (first, 0))
    before = ranks.checks
    assert not any(ranks.each[0].is_superseded() for _ in range(100))
    assert ranks.checks == before, "the round has just come about"
    monkeypatch.setattr(layout_exchange, "ROUND_CHECK_S", 0.0)
    ranks.each[0].handle_commit()
    assert not ranks.each[0].is_superseded()
    assert ranks.checks == before + 1
    with pytest.raises(Unavailable):
        ranks.each[1].layouts(second, 5, 0.01)
    assert ranks.each[0].is_superseded()


@pytest.mark.promise("changing-layout")
def test_planning_failure_is_reported_once_by_the_first_rank(fleet: Vaults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshotter, "PLAN_TIMEOUT_S", 0.05)
    monkeypatch.setattr(snapshotter, "PLAN_WAIT_S", 0.05)
    monkeypatch.setattr(snapshotter, "RETRY_S", 0.0)
    monkeypatch.setattr(planner, "UNPLANNED_WARN_S", 0.3)
    vault = fleet.start("n1")
    fleet.configure()
    client = VaultClient(str(vault.run_dir / "vault.sock"))
    reports: list[Any] = []
    try:
        model, spec = nn.Linear(4, 4), generation(1, ranks=[*WORLD, ("n1", 2)])
        state, store = TrackedState({"model": model}), HashStore()
        snapshots = Snapshotter(
            client, state, spec, spec.roster[1], store, reports.append, options=SnapshotOptions(overlap=True)
        )
        step, end = 0, time.perf_counter() + DEADLINE_S
        while not reports and time.perf_counter() < end:
            step += 1
            snapshots.begin(step)
            snapshots.wait()
        for more in range(5):
            snapshots.begin(step + 1 + more)
            snapshots.wait()
        snapshots.close(finish=True)
    finally:
        client.close()
    (raised,) = reports
    assert isinstance(raised, FindingRaised)
    finding = raised.finding
    assert (finding.kind, finding.severity, finding.subject) == (
        FindingKind.NO_CHECKPOINT,
        Severity.WARNING,
        "plan/job",
    )
    assert "ranks 0, 2 have not reported" in finding.message
