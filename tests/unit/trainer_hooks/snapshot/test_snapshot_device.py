"""Snapshots of state on a GPU: with a stand-in for the CUDA runtime, and a real vault."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.ids import Version
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.slots import copy, vault_client
from everstep_trainer.slots.copy import DeviceMover, SlotTargets, SnapshotSources, gpus_of
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.python_state import decode, get_state_dict
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.ranks.simulated_gpu import SimulatedCuda, Stream, move_to_gpu, on_gpu, on_host, simulate_cuda
from tests.support.vaults.vault_process import vaults


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    return simulate_cuda(monkeypatch)


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
    return Snapshotter(client, state, spec, spec.roster[0], HashStore(), lambda _: None)


def test_gpu_snapshot_stores_the_state_of_its_step(cuda: SimulatedCuda, client: VaultClient) -> None:
    model = move_to_gpu(nn.Linear(8, 8))
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
    result = Restoration(client, spec, spec.roster[0], HashStore()).fill(TrackedState({"model": again}))
    assert result.version == Version(1, 2)
    assert again.weight.unique().tolist() == [2.0]


@pytest.mark.promise("overtaken-copy")
@pytest.mark.parametrize("asked", [False, True])
def test_unordered_write_during_a_copy_drops_the_copy(
    cuda: SimulatedCuda, client: VaultClient, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    model, ordered, finish = move_to_gpu(nn.Linear(8, 8)), threading.Event(), DeviceMover.finish
    weight, _ = model.parameters()

    def written_to_meanwhile(mover: DeviceMover) -> None:
        assert not asked or ordered.wait(60)
        torch.autograd.graph.increment_version(weight)
        finish(mover)

    monkeypatch.setattr(DeviceMover, "finish", written_to_meanwhile)
    snapshots = snapshotter(client, 1, TrackedState({"model": model}))
    snapshots.wait()
    snapshots.begin(1)
    if asked:
        snapshots.wait()
        ordered.set()
    assert snapshots._last is not None
    assert snapshots._last.done.wait(60)
    snapshots.close(finish=True)
    spec = generation(2, restore=RestoreRule())
    result = Restoration(client, spec, spec.roster[0], HashStore()).fill(TrackedState({"model": nn.Linear(8, 8)}))
    assert result.version == (Version(1, 1) if asked else None)


@pytest.mark.parametrize("planned_early", [True, False])
def test_slots_are_page_locked_before_any_copy(cuda: SimulatedCuda, client: VaultClient, planned_early: bool) -> None:
    """A rank that begins with all of its state, as after a restore, plans before its first step."""
    model = move_to_gpu(nn.Linear(8, 8))
    objects: dict[str, object] = {"model": model}
    if not planned_early:
        objects["optimizer"] = torch.optim.SGD(model.parameters(), momentum=0.9)
    state = TrackedState(objects)
    assert state.is_complete() is planned_early
    snapshots = snapshotter(client, 1, state)
    if planned_early:
        until(lambda: len(cuda.registered) == 1, "the slots are page-locked before the first step is over")
    snapshots.begin(1)
    snapshots.wait()
    assert len(cuda.registered) == 1
    snapshots.close(finish=True)


@pytest.mark.parametrize("lies_on_gpu", [True, False])
def test_copier_acts_on_the_gpu_of_its_rank(
    cuda: SimulatedCuda, client: VaultClient, monkeypatch: pytest.MonkeyPatch, lies_on_gpu: bool
) -> None:
    """Each thread has a current GPU. Nearby memory and page-locked memory depend on it."""
    near: list[int] = []

    def numa_node() -> int | None:
        near.append(torch.cuda.current_device())
        return None

    monkeypatch.setattr(vault_client, "numa_node", numa_node)
    model = nn.Linear(8, 8)
    snapshots = snapshotter(client, 1, TrackedState({"model": move_to_gpu(model) if lies_on_gpu else model}))
    snapshots.begin(1)
    snapshots.wait()
    snapshots.close(finish=True)
    assert near == [1]
    assert list(cuda.registered.values()) == ([1] if lies_on_gpu else [])


def test_each_gpu_with_state_has_its_own_stream_and_events(
    cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process with tensors on two GPUs: a copy waits for the training of both, and both wait for their copies."""
    gpus = torch.device("cuda", 0), torch.device("cuda", 1)
    held = [SimpleNamespace(local=SimpleNamespace(device=gpu, is_cuda=True)) for gpu in (*reversed(gpus), gpus[0])]
    assert gpus_of(held) == gpus  # type: ignore[arg-type]
    training = {gpu: Stream(cuda) for gpu in gpus}
    monkeypatch.setattr(torch.cuda, "current_stream", training.__getitem__)
    mover, done = DeviceMover(gpus), []
    for gpu, stream in training.items():
        stream.enqueue(lambda gpu=gpu: done.append(gpu.index))  # type: ignore[misc]
    mover.mark_ready()
    mover.run(SlotTargets([]), [], dict)
    for lane in mover.lanes:
        copy_stream: Any = lane.stream
        copy_stream.enqueue(lambda: done.append("copied"))
        lane.copied.record(lane.stream)
    mover.order_before_step()
    assert done == []
    for index, gpu in enumerate(gpus):
        training[gpu].drain()
        assert done == [0, "copied", 1, "copied"][: 2 * index + 2]


