"""Serve ``torch.distributed.checkpoint.load`` from the vaults: ranges from the nearest holder, hashed before use."""

from __future__ import annotations

import io
import logging
import os
from collections import defaultdict
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from everstep.errors import EverstepError, MalformedMessage, NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import Box, Manifest, decode_manifest
from everstep.wire.v1.local import SlotInfo
from everstep_trainer.memory_tier.dcp import dcp_format
from everstep_trainer.memory_tier.tier import MemoryTier
from everstep_trainer.slots.fetch import PlannedRead, ReadSource, RestoreTarget, SlotLoader
from everstep_trainer.slots.local_slots import BadSlot
from everstep_trainer.slots.version_choice import FIRST_CHECKPOINT_RANK

log = logging.getLogger(__name__)


class VaultReader(StorageReader):
    """Reads the newest complete checkpoint of the memory tier, or that of one step, into any layout.

    Use it with ``planner=VaultLoadPlanner()``. All ranks load together.

    Example::

        dcp.load(state, storage_reader=VaultReader(run.tier), planner=VaultLoadPlanner())

    Args:
        tier: This rank's memory tier, ``run.tier``.
        step: Step of the checkpoint. None: the number at the end of DCP's ``checkpoint_id`` or, without an id, the
            newest complete one.
        allow_pickle: Whether to read values that another planner stored as pickles. These come from other nodes'
            memory, and can run any code.
    """

    def __init__(self, tier: MemoryTier, step: int | None = None, *, allow_pickle: bool = False) -> None:
        self._tier = tier
        self._given_step = step
        self._step, self._allow_pickle = step, allow_pickle
        self._sources: list[list[ReadSource]] = []
        self._non_tensor: list[dcp_format.NonTensorData] = []
        self._metadata: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Reset for another checkpoint. Raises ValueError for an id without a number."""
        self._step = (
            self._given_step
            if self._given_step is not None or checkpoint_id is None
            else dcp_format.parse_step(checkpoint_id)
        )
        self._metadata = None

    def newest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint, or None. All ranks call it together."""
        try:
            return self._agreed()[0].step
        except NotRestorable:
            return None

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:
        """Return the metadata. Raises NotRestorable. (A parameter ``kwargs`` would let torch use each rank's.)"""
        if self._metadata is None:
            slots = self._agreed()[1]
            self._sources = self._manifests_of(slots)
            self._non_tensor = [self._read_non_tensor(rank, supplies) for rank, supplies in enumerate(self._sources)]
            self._metadata = dcp_format.build_metadata([slots[0].manifest for slots in self._sources], self._non_tensor)
        return self._metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the plan's items. Raises NotRestorable if all copies of a slot are damaged, TypeError for a pickle."""
        tensors: dict[int, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            place = self._location(item)
            if item.type is LoadItemType.BYTE_IO:
                self._load_value(item, self._non_tensor[place.source_index].values[item.storage_index.fqn], planner)
            else:
                tensors[place.source_index].append(item)
        for supply, items in tensors.items():
            self._from_first_good(supply, items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def _agreed(self) -> tuple[Version, list[SlotInfo]]:
        """Return the version that rank 0 found, and its slots. Raises NotRestorable on all ranks if it found none."""
        found = self._tier.checkpoints()
        chosen = self._newest_whole(found) if self._tier.member.rank == 0 else None
        version = self._tier.agree(chosen)
        self._tier.mark_loaded(version)
        return version, found.get(version, [])

    def _newest_whole(self, found: dict[Version, list[SlotInfo]]) -> Version | None:
        for version in sorted(found, reverse=True):
            if self._step in (None, version.step):
                try:
                    self._manifests_of(found[version])
                    return version
                except NotRestorable as error:
                    log.info("checkpoint %s is left out: %s", version, error)
        return None

    def _manifests_of(self, slots: list[SlotInfo]) -> list[list[ReadSource]]:
        """Return every rank's slots with their manifests, nearest first. Raises NotRestorable if a rank has none."""
        supplies: dict[int, list[ReadSource]] = defaultdict(list)
        world = 0
        for slot in slots:
            try:
                manifest = self._manifest(slot)
            except (EverstepError, BadSlot) as error:
                log.info("a slot on %s is left out: %s", slot.node, error)
                continue
            world = manifest.world_size
            supplies[slot.rank - FIRST_CHECKPOINT_RANK].append(ReadSource(slot, manifest))
        missing = [rank for rank in range(max(world, 1)) if rank not in supplies]
        if missing:
            raise NotRestorable(f"the slots of ranks {missing} of {world} are missing")
        return [supplies[rank] for rank in range(world)]

    def _manifest(self, slot: SlotInfo) -> Manifest:
        if slot.node == self._tier.member.node:
            return decode_manifest(self._tier.local_slots.manifest(slot))
        return decode_manifest(self._loader([]).fetch_manifest(slot))

    def _loader(self, targets: list[RestoreTarget]) -> SlotLoader:
        tier = self._tier
        return SlotLoader(tier.vault, tier.spec.job, tier.member, targets, tier.local_slots)

    def _read_non_tensor(self, rank: int, supplies: list[ReadSource]) -> dcp_format.NonTensorData:
        for supply in supplies:
            try:
                return dcp_format.decode_non_tensor(self._loader([]).read_python_state(supply))
            except (BadSlot, MalformedMessage) as error:
                log.warning("rank %d's slot on %s is not used: %s", rank, supply.slot.node, error)
        raise NotRestorable(f"every copy of rank {rank}'s slot is damaged")

    def _location(self, item: ReadItem) -> dcp_format.ItemLocation:
        place: dcp_format.ItemLocation = self.read_metadata().storage_data[item.storage_index]
        return place

    def _from_first_good(self, rank: int, items: list[ReadItem], planner: LoadPlanner) -> None:
        live = [planner.resolve_tensor(item) for item in items]
        reads = [self._read(index, item) for index, item in enumerate(items)]
        loader = self._loader([RestoreTarget(t.detach(), read.box) for t, read in zip(live, reads, strict=True)])
        for supply in self._sources[rank]:
            _, failures = loader.load(reads, [supply], 0)
            if not failures:
                break
            log.warning("rank %d's slot on %s is not used: %s", rank, supply.slot.node, failures[0])
        else:
            raise NotRestorable(f"every copy of rank {rank}'s slot is damaged")
        for item, tensor in zip(items, live, strict=True):
            planner.commit_tensor(item, tensor)

    def _read(self, needed_index: int, item: ReadItem) -> PlannedRead:
        stored = self._location(item).stored
        assert stored is not None, "a tensor has a place in the payload"
        offset = tuple(a + b for a, b in zip(stored.box.offset, item.storage_offsets, strict=True))
        return PlannedRead(needed_index, 0, stored, Box(offset, tuple(item.lengths)))

    def _load_value(self, item: ReadItem, data: bytes, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        plain = data.startswith(dcp_format.PLAIN_PREFIX)
        if not plain and not self._allow_pickle:
            raise TypeError(f"{name} was stored as a pickle, which can run any code: allow it with allow_pickle=True")
        if plain and not isinstance(planner, dcp_format.VaultLoadPlanner):
            raise TypeError(f"{name} was stored by VaultSavePlanner: load with planner=VaultLoadPlanner()")
        planner.load_bytes(item, io.BytesIO(data))
