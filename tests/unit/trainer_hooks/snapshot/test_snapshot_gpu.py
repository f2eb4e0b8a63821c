"""Snapshots from a GPU: page-locked slots, a stream of their own, and an event before the next update."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path
from threading import Event

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from everstep.ids import Version
from everstep.layout.segment_header import segment_bytes
from everstep.layout.slots import format_segment
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.training import RestoreRule
from everstep_trainer.digests.digest import WeightedDigest
from everstep_trainer.restore.restorer import Restoration
from everstep_trainer.slots.vault_client import MappedSegment, VaultClient
from everstep_trainer.snapshot.pace import StepStopwatch
from everstep_trainer.snapshot.planner import page_lock
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.python_state import decode
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.fleet.generations import generation
from tests.support.vaults.vault_process import vaults

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_gpu_snapshot_restores_its_step_bit_identically() -> None:
    """The update that follows ``wait`` on the training stream must not reach into the copy."""
    with vaults() as fleet:
        vault = fleet.start("n1")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        spec = generation(1)
        objects = {"model": model, "optimizer": optimizer}
        snapshots = Snapshotter(client, TrackedState(objects), spec, spec.roster[0], HashStore(), lambda _: None)
        try:
            for step in range(1, 6):
                model(torch.randn(64, 1024, device="cuda")).square().mean().backward()
                snapshots.wait()
                optimizer.step()
                optimizer.zero_grad()
                if step == 5:
                    expected = [p.detach().clone() for p in model.parameters()]
                snapshots.begin(step)
            snapshots.wait()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            snapshots.close(finish=True)
            again = generation(2, restore=RestoreRule())
            result = Restoration(client, again, again.roster[0], HashStore()).fill(TrackedState(objects))
        finally:
            client.close()
        assert result.version == Version(1, 5)
        assert all(torch.equal(a, b) for a, b in zip(expected, model.parameters(), strict=True))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")
def test_snapshot_on_two_gpus_is_of_its_step_on_both() -> None:
    """The second GPU is behind the first at every step, and neither's update reaches into the copy."""
    with vaults() as fleet:
        vault = fleet.start("n1")
        fleet.configure()
        client = VaultClient(str(vault.run_dir / "vault.sock"))
        model = nn.ModuleList([nn.Linear(2048, 2048).to(f"cuda:{index}") for index in range(2)])
        spec = generation(1)
        state = TrackedState({"model": model})
        snapshots = Snapshotter(client, state, spec, spec.roster[0], HashStore(), lambda _: None)
        try:
            for step in range(1, 6):
                snapshots.wait()
                with torch.no_grad():
                    busy = torch.randn(4096, 4096, device="cuda:1")
                    for _ in range(20):
                        busy = busy @ busy
                    for parameter in model.parameters():
                        parameter.fill_(step)
                snapshots.begin(step)
            snapshots.wait()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            snapshots.close(finish=True)
            again = generation(2, restore=RestoreRule())
            result = Restoration(client, again, again.roster[0], HashStore()).fill(state)
        finally:
            client.close()
        assert result.version == Version(1, 5)
        assert [parameter.unique().tolist() for parameter in model.parameters()] == [[5.0]] * 4


def test_digest_is_the_same_on_gpu_and_host() -> None:
    tensors = [torch.randn(n) for n in (5, 40_000, 3_000_000)]
    on_gpu = [t.cuda() for t in tensors]
    assert WeightedDigest(on_gpu).value() == WeightedDigest(tensors).value()


def test_gradient_scaler_is_stored_without_gpu_sync() -> None:
    scaler = torch.amp.GradScaler("cuda", init_scale=512.0)
    scaler.scale(torch.ones((), device="cuda"))
    state = TrackedState({"scaler": scaler})
    assert scaler._scale is not None
    state.capture().data()
    torch.cuda._sleep(100_000_000)
    scaler._scale.mul_(2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        blob = state.capture()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    scaler._scale.mul_(2)
    assert decode(blob.data()).objects["scaler"]["scale"] == 1024.0


def test_snapshot_delay_is_measured_in_stream_time() -> None:
    """Between events: a wait of the thread counts where the GPU has nothing to do meanwhile, else it does not."""
    steps: list[tuple[float, float | None]] = []
    watch, gpus = StepStopwatch(lambda *step: steps.append(step), SYSTEM_CLOCK), [torch.device("cuda", 0)]
    for idle in (False, True, False):
        watch.end_step(gpus)
        torch.cuda._sleep(1_000_000_000)  # cycles: half a second or more
        if idle:
            torch.cuda.synchronize()
        with watch.blocked(has_snapshot=True):
            Event().wait(0.1)
    watch.end_step(gpus)
    torch.cuda.synchronize()
    watch.end_step(gpus)
    (step_s, under), (_, alone) = steps[:2]
    assert step_s > 0.1
    assert under is not None
    assert alone is not None
    assert under < 0.05 < 0.1 <= alone


def test_slot_memory_is_registered_while_held_and_again_later(tmp_path: Path) -> None:
    path, length = tmp_path / "own-0", segment_bytes(2, 1 << 20)
    path.write_bytes(bytes(length))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping, memoryview(mapping) as whole:
        format_segment(whole, 2, 1 << 20)
    segment = MappedSegment(str(path))
    buffer, cudart = segment.buffer, torch.cuda.cudart()
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    page_lock(segment)
    assert int(cudart.cudaHostRegister(address, length, 0)) != 0, "it is registered"
    del segment
    gc.collect()
    assert int(cudart.cudaHostRegister(address, length, 0)) == 0, "it was given back"
    assert int(cudart.cudaHostUnregister(address)) == 0
