"""Optimizer state in plain tensors that differs between ranks is found before a version counts, and stored per rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.errors import NotRestorable
from everstep.ids import Version
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.training import JobSpec, RestoreRule
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot import moments as module
from everstep_trainer.snapshot.moments import MomentComparison
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import JOB, generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.vaults.vault_process import vaults

WORLD = 2
JOB_SPEC = JobSpec(job=JOB, nproc_per_node=WORLD)
SEATS = [("n1", 0), ("n1", 1)]


def compare_on_all(*ranks: tuple[int, dict[str, str]]) -> list[frozenset[str]]:
    """Return the differences that each rank finds, given the steps and digests of all."""
    store = HashStore()
    parts = [
        MomentComparison(store, rank, len(ranks), SYSTEM_CLOCK, threading.Event(), bool, {})
        for rank in range(len(ranks))
    ]
    with ThreadPoolExecutor(len(ranks)) as pool:
        return [*pool.map(lambda part, given: part.differing(0, *given), parts, ranks)]


def test_all_ranks_find_the_same_differences() -> None:
    assert compare_on_all((1, {"a": "1", "b": "2"}), (1, {"a": "1", "b": "3"}), (1, {"a": "1"})) == [frozenset("b")] * 3
    assert compare_on_all((1, {"a": "1"}), (1, {"b": "2"})) == [frozenset()] * 2
    assert compare_on_all((1, {"a": "1"}), (1, {"a": "1"})) == [frozenset()] * 2


def test_different_steps_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compare_on_all((1, {"a": "1"}), (2, {"a": "2"})) == [frozenset()] * 2
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    alone = MomentComparison(HashStore(), 0, 2, SYSTEM_CLOCK, threading.Event(), bool, {})
    assert alone.is_due(0)
    assert alone.differing(0, 1, {"a": "1"}) == frozenset()
    assert not alone.is_due(0)


def test_equal_state_is_known_from_then_on() -> None:
    state, known, store = Rank(0).state, set[str](), HashStore()
    digests = {"optimizer.model.weight.momentum_buffer": "1", "optimizer.model.bias.momentum_buffer": "2"}

    def part(rank: int) -> MomentComparison:
        return MomentComparison(store, rank, 2, SYSTEM_CLOCK, threading.Event(), bool, {}, known)

    rank = Rank(0)
    rank.step()
    tensors = rank.state.tensors()
    assert not part(0).are_known_equal(tensors)
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda number: part(number).differing(0, 1, digests), range(2))] == [frozenset()] * 2
    assert part(0).are_known_equal(tensors)
    assert part(0).are_known_equal(state.tensors()), "no optimizer state yet"


class Rank:
    """A replica whose optimizer divides updates by hand. If ``own``, the momentum differs from the other rank's."""

    def __init__(self, rank: int, *, own: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(40, 30)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.scale = rank + 1.0 if own else 1.0
        self.state = TrackedState({"model": self.model, "optimizer": self.optimizer})

    def step(self) -> None:
        """Update the momentum, and leave the parameters equal on all ranks."""
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, self.scale)
        values = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.optimizer.step()
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), values, strict=True):
                parameter.copy_(value - 0.1)

    def momentum(self) -> torch.Tensor:
        momentum: torch.Tensor = self.optimizer.state[self.model.weight]["momentum_buffer"]
        return momentum


@contextmanager
def trained(forks: ForkPool, steps: int, *, own: bool) -> Iterator[tuple[VaultClient, list[Rank]]]:
    spec, store = generation(1, ranks=SEATS, spec=JOB_SPEC), HashStore()
    with vaults(forks) as fleet:
        vault = fleet.start("n1", "--scrub-interval-s", "0")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        try:
            ranks = [Rank(number, own=own) for number in range(WORLD)]
            snapshotters = [
                Snapshotter(client, rank.state, spec, member, store, lambda _: None)
                for rank, member in zip(ranks, spec.roster, strict=True)
            ]
            for step in range(1, steps + 1):
                for rank, snapshots in zip(ranks, snapshotters, strict=True):
                    snapshots.wait()
                    rank.step()
                    snapshots.begin(step)
            for snapshots in snapshotters:
                snapshots.wait()
                assert snapshots._last is not None
                assert snapshots._last.done.wait(60)
            for snapshots in snapshotters:
                snapshots.close(finish=True)
            yield client, ranks
        finally:
            client.close()


