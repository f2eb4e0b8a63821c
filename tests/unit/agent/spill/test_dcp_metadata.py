"""``.metadata`` files that are written without torch and read by torch."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from everstep.layout.manifests import Box
from everstep_agent.spill.dcp_metadata import ArchiveLocation, ObjectEntry, TensorChunk, TensorEntry, encode_metadata

PARTS = (
    TensorChunk(Box((0, 0), (2, 3)), ArchiveLocation("__0_0.distcp", 0, 900)),
    TensorChunk(Box((2, 0), (1, 3)), ArchiveLocation("__1_0.distcp", 64, 800)),
)
TENSORS = [
    TensorEntry(("model", "a.weight"), "bfloat16", (3, 3), PARTS),
    TensorEntry(
        ("optimizer", "state", "a.weight", "step"), "float32", (), (TensorChunk(Box((), ()), PARTS[0].location),)
    ),
]
OBJECTS = [ObjectEntry(("optimizer", "param_groups", 0, "lr"), ArchiveLocation("__0_0.distcp", 1 << 40, 700))]


def properties(dtype: torch.dtype) -> TensorProperties:
    return TensorProperties(dtype=dtype)


def test_metadata_equals_the_metadata_of_torch() -> None:
    size = torch.Size
    expected = Metadata(
        {
            "model.a.weight": TensorStorageMetadata(
                properties(torch.bfloat16),
                size((3, 3)),
                [
                    ChunkStorageMetadata(size((0, 0)), size((2, 3))),
                    ChunkStorageMetadata(size((2, 0)), size((1, 3))),
                ],
            ),
            "optimizer.state.a.weight.step": TensorStorageMetadata(
                properties(torch.float32), size(()), [ChunkStorageMetadata(size(()), size(()))]
            ),
            "optimizer.param_groups.0.lr": BytesStorageMetadata(),
        },
        {
            "model.a.weight": ("model", "a.weight"),
            "optimizer.state.a.weight.step": ("optimizer", "state", "a.weight", "step"),
            "optimizer.param_groups.0.lr": ("optimizer", "param_groups", 0, "lr"),
        },
        {
            MetadataIndex("model.a.weight", (0, 0)): _StorageInfo("__0_0.distcp", 0, 900),
            MetadataIndex("model.a.weight", (2, 0)): _StorageInfo("__1_0.distcp", 64, 800),
            MetadataIndex("optimizer.state.a.weight.step", ()): _StorageInfo("__0_0.distcp", 0, 900),
            MetadataIndex("optimizer.param_groups.0.lr"): _StorageInfo("__0_0.distcp", 1 << 40, 700),
        },
        None,
        "1.0.0",
    )
    read = pickle.loads(encode_metadata(TENSORS, OBJECTS))
    assert read == expected
    assert pickle.loads(pickle.dumps(read)) == expected, "as good as one of torch's own in every field"


def test_metadata_of_many_tensors_stays_small() -> None:
    many = [TensorEntry(("model", f"layers.{i}.weight"), "float32", (3, 3), PARTS) for i in range(300)]
    body = encode_metadata(many, [])
    assert len(pickle.loads(body).storage_data) == 600
    assert len(body) < 300 * 1000


def test_two_entries_of_one_key_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.a\.weight"):
        encode_metadata([TENSORS[0], TENSORS[0]], [])
