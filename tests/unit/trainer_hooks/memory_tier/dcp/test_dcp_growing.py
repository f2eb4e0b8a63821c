"""Checkpoints that take more room than those before are found, in the process that has read the smaller ones too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from everstep_trainer.memory_tier.dcp import MemoryTier, VaultLoadPlanner, VaultReader, VaultSavePlanner, VaultWriter

from tests.support.forked import ForkPool
from tests.support.generations import generation
from tests.support.lone_rank import lone_rank


@pytest.fixture
def tier(program_forks: ForkPool, alone: None) -> Iterator[MemoryTier]:
    with lone_rank(program_forks) as made:
        spec = generation(1)
        yield MemoryTier(made.client, spec, spec.roster[0], dist.HashStore())


def test_checkpoint_outgrowing_the_slots_is_found_as_newest(tier: MemoryTier) -> None:
    for step, elements in ((1, 10), (2, 1_000_000)):
        saved = {"weight": torch.arange(float(elements)), "note": step}
        dcp.save(saved, storage_writer=VaultWriter(tier, step), planner=VaultSavePlanner())
        assert VaultReader(tier).newest_step() == step
        loaded = {"weight": torch.zeros(elements), "note": 0}
        dcp.load(loaded, storage_reader=VaultReader(tier), planner=VaultLoadPlanner())
        assert torch.equal(loaded["weight"], saved["weight"])  # type: ignore[arg-type]
        assert loaded["note"] == step
