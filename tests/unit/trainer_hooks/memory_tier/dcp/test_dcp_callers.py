"""torch's own saving functions call a VaultWriter: what each of them needs, and refusals that say what to do."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from everstep.ids import Version
from everstep_trainer.memory_tier.dcp import VaultReader, VaultWriter
from everstep_trainer.memory_tier.dcp.dcp_format import parse_step
from everstep_trainer.memory_tier.tier import MemoryTier
from tests.support.fleet.generations import generation


@pytest.fixture
def tier() -> Iterator[MemoryTier]:
    """The memory tier of one rank, without a vault."""
    spec = generation(3)
    vault: Any = None
    store = HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield MemoryTier(vault, spec, spec.roster[0], store)
    finally:
        dist.destroy_process_group()


def test_writer_takes_its_step_from_the_checkpoint_name(tier: MemoryTier) -> None:
    writer = VaultWriter(tier)
    writer.reset("outputs/run-7/step-40")
    assert writer._version == Version(3, 40)
    assert [parse_step(name) for name in ("step-1", "/a/12/", "s3://b/epoch=3-step=250.ckpt")] == [1, 12, 250]
    for owner in (writer, VaultReader(tier)):
        with pytest.raises(ValueError, match=r"give VaultWriter or VaultReader the step"):
            owner.reset("outputs/last")
    fixed = VaultWriter(tier, 5)
    fixed.reset("outputs/step-40")
    assert fixed._version.step == 5


@pytest.mark.promise("memory-tier-newest")
def test_saving_thread_must_have_its_own_process_group(tier: MemoryTier) -> None:
    state = {"weight": torch.zeros(2)}

    def save() -> None:
        saved = state_dict_saver.async_save(state, storage_writer=VaultWriter(tier, 1))
        assert isinstance(saved, Future)
        saved.result()

    with pytest.raises(CheckpointException, match=r"process_group=dist.new_group\(backend='gloo'\)"):
        save()


@pytest.mark.promise("memory-tier-newest")
def test_writer_of_an_ended_generation_writes_nothing(tier: MemoryTier) -> None:
    tier.is_over = True
    with pytest.raises(CheckpointException, match="its generation is over"):
        state_dict_saver.save({"weight": torch.zeros(2)}, storage_writer=VaultWriter(tier, 1))


@pytest.mark.promise("memory-tier-newest")
def test_writer_refuses_pickling_with_advice(tier: MemoryTier) -> None:
    with pytest.raises(TypeError, match=r"AsyncCheckpointerType\.THREAD"):
        pickle.dumps(VaultWriter(tier, 1))
