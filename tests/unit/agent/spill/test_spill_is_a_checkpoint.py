"""Checkpoints that are written from slots, read by torch's own functions under torch's own names."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from everstep.ids import Version
from everstep.layout.stored_checkpoints import folder_name
from everstep_agent.spill.__main__ import execute
from everstep_trainer.state.tracked_state import TrackedState
from tests.support.vaults.sealed_slots import UnusualModel, fill_slots, train

VERSION = Version(3, 12)
ANY_TORCH = pytest.mark.filterwarnings("ignore")
"""torch.distributed.checkpoint warns of its own use of deprecated functions, and of running in a single process."""


def shard(module: nn.Module) -> nn.Module:
    fully_shard(module)  # changes the module
    return module


class Trained:
    """A job after some steps: its tracked state, and its state according to torch."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module] | None = None) -> None:
        self.model = wrap(UnusualModel(odd_dtypes=False)) if wrap else UnusualModel()
        module = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        others = [p for n, p in module.named_parameters() if n != "low"]
        groups: list[dict[str, Any]] = [{"params": others, "lr": 0.1}, {"params": [module.low], "betas": (0.8, 0.9)}]
        self.optimizer = torch.optim.AdamW(groups, weight_decay=0.02)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.state = TrackedState({"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule})
        train(self.model, self.optimizer)
        self.schedule.step()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "schedule": self.schedule.state_dict()}


def spilled(tmp_path: Path, trained: Trained, **options: Any) -> Path:
    order = fill_slots(tmp_path / "slots", trained.state, VERSION, **options)
    outcome = execute(msgspec.structs.replace(order, url=str(tmp_path / "out")))
    assert outcome.complete
    return tmp_path / "out" / folder_name(VERSION)


def metadata_of(folder: Path) -> Metadata:
    read = pickle.loads((folder / ".metadata").read_bytes())
    assert isinstance(read, Metadata)
    return read


def plain_keys(metadata: Metadata) -> dict[str, Any]:
    return {key: path for key, path in metadata.planner_data.items() if path[0] != "everstep"}


def bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    return bool(a == b)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "replicas": {"world": 4},
    "replicas on one node": {"world": 3, "nodes": 1},
    "shards": {"world": 3, "layout": "sharded"},
    "more shards than rows": {"world": 8, "layout": "sharded"},
}


@ANY_TORCH
@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_spill_has_the_keys_and_tensors_of_dcp_save(tmp_path: Path, alone: None, wrap: str) -> None:
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": DistributedDataParallel, "fsdp2": shard}
    trained = Trained(wrappers[wrap])
    save(trained.state_dict(), checkpoint_id=tmp_path / "theirs")
    theirs, ours = metadata_of(tmp_path / "theirs"), metadata_of(spilled(tmp_path, trained))
    assert plain_keys(ours) == theirs.planner_data
    for key in theirs.state_dict_metadata:
        assert ours.state_dict_metadata[key] == theirs.state_dict_metadata[key], key
    assert ours.version == theirs.version


@ANY_TORCH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dcp_load_reads_a_spill_into_a_fresh_job(tmp_path: Path, layout: str) -> None:
    trained = Trained()
    folder = spilled(tmp_path, trained, **LAYOUTS[layout])
    fresh = Trained()
    with torch.no_grad():
        for tensor in (*fresh.model.parameters(), *fresh.model.buffers()):
            tensor.zero_()
    wanted = fresh.state_dict()
    load(wanted, checkpoint_id=folder, no_dist=True)
    assert equal(wanted, trained.state_dict())
    set_state_dict(
        fresh.model,
        fresh.optimizer,
        model_state_dict=wanted["model"],
        optim_state_dict=wanted["optimizer"],
    )
    assert equal(fresh.state_dict()["optimizer"], trained.state_dict()["optimizer"])


