"""Sealed slots of several ranks, made in one process, for tests that spill them to storage."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from torch import nn

from everstep.ids import Version
from everstep.layout.segment_header import segment_bytes
from everstep.layout.slots import format_segment, slot_bytes_for
from everstep_agent.spill.order import SlotSource, SpillOrder
from everstep_trainer.importers.checkpoint_files import find_checkpoints
from everstep_trainer.importers.importer import read_checkpoint
from everstep_trainer.slots.copy import SlotTargets, SnapshotSources, slot_view, write_blob
from everstep_trainer.slots.shares import build_manifest, divide_state
from everstep_trainer.slots.vault_client import MappedSegment
from everstep_trainer.state.layout import Sharing
from everstep_trainer.state.tensors import TrackedTensor
from everstep_trainer.state.tracked_state import TrackedState


class UnusualModel(nn.Module):
    """A model with tied and shared modules, running statistics, an empty and a scalar tensor, and extra state.

    ``odd_dtypes``: also with dtypes that gloo and FSDP2 do not support.
    """

    def __init__(self, *, odd_dtypes: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first = nn.Linear(5, 7)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.again = self.first
        self.norm = nn.BatchNorm1d(7)
        self.low = nn.Parameter(torch.randn(6, 3).to(torch.bfloat16 if odd_dtypes else torch.float32))
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("scalar", torch.tensor(3, dtype=torch.int32))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("quarter", torch.arange(4.0).half())
        if odd_dtypes:
            self.register_buffer("eight", torch.arange(9.0).reshape(3, 3).to(torch.float8_e4m3fn))
        self.seen = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.norm(self.first(x) + self.tied(x) + self.again(x))
        return mixed.sum() + self.low.float().square().sum()

    def get_extra_state(self) -> dict[str, object]:
        return {"seen": self.seen, "when": [1, 2]}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()


def load_checkpoint_alone(
    url: object, objects: Mapping[str, object], state: TrackedState, rank: int = 0, world: int = 1
) -> int:
    """Load the newest checkpoint at ``url`` as one rank without peers, and return its step."""
    return read_checkpoint(find_checkpoints(str(url))[0], objects, state, rank, world).finish()


def sharded(tensors: Sequence[TrackedTensor], rank: int, world: int) -> list[TrackedTensor]:
    """Return the rank's shards if each tensor with rows is split along them."""
    return [_cut(t, rank, world) if t.shape and t.sharing is Sharing.EQUAL else t for t in tensors]


def _cut(tensor: TrackedTensor, rank: int, world: int) -> TrackedTensor:
    box = tensor.box.chunk(0, rank, world)
    local = tensor.local.narrow(0, box.offset[0] - tensor.box.offset[0], box.size[0])
    return msgspec.structs.replace(tensor, box=box, local=local)


def fill_slots(
    folder: Path,
    state: TrackedState | Sequence[TrackedState],
    version: Version,
    *,
    world: int = 1,
    layout: str = "replicated",
    nodes: int = 0,
    digests: bool = False,
) -> SpillOrder:
    """Make a sealed slot for each rank in a file of its own, and return an order to spill them without a URL.

    ``state``: one state, replicated or sharded over the ranks, or one state for each rank (pipeline stages).
    """
    states = [state] * world if isinstance(state, TrackedState) else list(state)
    world, tensors = len(states), [state.tensors() for state in states]
    held = [sharded(mine, r, world) if layout == "sharded" else mine for r, mine in enumerate(tensors)]
    layouts = [states[r].layout(held[r], r, world) for r in range(world)]
    shares = divide_state(layouts, [f"n{r % (nodes or world)}" for r in range(world)], 2)
    sources, manifests = [], {}
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(world):
        blob = states[rank].capture().data()
        manifest = build_manifest(rank, layouts, shares[rank], 2 * len(blob), digests=digests)
        body = msgspec.msgpack.encode(manifest)
        slot_bytes = slot_bytes_for(len(body), manifest.payload_bytes)
        path = folder / f"own-{rank}"
        with path.open("x+b") as file:
            file.truncate(segment_bytes(1, slot_bytes))
            buffer = memoryview(mmap.mmap(file.fileno(), 0))
        format_segment(buffer, 1, slot_bytes)
        segment = MappedSegment(str(path))
        view = segment.view
        payload = view.begin(0, rank, version, body, manifest.payload_bytes)
        flat = torch.frombuffer(payload, dtype=torch.uint8)
        views = (
            slot_view(flat, s.offset, t.dtype, s.box.size[1:] if t.per_rank else s.box.size)
            for s in manifest.stored
            for t in (manifest.catalog[s.tensor],)
        )
        copies = SnapshotSources(held[rank], shares[rank])
        copies.stage()
        copies.copy(shares[rank], SlotTargets(views), digest=False)
        write_blob(payload, manifest, blob)
        start, length = manifest.digests_range
        payload[start : start + length] = bytes(1 + rank for _ in range(length))
        view.seal(0)
        sources.append(SlotSource(rank=rank, path=str(path), slot=0))
        manifests[rank] = body
    return SpillOrder(url="", version=version, sources=tuple(sources), manifests=manifests)
