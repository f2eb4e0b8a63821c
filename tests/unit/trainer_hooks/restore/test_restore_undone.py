"""A failed restore leaves nothing behind in weights or optimizers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.ids import Version
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.restore.restorer import Restoration, RestoreResult
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot import snapshotter
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.ranks.lone_rank import LoneRank, lone_rank
from tests.support.vaults.vault_process import JOB, map_segment, vaults

WORLD = (("n1", 0), ("n1", 1))


class Counting(nn.Module):
    """A model with a buffer that training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.register_buffer("seen", torch.zeros(8))


def built() -> dict[str, Any]:
    torch.manual_seed(0)
    model = Counting()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train(objects: dict[str, Any]) -> None:
    model = objects["model"]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    objects["optimizer"].step()
    model.seen += 1


def assert_as_built(objects: dict[str, Any]) -> None:
    fresh = built()["model"].state_dict()
    assert all(torch.equal(value, fresh[name]) for name, value in objects["model"].state_dict().items())
    assert not objects["optimizer"].state


@pytest.fixture
def rank(program_forks: ForkPool) -> Iterator[LoneRank]:
    with lone_rank(program_forks) as made:
        yield made


def store_steps(rank: LoneRank, objects: dict[str, Any], number: int, *, untrained: int = 0, steps: int) -> None:
    """Store a generation whose steps change everything, except the first ``untrained`` steps."""
    spec = generation(number)
    state = TrackedState(objects)
    snapshots = Snapshotter(rank.client, state, spec, spec.roster[0], HashStore(), lambda _: None)
    for step in range(1, steps + 1):
        snapshots.wait()
        if step > untrained:
            train(objects)
        snapshots.begin(step)
    snapshots.close(finish=True)


def restore(rank: LoneRank, objects: dict[str, Any], number: int) -> RestoreResult:
    spec = generation(number, restore=RestoreRule())
    return Restoration(rank.client, spec, spec.roster[0], HashStore()).fill(TrackedState(objects))


@pytest.mark.promise("restore-leaves-nothing")
def test_corrupt_only_version_leaves_the_built_state(rank: LoneRank) -> None:
    store_steps(rank, built(), 1, steps=1)
    rank.damage(Version(1, 1))
    objects = built()
    result = restore(rank, objects, 2)
    assert (result.version, result.step) == (None, 0)
    assert_as_built(objects)
    store_steps(rank, objects, 2, steps=1)
    assert Version(2, 1) in rank.sealed()


@pytest.mark.promise("restore-leaves-nothing")
def test_corrupt_version_leaves_nothing_for_the_previous_one(rank: LoneRank) -> None:
    store_steps(rank, built(), 1, untrained=1, steps=2)
    rank.damage(Version(1, 2))
    objects = built()
    assert restore(rank, objects, 2).version == Version(1, 1)
    assert_as_built(objects)


def run_on_both(work: Any) -> list[Any]:
    """Run the work of both ranks at once, and return the results."""
    results: list[Any] = [None, None]

    def run(number: int) -> None:
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def both_store(clients: list[VaultClient]) -> None:
    spec, store = generation(1, ranks=WORLD), HashStore()
    begun = threading.Barrier(2)

    def work(number: int) -> None:
        objects = built()
        state, member = TrackedState(objects), spec.roster[number]
        snapshots = Snapshotter(clients[number], state, spec, member, store, lambda _: None)
        train(objects)
        snapshots.begin(1)
        snapshots.wait()
        begun.wait()
        snapshots.close(finish=True)

    run_on_both(work)


@pytest.mark.promise("restore-leaves-nothing")
def test_rank_undoes_its_restore_when_another_rank_fails(
    program_forks: ForkPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshotter, "PLAN_WAIT_S", 60.0)
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure()
        clients = [VaultClient(str(vault.run_dir / "vault.sock")) for _ in range(2)]
        try:
            both_store(clients)
            view = map_segment(fleet.segments / "n1" / JOB / "own-1")
            view.payload(next(slot for slot, _ in view.sealed_slots()))[100] ^= 0x40
            objects, store = [built(), built()], HashStore()
            spec = generation(2, ranks=WORLD, restore=RestoreRule())

            def restore(number: int) -> RestoreResult:
                restoration = Restoration(clients[number], spec, spec.roster[number], store)
                return restoration.fill(TrackedState(objects[number]))

            results = run_on_both(restore)
            assert [result.version for result in results] == [None, None]
            for mine in objects:
                assert_as_built(mine)
        finally:
            for client in clients:
                client.close()