def test_digest_buffers_are_cleared_on_the_copy_stream(cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleared on another stream, a buffer may be cleared after the digest was written to it."""
    made: list[tuple[Stream, Stream]] = []

    class Digest:
        def __init__(self, tensors: list[torch.Tensor]) -> None:
            self.stream = cuda.stream()

        def enqueue(self) -> torch.Tensor:
            made.append((self.stream, cuda.stream()))
            return on_gpu(torch.tensor(7))

    monkeypatch.setattr(copy, "WeightedDigest", Digest)
    share: Any = SimpleNamespace(pieces=(), digest_groups={"replicated": [0]})
    sources = SnapshotSources(TrackedState({"model": move_to_gpu(nn.Linear(8, 8))}).tensors(), share)
    assert isinstance(sources.mover, DeviceMover)
    sources.stage()
    sources.copy(share, SlotTargets([]), digest=True)
    stream: Any = sources.mover.lanes[0].stream
    assert made == [(stream, stream)]


def test_page_lock_failure_is_logged_and_training_continues(
    cuda: SimulatedCuda, client: VaultClient, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.code = 2
    snapshots = snapshotter(client, 1, TrackedState({"model": move_to_gpu(nn.Linear(8, 8))}))
    for step in (1, 2):
        snapshots.begin(step)
        snapshots.wait()
    snapshots.close(finish=True)
    assert "training continues: cannot page-lock" in caplog.text


class Statistics:
    """A user's object with tensors where it says."""

    def __init__(self, seen: torch.Tensor) -> None:
        self.seen = seen

    def state_dict(self) -> dict[str, Any]:
        return {"seen": (self.seen, 1), "steps": 7}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.seen, _), self.steps = state["seen"], state["steps"]


def scaler_on(scale: torch.Tensor, tracker: torch.Tensor) -> torch.amp.GradScaler:
    """Return a scaler as it is after it has scaled a loss on that device."""
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    scaler._scale, scaler._growth_tracker = scale, tracker
    return scaler


def test_python_state_on_a_gpu_is_taken_without_waiting(cuda: SimulatedCuda, client: VaultClient) -> None:
    """Work enqueued before the copy is included in it, and later work is not."""
    model = move_to_gpu(nn.Linear(8, 8))
    scale, tracker, seen = (on_gpu(torch.tensor(n)) for n in (1.0, 0, 0))
    scaler = scaler_on(scale, tracker.to(torch.int32))
    assert scaler._growth_tracker is not None
    changing = [on_host(each) for each in (scale, scaler._growth_tracker, seen)]

    def become(*values: float) -> None:
        def run() -> None:
            for tensor, value in zip(changing, values, strict=True):
                tensor.fill_(value)

        cuda.stream().enqueue(run)

    snapshots = snapshotter(client, 1, TrackedState({"model": model, "scaler": scaler, "user": Statistics(seen)}))
    become(32768.0, 2, 100_000)
    snapshots.begin(1)
    become(3.0, 1, 1)
    snapshots.wait()
    snapshots.close(finish=True)
    assert threading.current_thread().name not in cuda.waited
    assert "everstep-copier" in cuda.waited
    again, user = torch.amp.GradScaler("cpu"), Statistics(torch.tensor(0))
    spec = generation(2, restore=RestoreRule())
    objects = {"model": nn.Linear(8, 8), "scaler": again, "user": user}
    assert Restoration(client, spec, spec.roster[0], HashStore()).fill(TrackedState(objects)).step == 1
    state = again.state_dict()
    assert (state["scale"], state["_growth_tracker"], state["growth_interval"]) == (32768.0, 2, 3)
    assert (type(state["scale"]), type(state["_growth_tracker"])) == (float, int)
    assert (user.seen.item(), user.seen.dtype, user.steps) == (100_000, torch.int64, 7)


def test_room_for_pending_gpu_state_is_known_and_sufficient(cuda: SimulatedCuda) -> None:
    tracker = on_gpu(torch.tensor(0, dtype=torch.int32))
    scaler = scaler_on(on_gpu(torch.tensor(2.0)), tracker)
    blob = TrackedState({"scaler": scaler, "user": Statistics(on_gpu(torch.arange(5)))}).capture()
    cuda.training.drain()
    data = blob.data()
    assert len(data) <= blob.max_bytes <= len(data) + 16
    assert blob.data() is data
    assert decode(data).objects["user"]["seen"][0].tolist() == [0, 1, 2, 3, 4]


def test_scaler_without_gpu_tensors_uses_its_own_state_dict(cuda: SimulatedCuda) -> None:
    for scaler in (
        torch.amp.GradScaler("cpu", init_scale=4.0),
        scaler_on(torch.tensor(4.0), torch.tensor(0, dtype=torch.int32)),
    ):
        assert get_state_dict(scaler) == scaler.state_dict()
        assert get_state_dict(scaler)["scale"] == 4.0
    assert get_state_dict(torch.amp.GradScaler("cpu", enabled=False)) == {}
