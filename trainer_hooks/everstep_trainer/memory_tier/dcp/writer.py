"""Serve ``torch.distributed.checkpoint.save`` from the vault: copied to shared memory, hashed, and replicated."""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from everstep.errors import EverstepError, StaleGeneration
from everstep.ids import Version
from everstep.layout import manifests
from everstep.layout.slot_header import SlotState
from everstep.layout.slots import slot_bytes_for, slot_to_fill
from everstep.wire.v1.local import Replicated, SlotSealed
from everstep_trainer.memory_tier.dcp.dcp_format import PLAIN_PREFIX, NonTensorData, parse_step
from everstep_trainer.memory_tier.tier import TIER_SLOTS, MemoryTier
from everstep_trainer.slots.copy import slot_view, write_blob
from everstep_trainer.slots.vault_client import MappedSegment
from everstep_trainer.state.layout import aligned
from everstep_trainer.state.python_value_codec import dtype_name

log = logging.getLogger(__name__)


class VaultWriter(StorageWriter):
    """Writes checkpoints into the memory tier, which keeps the last two and the newest that all ranks wrote.

    Use it with ``planner=VaultSavePlanner()``. DCP's own collectives make one checkpoint of all ranks. ``async_save``
    works too, with ``process_group=`` a separate group made in this generation.

    Example::

        dcp.save(state, storage_writer=VaultWriter(run.tier, step=step), planner=VaultSavePlanner())

    Args:
        tier: This rank's memory tier, ``run.tier``.
        step: Step of the checkpoint; it rises within a generation. None: the number at the end of DCP's
            ``checkpoint_id``, such as ``outputs/step-40``.
        allow_pickle: Whether another planner may store values that are no tensors, as pickles.
    """

    def __init__(self, tier: MemoryTier, step: int | None = None, *, allow_pickle: bool = False) -> None:
        self._tier, self._step = tier, step
        self._version = Version(tier.spec.number, step or 0)
        self._allow_pickle = allow_pickle

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reset for another checkpoint. Raises ValueError if neither argument nor id has a step."""
        step = self._step if self._step is not None else parse_step(checkpoint_id)
        self._version = Version(self._tier.spec.number, step)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError in a thread that would use the default process group of a later generation."""
        if threading.current_thread() is not threading.main_thread() and _is_over_default_group():
            raise ValueError(
                "a thread that saves checkpoints needs its own process group; after a regroup it would use the next "
                "generation's: async_save(..., process_group=dist.new_group(backend='gloo'))"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Fill and seal a slot; the future is done when it has its copies on other nodes, or cannot have them. Raises
        TypeError for pickled values that are not allowed, or OutOfSlotMemory."""
        others = [item for item in plan.items if item.type is WriteItemType.BYTE_IO]
        tensors = [item for item in plan.items if item.type is not WriteItemType.BYTE_IO]
        values = {item.index.fqn: self._value(item, planner) for item in others}
        aside = msgspec.msgpack.encode(NonTensorData(values, plan.planner_data or {}))
        manifest = self._manifest(tensors, len(aside))
        with self._tier.fill_lock:
            segment, slot = self._fill(tensors, planner, manifest, aside)
        results = [WriteResult(item.index, nbytes_of(item), None) for item in plan.items]
        return self._replicated(segment, slot, manifest.payload_bytes, results)

    def _fill(
        self, tensors: list[WriteItem], planner: SavePlanner, manifest: manifests.Manifest, aside: bytes
    ) -> tuple[MappedSegment, int]:
        self._require_generation()
        body = manifests.encode_manifest(manifest)
        needed = slot_bytes_for(len(body), manifest.payload_bytes)
        segment = self._tier.vault.open_segment(self._tier.spec.job, self._tier.local_rank, needed, slots=TIER_SLOTS)
        slot = self._slot(segment)
        payload = segment.view.begin(slot, self._tier.rank, self._version, body, manifest.payload_bytes)
        whole = torch.frombuffer(payload, dtype=torch.uint8)
        stored = iter(manifest.stored)
        with torch.no_grad():
            for item in tensors:
                if box_of(item).volume:
                    at = next(stored)
                    live: Any = planner.resolve_data(item)
                    slot_view(whole, at.offset, manifest.catalog[at.tensor].dtype, at.box.size).copy_(live)
        write_blob(payload, manifest, aside)
        self._require_generation()
        segment.view.seal(slot)
        return segment, slot

    def _require_generation(self) -> None:
        if self._tier.is_over:
            raise StaleGeneration(f"checkpoint {self._version} is abandoned: its generation is over")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Mark the checkpoint as complete: the slots of all its ranks are there, and no final write is needed."""
        self._tier.mark_complete(self._version)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def _value(self, item: WriteItem, planner: SavePlanner) -> bytes:
        data: Any = planner.resolve_data(item)
        value: bytes = data.getvalue()
        if not value.startswith(PLAIN_PREFIX) and not self._allow_pickle:
            raise TypeError(
                f"{item.index.fqn} would be stored as a pickle: save with planner=VaultSavePlanner(), or pass "
                "allow_pickle=True here and to the reader, which then runs the code in it"
            )
        return value

    def _manifest(self, items: list[WriteItem], aside_bytes: int) -> manifests.Manifest:
        catalog: dict[str, manifests.TensorInfo] = {}
        index_of: dict[str, int] = {}
        stored: list[manifests.StoredBox] = []
        at = 0
        for item in items:
            data = item.tensor_data
            assert data is not None, "an item that is no bytes is a tensor"
            dtype = data.properties.dtype
            tensor = manifests.TensorInfo(item.index.fqn, dtype_name(dtype), dtype.itemsize, tuple(data.size), False)
            catalog.setdefault(tensor.name, tensor)
            index = index_of.setdefault(tensor.name, len(index_of))
            box = box_of(item)
            if box.volume:
                stored.append(manifests.StoredBox(index, box, at))
                at = aligned(at + box.volume * dtype.itemsize)
        end = at + manifests.BLOB_LENGTH_BYTES + aside_bytes
        world = self._tier.spec.world_size
        found = tuple(catalog.values())
        return manifests.Manifest(
            manifests.LAYOUT_FORMAT, self._tier.member.rank, world, found, tuple(stored), at, aside_bytes, end, end
        )

    def _slot(self, segment: MappedSegment) -> int:
        """Return the oldest slot that is not needed, after discarding an earlier one of this version."""
        view = segment.view
        for slot, header in list(view.sealed_slots()):
            if header.version == self._version:
                view.discard(slot)
        headers = view.headers()
        sealed = sorted(h.version for h in headers if h is not None and h.state is SlotState.SEALED)
        whole = self._tier.newest_complete()
        others = [version for version in sealed if version != whole]
        return slot_to_fill(headers, {*others[-1:], whole} if whole in sealed else set(sealed[-2:]))

    def _replicated(
        self, segment: MappedSegment, slot: int, nbytes: int, results: list[WriteResult]
    ) -> Future[list[WriteResult]]:
        tier, done = self._tier, Future[list[WriteResult]]()
        to = tier.spec.replica_nodes.get(tier.member.node, ())
        if not to:
            done.set_result(results)
            return done
        sealed = tier.vault.report_sealed(
            SlotSealed(
                request=0,
                job=tier.spec.job,
                generation=tier.spec.number,
                rank=tier.rank,
                local_rank=tier.local_rank,
                slot=slot,
                version=self._version,
                replicate_ranges=((0, nbytes),),
                replica_nodes=to,
                keep=tuple(sorted({header.version for _, header in segment.view.sealed_slots()})),
            )
        )

        def finish(answer: Any) -> None:
            try:
                copied: Replicated = answer.result()
                if copied.failed:
                    log.warning("checkpoint %s has no copy on some nodes: %s", self._version, copied.failed)
            except EverstepError as error:
                log.warning("checkpoint %s has no copies on other nodes: %s", self._version, error)
            done.set_result(results)

        sealed.add_done_callback(finish)
        return done


def _is_over_default_group() -> bool:
    """Return whether DCP's save, further up the stack, got no process group; it does not tell storage writers."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        wrapper = frame.f_locals.get("distW")
        if wrapper is not None:
            return bool(wrapper.use_dist and wrapper.group is None)
    return False


def box_of(item: WriteItem) -> manifests.Box:
    assert item.tensor_data is not None, "an item that is no bytes is a tensor"
    chunk = item.tensor_data.chunk
    return manifests.Box(tuple(chunk.offsets), tuple(chunk.sizes))


def nbytes_of(item: WriteItem) -> int:
    if item.tensor_data is None:
        return 0
    return box_of(item).volume * item.tensor_data.properties.dtype.itemsize
