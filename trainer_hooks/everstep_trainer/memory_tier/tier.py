"""Place a rank's DCP checkpoints in its vault, in a segment of their own, under rank and local rank numbers that no
snapshot uses. So restoring a job does not see them, and they are copied to other nodes as snapshots are."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import NoReturn

from torch._C._distributed_c10d import Store

from everstep.errors import ConfigurationError, NotRestorable
from everstep.ids import Version
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_trainer.slots.local_slots import LocalSlots
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.slots.version_choice import FIRST_CHECKPOINT_RANK

FIRST_CHECKPOINT_LOCAL_RANK = 32  # half of the local ranks for which a vault keeps segments
TIER_SLOTS = 3  # the checkpoint being written, the newest complete one, and the newest other one
COMPLETE_KEY = "dcp/whole"  # the key of the newest complete checkpoint in the generation's store
_FILL_LOCK = threading.Lock()
"""Held while a slot is filled: a thread left over from an ended generation may still fill one when the next begins."""


class MemoryTier:
    """One rank's place in the memory tier; ``store`` is the generation's. Raises ConfigurationError."""

    def __init__(self, vault: VaultClient, spec: GenerationSpec, member: Member, store: Store) -> None:
        if member.local_rank >= FIRST_CHECKPOINT_LOCAL_RANK:
            raise ConfigurationError(f"the memory tier supports at most {FIRST_CHECKPOINT_LOCAL_RANK} ranks per node")
        self.vault, self.spec = vault, spec
        self.member, self.store = member, store
        self.local_slots = LocalSlots()
        self.load_count = 0
        self.is_over = False  # the generation was left: its threads may not write any more
        self.fill_lock = _FILL_LOCK
        self._loaded: Version | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a VaultWriter writes in the process of its rank: torch.distributed.checkpoint.async_save takes "
            "async_checkpointer_type=AsyncCheckpointerType.THREAD with it (docs/decisions/0028)"
        )

    @property
    def rank(self) -> int:
        """Rank number of this rank's slots."""
        return FIRST_CHECKPOINT_RANK + self.member.rank

    @property
    def local_rank(self) -> int:
        """Local rank number of this rank's segment."""
        return FIRST_CHECKPOINT_LOCAL_RANK + self.member.local_rank

    def checkpoints(self) -> dict[Version, list[SlotInfo]]:
        """Return the slots of all checkpoints that this job's vaults hold, nearest first."""
        self.local_slots = LocalSlots()  # a mapped path may have a larger segment by now
        nodes = tuple(dict.fromkeys((*self.spec.seats, *(holder.node for holder in self.spec.holders))))
        slots = self.vault.inventory(self.spec.job, tuple(n for n in nodes if n != self.member.node))
        found: dict[Version, list[SlotInfo]] = defaultdict(list)
        for slot in sorted(slots, key=self._distance):
            if slot.rank >= FIRST_CHECKPOINT_RANK:
                found[slot.version].append(slot)
        return dict(found)

    def _distance(self, slot: SlotInfo) -> tuple[bool, bool, bool, int]:
        own = self.member
        far = slot.node != own.node and not self.spec.is_same_rack(own.node, slot.node)
        return slot.node != own.node, far, slot.replica, (slot.rank - self.rank) % FIRST_CHECKPOINT_RANK

    def mark_complete(self, version: Version) -> None:
        """Record that all ranks wrote this checkpoint; called on rank 0."""
        self.store.set(COMPLETE_KEY, str(version))

    def mark_loaded(self, version: Version) -> None:
        """Record that this checkpoint was complete, and that no newer one is known."""
        self._loaded = version

    def newest_complete(self) -> Version | None:
        """Return the newest checkpoint known to be complete, which must not be overwritten."""
        return _version(self.store.get(COMPLETE_KEY).decode()) if self.store.check([COMPLETE_KEY]) else self._loaded

    def agree(self, chosen: Version | None) -> Version:
        """Return rank 0's choice on all ranks. Raises NotRestorable if it chose nothing."""
        key = f"dcp/load/{self.load_count}"
        self.load_count += 1
        if self.member.rank == 0:
            self.store.set(key, "" if chosen is None else str(chosen))
        agreed = self.store.get(key).decode()
        if not agreed:
            raise NotRestorable("the job's vaults hold no such complete checkpoint")
        return _version(agreed)


def _version(text: str) -> Version:
    generation, _, step = text.partition(":")
    return Version(int(generation), int(step))
