"""Boxes of placements, against tensors whose elements say themselves where they are in the whole."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from everstep_trainer.restore.fetch import NeededBox, plan_reads
from everstep_trainer.runtime.process_group import patch_mesh_equality
from everstep_trainer.state.tensors import local_boxes, local_parts
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from everstep.layout.manifests import LAYOUT_FORMAT, Box, Manifest, StoredBox, TensorInfo, byte_ranges
from tests.support.layouts import playing

MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "tp": ((3,), ("tp",)),
    "fsdp x tp": ((2, 2), ("shard", "tp")),
    "fsdp x tp, more shards": ((3, 2), ("shard", "tp")),
    "hsdp x tp": ((2, 2, 3), ("replicate", "shard", "tp")),
}
STYLES = {"columns": ColwiseParallel, "rows": RowwiseParallel}


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def cut_by_hand(whole: torch.Tensor, dims: list[tuple[int, int, int]]) -> torch.Tensor:
    """One (dimension, part, parts) after another; torch.chunk leaves empty parts out, here they are there."""
    for dim, part, parts in dims:
        chunks = [*torch.chunk(whole, parts, dim)]
        whole = chunks[part] if part < len(chunks) else whole.narrow(dim, 0, 0)
    return whole


@pytest.mark.promise("layout-change")
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize("out", [8, 12, 7, 11])
def test_sharded_parallel_layer_boxes_match_its_elements(
    mesh_name: str, style: str, out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)  # put back afterwards
    patch_mesh_equality()
    shape, names = MESHES[mesh_name]
    weight, bias = numbered((out, 6)), numbered((out,))
    counted = {"weight": torch.zeros(out, 6), "bias": torch.zeros(out)}
    for rank in range(torch.Size(shape).numel()):
        with playing(rank, shape, names) as mesh:
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
                assert sum(box.volume for _, box in parts) == parameter._local_tensor.numel()
                for local, box in parts:
                    assert torch.equal(local, whole[cells(box)])
                    counted[name][cells(box)] += 1
    assert all((count >= 1).all() for count in counted.values())


@st.composite
def cuttings(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A shape, a mesh, and which dimension of the tensor each mesh dimension cuts."""
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return shape, mesh, [draw(st.integers(0, len(shape) - 1)) for _ in mesh]


@given(cuttings())
def test_cuts_from_right_to_left_are_one_box(drawn: tuple[list[int], list[int], list[int]]) -> None:
    """As FSDP2 and tensor parallelism make them, uneven ones included: against tensors cut in that order."""
    shape, mesh, dims = drawn
    placements: list[Placement] = []
    for index, dim in enumerate(dims):
        factor = torch.Size(mesh[j] for j in range(index + 1, len(mesh)) if dims[j] == dim).numel()
        placements.append(_StridedShard(dim, split_factor=factor) if factor > 1 else Shard(dim))
    whole = numbered(tuple(shape))
    for coordinate in itertools.product(*map(range, mesh)):
        order = list(zip(dims, coordinate, mesh, strict=True))[::-1]
        expected = cut_by_hand(whole, order)
        ((_, box),) = local_boxes(tuple(shape), mesh, coordinate, placements)
        assert box.size == tuple(expected.shape)
        assert torch.equal(whole[cells(box)], expected)


@given(st.integers(1, 20), st.integers(1, 4), st.integers(1, 4), st.data())
def test_a_part_of_each_of_several_pieces_is_as_many_boxes(
    n: int, parts: int, factor: int, data: st.DataObject
) -> None:
    """A strided part beside which nobody cuts the pieces, against what torch itself splits off."""
    index = data.draw(st.integers(0, parts - 1))
    whole = numbered((3, n))
    split: Any = _StridedShard(1, split_factor=factor)._split_tensor(whole, parts, with_padding=False)
    expected = split[0][index]
    got = torch.full_like(expected, -1)
    for at, box in local_boxes((3, n), (parts, 2), (index, 1), [_StridedShard(1, split_factor=factor), Replicate()]):
        got[cells(Box(at, box.size))] = whole[cells(box)]
    assert torch.equal(got, expected)


@st.composite
def laid_out(draw: st.DrawFn, dims: int) -> list[list[Placement] | list[int]]:
    """A mesh, and placements on it as DDP, FSDP2, tensor parallelism and mixes of them make them."""
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    cut = [draw(st.none() | st.integers(0, dims - 1)) for _ in mesh]
    placements: list[Placement] = []
    for index, dim in enumerate(cut):
        factor = torch.Size(mesh[j] for j in range(index + 1, len(mesh)) if cut[j] == dim).numel()
        strided = dim is not None and factor > 1 and draw(st.booleans())
        if dim is None:
            placements.append(Replicate())
        else:
            placements.append(_StridedShard(dim, split_factor=factor) if strided else Shard(dim))
    return [mesh, placements]


def parts_of(shape: tuple[int, ...], layout: Any) -> list[list[Box]]:
    """The boxes of each rank."""
    mesh, placements = layout
    return [
        [box for _, box in local_boxes(shape, mesh, coordinate, placements) if box.volume]
        for coordinate in itertools.product(*map(range, mesh))
    ]


@given(st.data(), st.lists(st.integers(1, 11), min_size=1, max_size=3).map(tuple))
def test_any_layout_is_read_from_any_other(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Each target rank's boxes from the slots of the source's ranks, in any order; against whole arrays."""
    source, target = data.draw(laid_out(len(shape))), data.draw(laid_out(len(shape)))
    whole = numbered(shape).int()
    tensor = TensorInfo("t", "int32", 4, shape, False)
    slots: list[tuple[Manifest, bytes]] = []
    for boxes in data.draw(st.permutations(parts_of(shape, source))):
        stored, payload = [], b""
        for box in boxes:
            stored.append(StoredBox(0, box, len(payload)))
            payload += whole[cells(box)].numpy().tobytes()
        manifest = Manifest(LAYOUT_FORMAT, 0, 1, (tensor,), tuple(stored), len(payload), 0, len(payload) + 8, 0)
        slots.append((manifest, payload))
    for wanted in parts_of(shape, target):
        wants = [NeededBox(0, box) for box in wanted]
        got = torch.full(shape, -1, dtype=torch.int32)
        for read in plan_reads(wants, [manifest for manifest, _ in slots]):
            payload = slots[read.source_index][1]
            ranges = byte_ranges(read.stored.box, read.box, 4, read.stored.offset)
            found = bytearray(b"".join(payload[at : at + n] for at, n in ranges))
            assert (got[cells(read.box)] == -1).all(), "an element was read twice"
            got[cells(read.box)] = torch.frombuffer(found, dtype=torch.int32).view(read.box.size)
        for box in wanted:
            assert torch.equal(got[cells(box)], whole[cells(box)])


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))


def test_partial_placement_has_no_box() -> None:
    with pytest.raises(TypeError, match="only Shard and Replicate have a box"):
        local_boxes((4,), (2,), (0,), [Partial()])
