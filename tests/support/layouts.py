"""Ways to lay a model out over ranks, and ranks that are played without processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def playing(rank: int, shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Iterator[DeviceMesh]:
    """This process as ``rank`` of a generation whose collectives do nothing."""
    world = torch.Size(shape).numel()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()
