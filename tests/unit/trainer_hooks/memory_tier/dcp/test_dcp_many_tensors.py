"""A checkpoint of many tensors is written with as much work for each as one of few."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everstep_trainer.memory_tier.dcp import MemoryTier, VaultSavePlanner, VaultWriter
from torch.distributed.checkpoint.planner import WriteItem

from tests.support.forked import ForkPool
from tests.support.generations import generation
from tests.support.lone_rank import lone_rank

MANY = 300


class Name(str):
    """Counts how often one of them is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


@pytest.fixture
def tier(program_forks: ForkPool) -> Iterator[MemoryTier]:
    with lone_rank(program_forks) as made:
        spec = generation(1)
        yield MemoryTier(made.client, spec, spec.roster[0], dist.HashStore())


def test_writing_many_tensors_takes_linear_comparisons(tier: MemoryTier, monkeypatch: pytest.MonkeyPatch) -> None:
    state: dict[str, Any] = {f"t{number}": torch.ones(2) for number in range(MANY)}
    planner = VaultSavePlanner()
    planner.set_up_planner({**state, "step": 7}, None, True)
    plan = planner.create_local_plan()
    compared: list[WriteItem] = []
    monkeypatch.setattr(WriteItem, "__eq__", lambda self, other: compared.append(self) or self is other)
    writer = VaultWriter(tier, 1)
    assert len(writer.write_data(plan, planner).wait()) == MANY + 1
    assert not compared
    items = [item for item in plan.items if item.tensor_data is not None]
    named = [replace(item, index=replace(item.index, fqn=Name(item.index.fqn))) for item in items]
    Name.compared = 0
    manifest = writer._manifest(named, 0)
    assert [stored.tensor for stored in manifest.stored] == list(range(MANY))
    assert Name.compared < 10 * MANY
