"""Boxes of placements, compared with tensors whose elements name their position in the whole tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.layout.manifests import Box
from everstep_trainer.runtime.process_group import patch_mesh_equality
from everstep_trainer.state.tensors import local_boxes, local_parts
from tests.support.ranks.layouts import fake_group

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "tp": ((3,), ("tp",)),
    "fsdp x tp": ((2, 2), ("shard", "tp")),
    "fsdp x tp, more shards": ((3, 2), ("shard", "tp")),
    "hsdp x tp": ((2, 2, 3), ("replicate", "shard", "tp")),
}
STYLES = {"columns": ColwiseParallel, "rows": RowwiseParallel}


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@pytest.mark.promise("layout-change")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("out", [8, 12, 7, 11])
def test_sharded_parallel_layer_boxes_match_its_elements(
    mesh_name: str, style: str, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)  # restored after the test
    patch_mesh_equality()
    shape, names = MESHES[mesh_name]
    weight, bias = numbered((out, 6)), numbered((out,))
    counted = {"weight": torch.zeros(out, 6), "bias": torch.zeros(out)}
    for rank in range(torch.Size(shape).numel()):
        with fake_group(rank, shape, names) as mesh:
            layer = nn.Linear(6, out)
            with torch.no_grad():
                layer.weight.copy_(weight)
                layer.bias.copy_(bias)
            parallelize_module(layer, mesh["tp"], STYLES[style](), src_data_rank=None)
            if len(shape) > 1:
                fully_shard(layer, mesh=mesh[names[:-1]] if len(shape) > 2 else mesh["shard"])
            for name, parameter in layer.named_parameters():
                whole = {"weight": weight, "bias": bias}[name]
                parts = local_parts(name, parameter)
                assert isinstance(parameter, DTensor)
                assert sum(box.volume for _, box in parts) == parameter._local_tensor.numel()
                for local, box in parts:
                    assert torch.equal(local, whole[cells(box)])
                    counted[name][cells(box)] += 1
    assert all((count >= 1).all() for count in counted.values())


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_part_of_each_of_several_pieces_is_as_many_boxes(
    n: int, parts: int, factor: int, data: st.DataObject
) -> None:
    """A strided part of pieces that no other mesh dimension cuts, compared with torch's own split."""
    index = data.draw(st.integers(0, parts - 1))
    whole = numbered((3, n))
    split: Any = _StridedShard(1, split_factor=factor)._split_tensor(whole, parts, with_padding=False)
    expected = split[0][index]
    got = torch.full_like(expected, -1)
    for at, box in local_boxes((3, n), (parts, 2), (index, 1), [_StridedShard(1, split_factor=factor), Replicate()]):
        got[cells(Box(at, box.size))] = whole[cells(box)]
    assert torch.equal(got, expected)


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))


def test_partial_placement_has_no_box() -> None:
    with pytest.raises(TypeError, match="only Shard and Replicate have a box"):
        local_boxes((4,), (2,), (0,), [Partial()])


SHAPES: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((2,), [Shard(0)]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((3,), [Shard(1)]),
    ((2, 3), [Shard(0), Shard(1)]),
    ((2, 2), [Shard(0), Shard(0)]),
    ((5,), [Replicate()]),
]


def boxes_of(mesh: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> tuple[Box, Box]:
    """Return the box of a tensor of this shape as computed here, and as computed by torch."""
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
        with fake_group(rank, mesh_shape) as mesh:
            ours, theirs = boxes_of(mesh, placements, shape)
            assert ours.size == theirs.size
            assert ours.volume == 0 or ours == theirs


def test_mesh_of_another_generation_is_refused_with_advice() -> None:
    with fake_group(3, (4,)) as mesh:
        kept = mesh
    with (
        fake_group(1, (4,)),
        pytest.raises(TypeError, match="weight is on a mesh of rank 3, but this process is rank 1 now: make"),
    ):
        boxes_of(kept, [Shard(0)], (8, 6))
