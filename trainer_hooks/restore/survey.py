"""Before anything is restored: what the vaults hold is laid open, and rank 0 proposes a version.

That needs no model, so it goes on in a thread while the training function builds its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator

import msgspec

from everstep.errors import EverstepError
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.parity import Protection
from everstep.wire.v1.training import GenerationSpec, Member
from trainer_hooks.interrupt import SLICE_S
from trainer_hooks.restore.choose import admitted, of_snapshots
from trainer_hooks.restore.council import Council, Proposal, SlotKey, slot_key
from trainer_hooks.restore.fetch import Loader
from trainer_hooks.restore.local import BadSlot, LocalSlots
from trainer_hooks.snapshot.layout import content_digest
from trainer_hooks.vault_client import VaultClient

log = logging.getLogger(__name__)

OUTSIDER_TIMEOUT_S = 0.5
"""For vaults outside the roster, which may be gone: they are asked only where the roster's do not have the newest."""


class Survey:
    """What one rank tells of its node, and rank 0's proposals.

    Args:
        local: this node's slots.
        report: hears of slots that cannot be read.
    """

    def __init__(
        self,
        vault: VaultClient,
        spec: GenerationSpec,
        member: Member,
        council: Council,
        local: LocalSlots,
        report: Callable[[BadSlot], None],
    ) -> None:
        self._vault = vault
        self._spec = spec
        self._member = member
        self._council = council
        self._local = local
        self._report = report
        self._where = {"node": member.node, "job": spec.job, "generation": spec.number}
        self._known: tuple[SlotInfo, ...] = ()
        self._stop = threading.Event()
        self._over = threading.Event()
        self._error: Exception | None = None
        self._begun = False

    def begin(self) -> None:
        """Tells this node's inventory and proposes a version, each where that falls to this rank. Returns at once."""
        if self._begun:
            return
        self._begun = True
        if self._council.speaks_for_node:  # as the first of all ranks, rank 0 does too
            threading.Thread(target=self._run, name="everstep-survey", daemon=True).start()
        else:
            self._over.set()

    def finish(self) -> None:
        """Waits for what was begun. Raises DistStoreError where the store or a node of the roster is silent."""
        while not self._over.wait(SLICE_S):
            pass
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Nobody waits for the proposal any more."""
        self._stop.set()

    def _run(self) -> None:
        try:
            self._tell_inventory()
            if self._council.chairs:
                self._known = self._council.gather(self._stop)
                self.propose(0, set())
        except (EverstepError, RuntimeError) as error:
            self._error = error
        finally:
            self._over.set()

    def _tell_inventory(self) -> None:
        try:
            slots = of_snapshots(self._vault.inventory(self._spec.job))
        except EverstepError as error:
            log.warning("this node's vault gives no inventory: %s", error, extra=self._where)
            slots = ()
        manifests: dict[str, bytes] = {}
        for slot in slots:
            if slot.manifest_digest not in manifests and admitted(self._spec.restore, slot.version):
                try:
                    manifests[slot.manifest_digest] = self._local.manifest(slot)
                except BadSlot as bad:
                    self._report(bad)
        self._council.tell(slots, manifests)

    # --- rank 0

    def propose(self, number: int, bad: set[SlotKey]) -> None:
        """Publishes choice ``number``, made without the slots that proved bad."""
        proposal = self._decide(bad)
        if not proposal.takes_newest:
            self._known += self._ask_outsiders()
            proposal = self._decide(bad)
        if proposal.takes_nothing and (protection := self._council.rule.protection) is not None:
            good = [slot for slot in self._known if slot_key(slot) not in bad]
            self._known += tuple(self._made_from(protection, {s.rank for s in good if s.version == protection.version}))
            proposal = self._decide(bad)
        self._council.propose(number, proposal)

    def _decide(self, bad: set[SlotKey]) -> Proposal:
        return self._council.decide(tuple(slot for slot in self._known if slot_key(slot) not in bad))

    def _ask_outsiders(self) -> tuple[SlotInfo, ...]:
        """Slots in vaults of nodes that left the roster but may still answer, with their manifests published."""
        asked = {s.node for s in self._known}
        outside = tuple(h.node for h in self._spec.holders if h.node not in asked and h.node not in self._spec.seated)
        if not outside:
            return ()
        try:
            slots = of_snapshots(self._vault.inventory(self._spec.job, outside, timeout_s=OUTSIDER_TIMEOUT_S))
        except EverstepError as error:
            log.info("no inventory from %s: %s", outside, error, extra=self._where)
            return ()
        found = tuple(s for s in slots if s.node in outside and admitted(self._spec.restore, s.version))
        self._publish_remote_manifests(found)
        return found

    def _made_from(self, protection: Protection, there: Collection[int]) -> Iterator[SlotInfo]:
        """Shards of the protected version that nobody holds, as vaults make them again from parity."""
        for group in protection.shards():
            for rank, node in group.members:
                if rank in there:
                    continue
                slot = SlotInfo(
                    node=node,
                    rank=rank,
                    version=protection.version,
                    path="",
                    slot=0,
                    replica=False,
                    manifest_digest="",
                    group=group,
                )
                body = self._remote_manifest(slot)
                if body is not None:
                    slot = msgspec.structs.replace(slot, manifest_digest=content_digest(body))
                    self._council.learn(slot.manifest_digest, body)
                    self._council.add_manifest(slot.manifest_digest, body)
                    yield slot

    def _remote_manifest(self, slot: SlotInfo) -> bytes | None:
        loader = Loader(self._vault, self._spec.job, self._member, (), self._local)
        try:
            return loader.fetch_manifest(slot)
        except EverstepError as error:
            log.info("no manifest from %s: %s", slot.node, error, extra=self._where)
            return None

    def _publish_remote_manifests(self, slots: tuple[SlotInfo, ...]) -> None:
        for slot in {s.manifest_digest: s for s in slots}.values():
            if self._council.has_manifest(slot.manifest_digest):
                continue
            body = self._remote_manifest(slot)
            if body is not None:
                self._council.add_manifest(slot.manifest_digest, body)
