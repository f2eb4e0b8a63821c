"""torch's cache of DTensor operations, across generations in one process."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep_trainer.runtime import process_group


@pytest.fixture(autouse=True)
def distinct_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)  # put back afterwards
    process_group.patch_mesh_equality()


@contextmanager
def mesh_of_rank(rank: int, world: int = 4, other_groups: int = 0) -> Iterator[DeviceMesh]:
    """Make this process ``rank`` of a generation whose collectives do nothing, and give its mesh. ``other_groups`` are
    created before those of the mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        for _ in range(other_groups):
            dist.new_group([rank])
        yield init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    finally:
        dist.destroy_process_group()


def mesh_of_result(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh of the result of an operation on a tensor on ``mesh``."""
    detached = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0)], run_check=False).detach()
    assert isinstance(detached, DTensor)
    return detached.device_mesh


@pytest.mark.promise("rank-reassignment")
def test_operation_result_lies_on_the_mesh_of_the_current_rank() -> None:
    with ThreadPoolExecutor(1) as backward:  # torch remembers in each thread for itself
        for rank in (3, 1, 0, 3):
            with mesh_of_rank(rank) as mesh:
                assert mesh_of_result(mesh["shard"]).get_coordinate() == (rank % 2,)
                assert backward.submit(mesh_of_result, mesh["shard"]).result().get_coordinate() == (rank % 2,)


def test_operation_result_has_the_current_process_groups() -> None:
    with mesh_of_rank(2) as mesh:
        before = mesh_of_result(mesh["shard"])
    with mesh_of_rank(2, other_groups=3) as mesh:
        now = mesh_of_result(mesh["shard"])
        assert now._dim_group_names == mesh["shard"]._dim_group_names
        assert now._dim_group_names != before._dim_group_names
        assert now.get_group().size() == 2
        flat = mesh._flatten("all")
        assert mesh_of_result(flat)._dim_group_names == flat._dim_group_names
