"""Where a snapshot acts when state lies on a GPU: on a runtime that is pretended, and a real vault."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

from everstep.ids import Version
from everstep.wire.v1.training import RestoreRule
from tests.support.forked import ForkPool
from tests.support.generations import generation
from tests.support.pretended_gpu import PretendedCuda, move, on_host, pretend
from tests.support.vaults import until, vaults
from trainer_hooks import vault_client
from trainer_hooks.restore import Restoration
from trainer_hooks.snapshot.snapshotter import Snapshotter
from trainer_hooks.state import TrackedState
from trainer_hooks.vault_client import VaultClient


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> PretendedCuda:
    return pretend(monkeypatch)


@pytest.fixture
def client(program_forks: ForkPool) -> Iterator[VaultClient]:
    with vaults(program_forks) as fleet:
        vault = fleet.start("n1")
        fleet.configure()
        found = VaultClient(str(vault.run_dir / "vault.sock"))
        try:
            yield found
        finally:
            found.close()


def snapshotter(client: VaultClient, number: int, state: TrackedState) -> Snapshotter:
    spec = generation(number)
    return Snapshotter(client, state, spec, spec.roster[0], dist.HashStore(), lambda _: None)


def test_what_is_stored_of_a_gpu_is_what_stood_there_and_comes_back(cuda: PretendedCuda, client: VaultClient) -> None:
    model = move(nn.Linear(8, 8))
    assert isinstance(model, nn.Linear)
    on_host(model.weight).fill_(1)
    snapshots = snapshotter(client, 1, TrackedState({"model": model}))
    for step in (1, 2):
        snapshots.wait()
        cuda.stream().enqueue(lambda step=step: on_host(model.weight).fill_(step))  # type: ignore[misc]
        snapshots.begin(step)
    snapshots.wait()
    cuda.stream().enqueue(lambda: on_host(model.weight).fill_(9))
    snapshots.close(finish=True)
    again = nn.Linear(8, 8)
    spec = generation(2, restore=RestoreRule())
    result = Restoration(client, spec, spec.roster[0], dist.HashStore()).fill(TrackedState({"model": again}))
    assert result.version == Version(1, 2)
    assert again.weight.unique().tolist() == [2.0]


@pytest.mark.parametrize("planned_early", [True, False])
def test_slots_are_page_locked_before_a_copy_whenever_the_plan_was_made(
    cuda: PretendedCuda, client: VaultClient, planned_early: bool
) -> None:
    """A rank that begins with all of its state, as after a restore, plans before its first step."""
    model = move(nn.Linear(8, 8))
    objects: dict[str, object] = {"model": model}
    if not planned_early:
        objects["optimizer"] = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = TrackedState(objects)
    assert state.complete() is planned_early
    snapshots = snapshotter(client, 1, state)
    if planned_early:
        until(lambda: len(cuda.registered) == 1, "the slots are page-locked before the first step is over")
    snapshots.begin(1)
    snapshots.wait()
    assert len(cuda.registered) == 1
    snapshots.close(finish=True)


def test_state_that_is_moved_to_a_gpu_after_the_plan_is_copied_to_page_locked_slots(
    cuda: PretendedCuda, client: VaultClient
) -> None:
    model = nn.Linear(8, 8)
    snapshots = snapshotter(client, 1, TrackedState({"model": model}))
    snapshots.begin(1)
    snapshots.wait()
    assert cuda.registered == {}
    move(model)
    snapshots.begin(2)
    snapshots.wait()
    assert len(cuda.registered) == 1
    snapshots.close(finish=True)


@pytest.mark.parametrize("lies_on_gpu", [True, False])
def test_the_copier_acts_on_the_gpu_of_its_rank_and_not_on_the_first(
    cuda: PretendedCuda, client: VaultClient, monkeypatch: pytest.MonkeyPatch, lies_on_gpu: bool
) -> None:
    """The GPU that a thread acts on is its own: memory near it and what is locked for it go by that."""
    near: list[int] = []

    def numa_node() -> int | None:
        near.append(torch.cuda.current_device())
        return None

    monkeypatch.setattr(vault_client, "numa_node", numa_node)
    model = nn.Linear(8, 8)
    snapshots = snapshotter(client, 1, TrackedState({"model": move(model) if lies_on_gpu else model}))
    snapshots.begin(1)
    snapshots.wait()
    snapshots.close(finish=True)
    assert near == [1]
    assert list(cuda.registered.values()) == ([1] if lies_on_gpu else [])


def test_slots_that_cannot_be_page_locked_are_told_of_and_training_goes_on(
    cuda: PretendedCuda, client: VaultClient, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.code = 2
    snapshots = snapshotter(client, 1, TrackedState({"model": move(nn.Linear(8, 8))}))
    for step in (1, 2):
        snapshots.begin(step)
        snapshots.wait()
    snapshots.close(finish=True)
    assert "training goes on without: cannot page-lock" in caplog.text
