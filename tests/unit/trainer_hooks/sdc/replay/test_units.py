"""The parts of models that are audited one at a time."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from everstep_trainer.sdc.replay.units import find_units
from tests.unit.trainer_hooks.sdc.audited_models import MODELS, ConvNet, Gpt, mlp
from tests.unit.trainer_hooks.sdc.replay.auditing_ranks import grouped

BLOCKS = ["words", "blocks.0", "blocks.1", "blocks.2", "norm", "head"]


def names(**objects: object) -> list[str]:
    return [unit.name for unit in find_units(objects).units]


@pytest.mark.parametrize("name", MODELS)
def test_each_parameter_is_in_one_unit(name: str) -> None:
    model = MODELS[name].build()
    held = [p for unit in find_units({"model": model}).units for p in {*unit.module.parameters()}]
    assert {*held} == {*model.parameters()}


def test_blocks_are_elements_whose_class_repeats() -> None:
    assert names(model=Gpt()) == BLOCKS
    assert names(model=ConvNet()) == ["first", "layers.0", "layers.1", "head"]


def test_tracked_loss_is_a_unit_beside_its_model() -> None:
    assert names(model=mlp(), loss=nn.CrossEntropyLoss(label_smoothing=0.1)) == ["model", "loss"]
    assert names(loss=nn.MSELoss()) == []


def test_whole_model_stands_in_for_blocks_alone() -> None:
    units = find_units({"model": Gpt(), "critic": mlp()}).units
    blocks = [unit for unit in units if unit.is_block]
    assert [unit.name for unit in blocks] == [f"model.blocks.{n}" for n in range(3)]
    assert {unit.whole.name for unit in blocks if unit.whole} == {"model"}
    assert units[-1].whole is None, "it is the whole model itself"
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet())
    assert {unit.whole for unit in find_units({"model": synchronized}).units} == {None}


def test_parts_with_collectives_are_left_out() -> None:
    found = find_units({"model": nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet())})
    assert "layers.0.convolution" in [unit.name for unit in found.units]
    assert str(found.left_out[0]) == "layers.0.norm (SyncBatchNorm: its forward pass contains collectives)"
    assert len(found.left_out) == 2


def wrapped_names(port: int) -> dict[str, Any]:
    """Return the units of models wrapped over a group of one rank. Runs in a separate process."""
    with grouped(0, 1, port):
        mesh = init_device_mesh("cpu", (1,))
        sharded, whole = Gpt(), fully_shard(Gpt(), mesh=mesh)
        for block in sharded.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        experts = Gpt()
        experts.get_submodule("blocks.0.mlp").group = dist.group.WORLD  # type: ignore[assignment]
        compiled = torch.compile(DistributedDataParallel(mlp()))
        found = find_units({"model": sharded})
        return {
            "ddp": names(model=DistributedDataParallel(Gpt())),
            "fsdp": [unit.name for unit in found.units],
            "shards": [unit.shards is cast(FSDPModule, unit.module) for unit in found.units],
            "root": names(model=whole),
            "group": (names(model=experts), [*map(str, find_units({"model": experts}).left_out)]),
            "compiled": [*map(str, find_units({"model": compiled}).left_out)],
        }


def test_units_are_found_below_wrappers(forks: Any) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = forks.start(wrapped_names, store.port).result()
    assert found["ddp"] == found["fsdp"] == found["root"] == BLOCKS
    assert found["shards"] == [False, True, True, True, False, False]
    group, left_out = found["group"]
    assert "blocks.0.attention" in group
    assert "blocks.0.mlp.0" in group
    assert left_out == ["blocks.0.mlp (Sequential.group is a process group: its forward pass may contain collectives)"]
    assert found["compiled"] == [
        "model (compiled around DistributedDataParallel: compile the model or its blocks inside)"
    ]