def restored(client: VaultClient, number: int, seats: list[tuple[str, int]]) -> list[Rank]:
    spec = generation(number, ranks=seats, restore=RestoreRule(), spec=JobSpec(job=JOB, nproc_per_node=len(seats)))
    store, ranks = HashStore(), [Rank(number) for number in range(len(seats))]
    restorations = [Restoration(client, spec, member, store) for member in spec.roster]
    with ThreadPoolExecutor(len(seats)) as pool:
        results = [*pool.map(lambda part, rank: part.fill(rank.state), restorations, ranks)]
    for restoration in restorations:
        restoration.close()
    assert {result.version for result in results} == {Version(1, 4)}
    return ranks


@pytest.mark.promise("own-optimizer-state")
def test_differing_optimizer_state_returns_to_its_rank(
    program_forks: ForkPool, caplog: pytest.LogCaptureFixture
) -> None:
    with trained(program_forks, 4, own=True) as (client, ranks):
        assert caplog.text.count("differ between ranks after step 1, so from now on each rank's are stored") == 1
        assert "optimizer.model.weight.momentum_buffer" in caplog.text
        for rank, again in zip(ranks, restored(client, 2, SEATS), strict=True):
            assert torch.equal(again.momentum(), rank.momentum())
        assert not torch.equal(ranks[0].momentum(), ranks[1].momentum())
        with pytest.raises(NotRestorable, match=r"momentum_buffer differed between the 2 ranks.*there are 1 now"):
            restored(client, 3, SEATS[:1])


@pytest.mark.promise("own-optimizer-state")
def test_equal_optimizer_state_is_shared_at_any_world_size(
    program_forks: ForkPool, caplog: pytest.LogCaptureFixture
) -> None:
    with trained(program_forks, 4, own=False) as (client, ranks):
        assert "differ between ranks" not in caplog.text
        (again,) = restored(client, 2, SEATS[:1])
        assert torch.equal(again.momentum(), ranks[0].momentum())


@pytest.mark.promise("own-optimizer-state")
@pytest.mark.parametrize("is_known", [False, True], ids=["first generation", "found equal earlier"])
def test_generation_that_ends_before_the_comparison(program_forks: ForkPool, is_known: bool) -> None:
    """Rank 1 dies before it has stored its first step, so the states of ranks were never compared."""
    spec, store = generation(1, ranks=SEATS, spec=JOB_SPEC), HashStore()
    known = {f"optimizer.model.{name}.momentum_buffer" for name in ("weight", "bias")} if is_known else set[str]()
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1", "--scrub-interval-s", "0")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        ranks = [Rank(number) for number in range(WORLD)]
        snapshotters = []
        try:
            for rank, member in zip(ranks, spec.roster, strict=True):
                rank.step()  # all optimizer state is there
                made = Snapshotter(client, rank.state, spec, member, store, lambda _: None, equal_moments=known)
                snapshotters.append(made)
            first = snapshotters[0]
            first.begin(1)
            assert first._last is not None
            assert first._last.copied.wait(60)
            first.close(finish=True, rescue_wait_s=0.0)
            assert first._plans.current is not None
            found = [header.version for _, header in first._plans.current.segment.view.complete_slots()]
            assert found == ([Version(1, 1)] if is_known else [])
        finally:
            for snapshots in snapshotters[1:]:
                snapshots.close(finish=False)
            client.close()
