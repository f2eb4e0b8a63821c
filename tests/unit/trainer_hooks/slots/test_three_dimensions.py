"""Meshes of 2 x 2 x 2: the shares that eight ranks store and that other layouts read, planned in one process.

Planning is a function of layouts alone, so that no rank has to be there: torch's fake process group makes this process
one rank after another. The oracle has every element from every rank that holds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.layout.manifests import Box, Manifest
from everstep_trainer.runtime.process_group import patch_mesh_equality
from everstep_trainer.slots.copy import slot_view, view_of_box
from everstep_trainer.slots.fetch import NeededBox, plan_reads
from everstep_trainer.slots.shares import RankShare, build_manifest, divide_state
from everstep_trainer.state import layout as state_layout
from everstep_trainer.state.tensors import TrackedTensor
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.layouts import Layout, Piece, Trained, merged

SIZES: dict[str, Any] = {"width": 20, "hidden": (16, 7, 18, 5)}
"""Some that divide by two and by four, and some that do not; every part is too large for each holder to store it."""
SCALAR_BYTES = 64
STEPS, COPIES, RANKS_A_NODE = 2, 2, 2
THREE = {
    "pp x fsdp2 x tp": Layout(pp=2, shard=2, tp=2, **SIZES),
    "hsdp x tp": Layout(replicate=2, shard=2, tp=2, **SIZES),
    "pp x hsdp": Layout(pp=2, replicate=2, shard=2, **SIZES),
}
FEWER = {
    "fsdp2 x tp": Layout(shard=2, tp=2, **SIZES),
    "pp x tp": Layout(pp=2, tp=2, **SIZES),
    "fsdp2": Layout(shard=4, **SIZES),
    "one rank": Layout(**SIZES),
}

INTO = {
    "pp x fsdp2 x tp": [*FEWER.values()],
    "hsdp x tp": [THREE["pp x hsdp"], FEWER["one rank"]],
    "pp x hsdp": [THREE["pp x fsdp2 x tp"]],
}

Slots = list[tuple[Manifest, torch.Tensor]]
"""Of all ranks: what lies in a slot, and its bytes."""


@pytest.fixture(autouse=True)
def distinct_meshes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)  # put back afterwards
    patch_mesh_equality()


@contextmanager
def as_rank(rank: int, layout: Layout) -> Iterator[Trained]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        yield Trained(layout)
    finally:
        dist.destroy_process_group()


def cells(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.size, strict=True))


def by_tracked_name(whole: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The oracle's arrays of tensors, under the names that a version has them by."""
    found = {}
    for name, array in whole.items():
        fqn, _, key = name.rpartition(".")
        if fqn.endswith(("weight", "bias")) and key != "decay":
            shape = () if key == "step" else array.shape
            found[f"optimizer.model.{name}" if key else f"model.{fqn}"] = array.reshape(shape)
    return found


def store(layout: Layout) -> tuple[dict[str, np.ndarray], Slots, list[RankShare], dict[tuple[int, int], str]]:
    """Return the trained arrays in full, and each rank's stored share; names by (rank, part)."""
    pieces: list[Piece] = []
    held: list[dict[tuple[str, Box], TrackedTensor]] = []
    layouts: list[state_layout.Layout] = []
    names: dict[tuple[int, int], str] = {}
    for rank in range(layout.world):
        with as_rank(rank, layout) as trained:
            for step in range(1, STEPS + 1):
                trained.step(step)
            pieces += trained.pieces()
            state = TrackedState(trained.tracked)
            tensors = state.tensors()
            held.append({(t.name, t.box): t for t in tensors})
            layouts.append(state.layout(tensors, rank, layout.world))
            names |= {(rank, index): part.name for index, part in enumerate(layouts[-1].parts)}
    shares = divide_state(layouts, [f"n{rank // RANKS_A_NODE}" for rank in range(layout.world)], COPIES)
    slots: Slots = []
    for rank, share in enumerate(shares):
        manifest = build_manifest(rank, layouts, share, blob_capacity=0)
        payload = torch.zeros(manifest.payload_bytes, dtype=torch.uint8)
        for stored in manifest.stored:
            tensor = manifest.catalog[stored.tensor]
            source = next(
                view_of_box(t.local, t.box, stored.box)
                for (name, box), t in held[rank].items()
                if name == tensor.name and box.intersect(stored.box) == stored.box
            )
            slot_view(payload, stored.offset, tensor.dtype, stored.box.size).copy_(source)
        slots.append((manifest, payload))
    return merged(pieces), slots, shares, names


