"""Where a rank stands in its generation."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch
from torch.distributed.device_mesh import DeviceMesh

from trainer_hooks.tier import Tier


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a rank stands in its generation. ``restores``: a version will be restored for certain."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    generation: int = 0
    device: torch.device = torch.device("cpu")
    restores: bool = False
    mesh: Callable[[], DeviceMesh] | None = None
    tier: Callable[[], Tier] | None = None