@ANY_TORCH
def test_dcp_to_torch_save_converts_a_spill(tmp_path: Path) -> None:
    trained = Trained()
    dcp_to_torch_save(spilled(tmp_path, trained, world=3, layout="sharded"), tmp_path / "file")
    read = torch.load(tmp_path / "file", weights_only=True)
    ours = read.pop("everstep")
    assert equal(read, trained.state_dict())
    assert ours["version"].tolist() == [3, 12]
    assert bytes(ours["blob"]["2"].tolist()) == trained.state.capture().data()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_byte_is_written_once(tmp_path: Path, layout: str) -> None:
    folder = spilled(tmp_path, Trained(), **LAYOUTS[layout])
    metadata = metadata_of(folder)
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            volumes = sum(chunk.sizes.numel() for chunk in entry.chunks)
            assert volumes == entry.size.numel(), key
    used: dict[str, set[tuple[int, int]]] = {}
    for info in metadata.storage_data.values():
        used.setdefault(info.relative_path, set()).add((info.offset, info.length))
    for name, places in used.items():
        ends = [0, *(offset + length for offset, length in sorted(places))]
        assert [offset for offset, _ in sorted(places)] == ends[:-1], "archives lie one behind another"
        assert (folder / name).stat().st_size == ends[-1]


def test_spill_keeps_buffers_of_each_rank_with_rank_0_as_default(tmp_path: Path) -> None:
    folder = spilled(tmp_path, Trained(), world=3, layout="sharded")
    read = metadata_of(folder)
    places = {index.fqn: place for index, place in read.storage_data.items()}
    ranks = [f"everstep.own.{rank}.model.norm.running_mean" for rank in range(3)]
    entries = [read.state_dict_metadata[key] for key in ranks]
    assert all(isinstance(entry, TensorStorageMetadata) and entry.size == (7,) for entry in entries)
    assert len({(places[key].relative_path, places[key].offset) for key in ranks}) == 3
    assert places["model.norm.running_mean"] == places[ranks[0]]


class Counted(nn.Linear):
    """A linear layer with extra state, and a buffer that training changes."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("seen", torch.zeros(2))

    def get_extra_state(self) -> int:
        return int(self.seen.sum())

    def set_extra_state(self, state: int) -> None:
        assert state == int(self.seen.sum())


@ANY_TORCH
def test_stages_of_a_pipeline_become_one_checkpoint(tmp_path: Path) -> None:
    counted = Counted()
    whole = nn.Sequential(OrderedDict(first=nn.Linear(3, 3), second=counted))
    stages = [nn.Sequential(OrderedDict({name: module})) for name, module in whole.named_children()]
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.5, momentum=0.9) for stage in stages]
    states = [
        TrackedState({"model": stage, "optimizer": optimizer})
        for stage, optimizer in zip(stages, optimizers, strict=True)
    ]
    whole(torch.ones(1, 3)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    for parameter in stages[1].parameters():
        optimizers[1].state[parameter]["count"] = 4
    counted.seen += 1
    order = fill_slots(tmp_path / "slots", states, VERSION)
    assert execute(msgspec.structs.replace(order, url=str(tmp_path / "out"))).complete
    joint = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    for optimizer in optimizers:
        joint.state.update(optimizer.state)
    model, optim = get_state_dict(whole, joint)
    wanted: dict[str, Any] = {"model": model, "optimizer": optim}
    zeroed = {k: torch.zeros_like(v) if isinstance(v, torch.Tensor) else -1 for k, v in model.items()}
    optimizer_state: dict[str, Any] = dict(get_state_dict(whole, joint)[1])
    optimizer_state["param_groups"][0]["lr"] = 0
    read: dict[str, dict[str, Any]] = {"model": zeroed, "optimizer": optimizer_state}
    load(read, checkpoint_id=tmp_path / "out" / folder_name(VERSION), no_dist=True)
    assert equal(read["model"], wanted["model"])
    assert equal(read["optimizer"]["state"], wanted["optimizer"]["state"])
    assert read["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert set(read["optimizer"]["param_groups"][0]["params"]) == {name for name, _ in whole.named_parameters()}
