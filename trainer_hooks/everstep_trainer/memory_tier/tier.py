"""Where a rank's checkpoints of DCP lie in its vault, beside its snapshots and apart from them.

They have slots in a segment of their own, under numbers of ranks and local ranks that no snapshot has: restoring a job
does not see them, and they are copied to other nodes as snapshots are.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import NoReturn

from torch._C._distributed_c10d import Store

from everstep.errors import ConfigurationError, NotRestorable
from everstep.ids import Version
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore.local_slots import LocalSlots
from everstep_trainer.restore.version_choice import FIRST_CHECKPOINT_RANK

FIRST_CHECKPOINT_LOCAL_RANK = 32
"""Half of the local ranks for which a vault keeps segments."""
TIER_SLOTS = 3
"""The one being written, the newest that is known to be whole, and the newest besides."""
WHOLE_KEY = "dcp/whole"
"""Where the generation's store has it."""
_FILL_LOCK = threading.Lock()
"""Held by whoever fills a slot: a thread that a generation left behind may be at it while the next one begins."""


class MemoryTier:
    """One rank's place in the memory tier, in one generation.

    Args:
        store: the generation's, on which ranks agree which checkpoint they load.

    Raises ConfigurationError on a node of more ranks than a vault has segments for.
    """

    def __init__(self, vault: VaultClient, spec: GenerationSpec, member: Member, store: Store) -> None:
        if member.local_rank >= FIRST_CHECKPOINT_LOCAL_RANK:
            raise ConfigurationError(
                f"checkpoints of DCP are kept for {FIRST_CHECKPOINT_LOCAL_RANK} ranks of a node at most"
            )
        self.vault = vault
        self.spec = spec
        self.member = member
        self.store = store
        self.local_slots = LocalSlots()
        self.load_count = 0
        self.is_over = False
        """The generation was left: what a thread of it still wants to write is refused."""
        self.fill_lock = _FILL_LOCK
        self._loaded: Version | None = None

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a VaultWriter writes in the process of its rank: torch.distributed.checkpoint.async_save takes "
            "async_checkpointer_type=AsyncCheckpointerType.THREAD with it (docs/decisions/0048)"
        )

    @property
    def rank(self) -> int:
        """Of this rank's slots."""
        return FIRST_CHECKPOINT_RANK + self.member.rank

    @property
    def local_rank(self) -> int:
        """Of this rank's segment."""
        return FIRST_CHECKPOINT_LOCAL_RANK + self.member.local_rank

    def checkpoints(self) -> dict[Version, list[SlotInfo]]:
        """The slots of all checkpoints that this job's vaults hold, nearest first."""
        self.local_slots = LocalSlots()  # under a path that was mapped there may be a larger segment by now
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

    def mark_whole(self, version: Version) -> None:
        """All ranks wrote this one; rank 0 says so."""
        self.store.set(WHOLE_KEY, _text(version))

    def mark_loaded(self, version: Version) -> None:
        """It was whole, and nothing newer is known to be."""
        self._loaded = version

    def newest_whole(self) -> Version | None:
        """The newest checkpoint that is known to be whole: what must not be written over."""
        return _version(self.store.get(WHOLE_KEY).decode()) if self.store.check([WHOLE_KEY]) else self._loaded

    def agree(self, chosen: Version | None) -> Version:
        """What rank 0 chose, on all ranks. Raises NotRestorable where it chose nothing."""
        key = f"dcp/load/{self.load_count}"
        self.load_count += 1
        if self.member.rank == 0:
            self.store.set(key, "" if chosen is None else _text(chosen))
        told = self.store.get(key).decode()
        if not told:
            raise NotRestorable("the job's vaults hold no whole checkpoint of the kind that is asked for")
        return _version(told)


def _text(version: Version) -> str:
    return f"{version.generation}:{version.step}"


def _version(text: str) -> Version:
    generation, _, step = text.partition(":")
    return Version(int(generation), int(step))
