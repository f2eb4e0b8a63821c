"""Device meshes of one process that plays different ranks in the course of time, told apart.

torch remembers what it worked out for an operation on DTensors (where its output lies, what is to be sent) by the
meshes of its inputs, in every thread that computes, and compares meshes by the ranks in them: not by the place this
process has among those, nor by process group. After a regrouping that gives it another rank, the first ``detach`` of a
parameter would come back on the mesh of an older generation: with another rank's offsets, and with the names of groups
in which this process no longer is. The same after one in which the model is laid out in another way, and so makes other
groups: they are named by counting.

A mesh does carry what tells ranks apart that are threads of one process, and is compared by it. Here the rank goes
there, and the names of the groups. So a process that keeps its rank and its layout keeps what torch remembers, which is
about 0.1 s of its first step.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

_make = DeviceMesh.__init__
_numbers: dict[tuple[object, ...], int] = {}


@wraps(_make)
def _make_for_rank(mesh: DeviceMesh, *args: Any, **options: Any) -> None:
    _make(mesh, *args, **options)
    if mesh._thread_id is None and dist.is_initialized():
        mesh._thread_id = _number_of(mesh)
        mesh._hash = None


def _number_of(mesh: DeviceMesh) -> int:
    """One number for each rank with each set of groups; a part of a mesh has its root's groups, or some besides."""
    root = mesh._get_root_mesh()
    groups = tuple(getattr(mesh, "_dim_group_names", ()))
    of_root = None if root is mesh else root._thread_id
    return _numbers.setdefault((dist.get_rank(), of_root, groups), len(_numbers))


def tell_ranks_apart() -> None:
    """From here on a mesh of this process equals one over the same ranks only where the process had the same rank, and
    the groups in it have the same names."""
    DeviceMesh.__init__ = _make_for_rank  # type: ignore[method-assign, assignment]