def load(layout: Layout, slots: Slots) -> dict[str, np.ndarray]:
    """Return the arrays that ranks of another layout restore. Each rank reads its part, and nothing twice."""
    manifests = [manifest for manifest, _ in slots]
    pieces: list[Piece] = []
    for rank in range(layout.world):
        with as_rank(rank, layout) as trained:
            targets = TrackedState(trained.tracked).restore_targets(manifests[0].catalog)
            wants = [NeededBox(index, target.box) for index, target in targets]
            with torch.no_grad():
                for read in plan_reads(wants, manifests):
                    target, dtype = targets[read.needed_index][1], manifests[0].catalog[read.stored.tensor].dtype
                    there = slot_view(slots[read.source_index][1], read.stored.offset, dtype, read.stored.box.size)
                    view_of_box(target.local, target.box, read.box).copy_(view_of_box(there, read.stored.box, read.box))
            trained.schedule.last_epoch = STEPS  # Python state is restored by others
            pieces += (piece for piece in trained.pieces() if piece[0] != "lr")
    return merged(pieces)


@pytest.mark.slow
@pytest.mark.promise("layout-change")
@pytest.mark.parametrize("name", THREE)
def test_three_dimensional_mesh_restores_into_other_layouts(name: str) -> None:
    whole, slots, shares, names = store(THREE[name])
    arrays = by_tracked_name(whole)
    assert arrays.keys() == {tensor.name for tensor in slots[0][0].catalog} - {"model.constant"}
    nodes_with = {
        tensor: [np.zeros((4, *array.shape), int), np.zeros(array.shape, bool)] for tensor, array in arrays.items()
    }
    for rank, (share, (manifest, payload)) in enumerate(zip(shares, slots, strict=True)):
        for stored in manifest.stored:
            tensor = manifest.catalog[stored.tensor]
            if tensor.name in arrays:
                values = slot_view(payload, stored.offset, tensor.dtype, stored.box.size).numpy()
                assert np.array_equal(values, arrays[tensor.name][cells(stored.box)]), f"rank {rank}: {tensor.name}"
        for piece in share.pieces:
            if (tensor_name := names[rank, piece.part]) in arrays:
                by_node, sent_on = nodes_with[tensor_name]
                node = rank // RANKS_A_NODE
                by_node[node : node + 1][slice(None), *cells(piece.box)] += 1
                sent_on[cells(piece.box)] |= piece.is_exclusive
    for tensor_name, (by_node, sent_on) in nodes_with.items():
        nodes = (by_node > 0).sum(0) + sent_on  # the vault copies what is exclusive to another node
        assert (nodes >= COPIES).all(), f"{tensor_name} has its copies"
        if arrays[tensor_name].nbytes > SCALAR_BYTES * 8:
            assert (by_node.sum(0) <= COPIES).all(), f"{tensor_name} is stored no more often"
            assert (by_node.sum(0)[sent_on] == 1).all(), f"what is sent on of {tensor_name} is stored once"
    for other in INTO[name]:
        loaded = load(other, slots)
        assert not [n for n in loaded if not np.array_equal(loaded[n], whole[n])]
        assert loaded.keys() == whole.keys() - {"lr"}


def test_state_of_one_rank_restores_into_a_3d_mesh() -> None:
    whole, slots, *_ = store(FEWER["one rank"])
    loaded = load(THREE["hsdp x tp"], slots)
    assert not [n for n in loaded if not np.array_equal(loaded[n], whole[n])]
