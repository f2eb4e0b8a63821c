"""Device meshes of one process that plays different ranks in the course of time, told apart.

torch remembers what it worked out for an operation on DTensors (where its output lies, what is to be sent) by the
meshes of its inputs, in every thread that computes, and compares meshes by the ranks in them: not by the place this
process has among those, nor by process group. After a regrouping that gives it another rank, the first ``detach`` of a
parameter would come back on the mesh of an older generation: with another rank's offsets, and with the names of groups
in which this process no longer is.

A mesh does carry what tells ranks apart that are threads of one process, and is compared by it. Here the rank goes
there. So a process that keeps its rank keeps what torch remembers, which is about 0.1 s of its first step; the group
names in it are good, since they are counted anew in each generation.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_make = DeviceMesh.__init__


@wraps(_make)
def _make_for_rank(mesh: DeviceMesh, *args: Any, **options: Any) -> None:
    _make(mesh, *args, **options)
    if mesh._thread_id is None and dist.is_initialized():
        mesh._thread_id = dist.get_rank()
        mesh._hash = None


def tell_ranks_apart() -> None:
    """From here on a mesh of this process equals one over the same ranks only where the process had the same rank."""
    DeviceMesh.__init__ = _make_for_rank  # type: ignore[method-assign, assignment]
