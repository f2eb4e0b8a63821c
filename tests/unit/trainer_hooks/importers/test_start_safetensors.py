"""A job that starts from weights as safetensors files, one or several with an index."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from everstep.errors import NotRestorable
from everstep.layout.manifests import Box
from everstep_trainer.importers.checkpoint_files import SafetensorsCheckpoint, find_checkpoints, open_checkpoint
from everstep_trainer.importers.importer import read_checkpoint
from everstep_trainer.importers.storage_reads import DamagedCheckpoint
from everstep_trainer.runtime.process_group import patch_mesh_equality
from everstep_trainer.state.python_value_codec import as_bytes
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.ranks.layouts import Layout, Trained, fake_group
from tests.support.vaults.sealed_slots import load_checkpoint_alone

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.bool: "BOOL"}


def as_safetensors(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return a safetensors file of the tensors, built from the format's description."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        body = as_bytes(tensor)
        place = [len(data), len(data) + len(body)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
        data += body
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + data


class Tied(nn.Module):
    """A language model with tied embeddings, and an empty and a scalar tensor."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"embed": nn.Embedding(7, 4, dtype=dtype), "norm": nn.LayerNorm(4, dtype=dtype)})
        self.lm_head = nn.Linear(4, 7, bias=False, dtype=dtype)
        self.lm_head.weight = self.model["embed"].weight  # type: ignore[assignment]
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))
        self.none = nn.Parameter(torch.empty(0, 3, dtype=dtype))


def save_as_transformers(model: Tied, folder: Path, files: int = 1, without: str = "lm_head.weight") -> Path:
    """Save as transformers does: one of two tied weights, and an index if there are several files."""
    folder.mkdir()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != without}
    (folder / "config.json").write_text("{}")
    if files == 1:
        (folder / "model.safetensors").write_bytes(as_safetensors(state))
        return folder
    where = {name: f"model-{number % files + 1:05}-of-{files:05}.safetensors" for number, name in enumerate(state)}
    for file in set(where.values()):
        (folder / file).write_bytes(as_safetensors({name: state[name] for name in state if where[name] == file}))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def load_into(model: nn.Module, path: object) -> Any:
    tracked: dict[str, Any] = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    assert load_checkpoint_alone(path, tracked, TrackedState(tracked)) == 0
    return model


@pytest.mark.promise("import-checkpoints")
@pytest.mark.parametrize("without", ["lm_head.weight", "model.embed.weight"])
@pytest.mark.parametrize("files", [1, 3])
def test_weights_folder_is_read_with_tied_weights_once(tmp_path: Path, files: int, without: str) -> None:
    before = Tied()
    after = load_into(Tied(), save_as_transformers(before, tmp_path / "llama", files, without))
    assert all(torch.equal(a, b) for a, b in zip(after.parameters(), before.parameters(), strict=True))
    assert after.lm_head.weight is after.model["embed"].weight


def test_object_store_file_is_read_and_converted_to_dtype(tmp_path: Path) -> None:
    before = Tied(torch.bfloat16)
    with fsspec.open(f"memory://{tmp_path}/weights.safetensors", "wb") as file:
        file.write(as_safetensors(before.state_dict()))
    after = load_into(Tied(), f"memory://{tmp_path}/weights.safetensors")
    assert torch.equal(after.model["embed"].weight, before.get_parameter("model.embed.weight").float())


def test_each_rank_of_a_mesh_has_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceMesh, "__init__", DeviceMesh.__init__)  # put back afterwards
    patch_mesh_equality()
    layout = Layout(shard=2, tp=2, hidden=(7, 5, 3, 6))
    whole = {name: p.detach() for name, p in layout.net().named_parameters()}
    (tmp_path / "model.safetensors").write_bytes(as_safetensors({**whole, "constant": torch.arange(5.0)}))
    for rank in range(layout.world):
        with fake_group(rank, (layout.world,)):
            trained = Trained(layout)
            places = {name: at.clone() for name, at in trained.places.items()}
            (url,) = find_checkpoints(str(tmp_path))
            tracked = {"model": trained.model}
            read_checkpoint(url, tracked, TrackedState(tracked), rank, layout.world).finish()
            for name, parameter in trained.module.named_parameters():
                assert isinstance(parameter, DTensor)
                assert torch.equal(parameter.to_local(), whole[name].take(places[name])), (rank, name)


def test_unrequested_rows_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.safetensors").write_bytes(as_safetensors({"w": torch.arange(60).view(10, 3, 2)}))
    checkpoint = open_checkpoint(str(tmp_path / "a.safetensors"))
    asked: list[int] = []
    assert isinstance(checkpoint, SafetensorsCheckpoint)
    read = checkpoint._bytes

    def noting(file: str, at: int, count: int) -> bytes:
        asked.append(count)
        return read(file, at, count)

    monkeypatch.setattr(checkpoint, "_bytes", noting)
    ((_, value),) = checkpoint.read("w", Box((4, 1, 0), (2, 2, 1)))
    assert value.tolist() == torch.arange(60).view(10, 3, 2)[4:6, 1:3, :1].tolist()
    assert asked == [2 * 3 * 2 * 8]


def test_several_files_without_index_require_a_name(tmp_path: Path) -> None:
    for name in ("adapter.safetensors", "other.safetensors"):
        (tmp_path / name).write_bytes(as_safetensors(Tied().state_dict()))
    with pytest.raises(NotRestorable, match=r"has adapter\.safetensors, other\.safetensors: name the one"):
        find_checkpoints(str(tmp_path))
    assert find_checkpoints(str(tmp_path / "other.safetensors")) == [str(tmp_path / "other.safetensors")]
    (tmp_path / "model.safetensors").write_bytes(as_safetensors(Tied().state_dict()))
    assert find_checkpoints(str(tmp_path)) == [str(tmp_path / "model.safetensors")]


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [
        ("short", "contradict its shape"),
        ("head", "not a complete safetensors file"),
        ("json", "is not a safetensors file: "),
        ("empty", "is too short"),
        ("gone", "model-00002-of-00003.safetensors is missing"),
        ("index", "has no lm_head.weight, which the index lists"),
    ],
)
def test_damaged_safetensors_file_is_refused_by_name(tmp_path: Path, harm: str, sentence: str) -> None:
    folder = save_as_transformers(Tied(), tmp_path / "llama", 3)
    file, index = folder / "model-00002-of-00003.safetensors", folder / "model.safetensors.index.json"
    body = file.read_bytes()
    if harm == "index":
        content = json.loads(index.read_text())
        content["weight_map"]["lm_head.weight"] = file.name
        index.write_text(json.dumps(content))
    elif harm == "gone":
        file.unlink()
    else:
        harmed = {"short": body[:-3], "head": bytes(4) + b"\1" + body[5:], "json": body[:9] + body[10:], "empty": b""}
        file.write_bytes(harmed[harm])
    with pytest.raises(DamagedCheckpoint, match=sentence):
        load_into(Tied(), folder)


def test_unsupported_dtype_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(as_safetensors({"w": torch.zeros(2)}).replace(b'"F32"', b'"X12"'))
    with pytest.raises(NotRestorable, match="w is of X12, which torch does not have"):
        open_checkpoint(str(tmp_path / "a.safetensors"))
