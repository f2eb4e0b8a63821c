"""A live tensor's box: where this rank stands in its mesh now."""

from __future__ import annotations

import pytest
import torch
from everstep_trainer.state.tensors import local_parts
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from everstep.layout.manifests import Box
from tests.support.layouts import playing

SHAPES: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2,), [Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((3,), [Shard(1)]),
    ((2, 3), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((5,), [Replicate()]),
]


def held(mesh: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> tuple[Box, Box]:
    """The box of a tensor of this shape as we have it, and as torch does."""
    size, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    stride = torch.empty(shape).stride()
    tensor = DTensor.from_local(
        torch.zeros(size), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    ((_, box),) = local_parts("weight", tensor)
    return box, Box(tuple(offset), tuple(size))


@pytest.mark.parametrize(("mesh_shape", "placements"), SHAPES)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (4, 1)])
def test_a_box_is_where_torch_has_the_local_part(
    mesh_shape: tuple[int, ...], placements: list[Placement], shape: tuple[int, ...]
) -> None:
    for rank in range(torch.Size(mesh_shape).numel()):
        with playing(rank, mesh_shape) as mesh:
            ours, theirs = held(mesh, placements, shape)
            assert ours.size == theirs.size
            assert ours.volume == 0 or ours == theirs


def test_process_with_a_new_rank_has_the_box_of_the_new_rank() -> None:
    with playing(3, (4,)) as mesh:
        before, _ = held(mesh, [Shard(0)], (8, 6))
    with playing(1, (4,)) as mesh:
        after, _ = held(mesh, [Shard(0)], (8, 6))
    assert before == Box((6, 0), (2, 6))
    assert after == Box((2, 0), (2, 6))


def test_mesh_of_another_generation_is_refused_with_advice() -> None:
    with playing(3, (4,)) as mesh:
        kept = mesh
    with (
        playing(1, (4,)),
        pytest.raises(TypeError, match="weight is on a mesh of rank 3, but this process is rank 1 now: make"),
    ):
        held(kept, [Shard(0)], (8, 6))
