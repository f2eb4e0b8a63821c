"""Agree on a version among the ranks of a generation, through its store: inventories, a choice, outcomes, a decision.

The first rank of each node publishes what its vault holds, and rank 0 chooses a version. Every rank reads what it needs
and reports the outcome. If any lacks something, rank 0 chooses again without the slots that proved bad.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from everstep.clock import Clock
from everstep.errors import EverstepError, MalformedMessage, NotRestorable, Unavailable
from everstep.ids import Version
from everstep.layout.manifests import Manifest, decode_manifest
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import GenerationSpec, Member
from everstep.wire.v1.vault_reports import Protection
from everstep_trainer.base.interrupt import WAIT_SLICE_S
from everstep_trainer.slots.fetch import SlotLoader
from everstep_trainer.slots.layout_exchange import decode_value, poll_values, put_value, wait_for_values
from everstep_trainer.slots.local_slots import BadSlot, LocalSlots
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.slots.version_choice import (
    VersionChoice,
    choose_version,
    is_admitted,
    is_usable,
    only_snapshots,
)
from everstep_trainer.state.layout import content_digest
from everstep_trainer.state.tensors import ADD_BEFORE_TRACK

log = logging.getLogger(__name__)

RANK_TIMEOUT_S = 60.0
FORMER_NODE_TIMEOUT_S = 0.5
"""For vaults outside the roster, which may be gone; they are asked only if the roster lacks the newest version."""
LAST_CHANCE_TIMEOUT_S = 10.0
"""For the same vaults if no version is complete without them: the job would end, so even a busy one is waited for."""


class SlotKey(msgspec.Struct, frozen=True):
    """Identity of a slot among all slots of the job."""

    node: str
    rank: int
    version: Version
    replica: bool
    parity: bool = False


def slot_key(slot: SlotInfo) -> SlotKey:
    return SlotKey(slot.node, slot.rank, slot.version, slot.replica, slot.parity_group is not None)


class NodeInventory(msgspec.Struct, frozen=True):
    """The slots of one node's vault."""

    slots: tuple[SlotInfo, ...]


class VersionProposal(msgspec.Struct, frozen=True):
    """Rank 0's choice, or why there is none; ``newest`` is the newest version committed or found in part."""

    choice: VersionChoice | None
    newest: Version | None
    error: str = ""

    @property
    def version(self) -> Version | None:
        """The chosen version; None to start from scratch, or without a choice."""
        return None if self.choice is None else self.choice.version


class RestoreOutcome(msgspec.Struct, frozen=True):
    """One or all ranks' outcome of reading. ``live_tensors``: one bit per tensor of the catalog, lowest first; empty if
    all are live. ``error``: one that no other choice would avoid."""

    succeeded: bool
    bad_slots: tuple[SlotKey, ...] = ()
    live_tensors: bytes = b""
    error: str = ""


@dataclass(eq=False)
class RestoreAgreement:
    """One rank's part in the agreement. All ranks run the same code; rank 0 also coordinates. The survey needs no
    model, so it runs in a thread beside the training function. ``on_bad_slot`` receives unreadable slots."""

    _store: Store
    _spec: GenerationSpec
    _member: Member
    _clock: Clock
    _vault: VaultClient
    _local: LocalSlots
    _on_bad_slot: Callable[[BadSlot], None]

    def __post_init__(self) -> None:
        self._log_fields = {"node": self._member.node, "job": self._spec.job, "generation": self._spec.number}
        self._rule = self._spec.restore
        self.is_coordinator = self._member.rank == 0
        self._known: tuple[SlotInfo, ...] = ()
        self._bodies: dict[str, bytes] = {}
        self._manifests: dict[str, Manifest] = {}
        self._stop = threading.Event()
        self._surveyed = threading.Event()
        self._survey_error: Exception | None = None
        self._begun = False

    def begin_survey(self) -> None:
        """Publish this node's inventory and propose a version, each if it is this rank's task. Returns at once."""
        if self._begun:
            return
        self._begun = True
        if self._member.local_rank == 0:  # rank 0 is its node's first rank, too
            threading.Thread(target=self._survey, name="everstep-survey", daemon=True).start()
        else:
            self._surveyed.set()

    def finish_survey(self) -> None:
        """Wait for the begun work. Raises DistStoreError if the store or a node of the roster does not answer."""
        while not self._surveyed.wait(WAIT_SLICE_S):
            pass
        if self._survey_error is not None:
            raise self._survey_error

    def close(self) -> None:
        """Stop the survey: no rank waits for the proposal any more."""
        self._stop.set()

    def _survey(self) -> None:
        try:
            self._known = self._publish_inventory()
            if self.is_coordinator:
                self._known += self._gather_inventories()
                self.propose(0, set())
        except (EverstepError, RuntimeError) as error:
            self._survey_error = error
        finally:
            self._surveyed.set()

    def _publish_inventory(self) -> tuple[SlotInfo, ...]:
        """Publish the slots of this node's vault that the rule admits, and their manifests; return them."""
        try:
            found = only_snapshots(self._vault.inventory(self._spec.job))
        except EverstepError as error:
            log.warning("this node's vault did not answer the inventory: %s", error, extra=self._log_fields)
            found = ()
        slots = tuple(slot for slot in found if is_usable(self._rule, slot.version))
        for slot in slots:
            if not self.knows_manifest(slot.manifest_digest):
                try:
                    self._publish_manifest(slot.manifest_digest, self._local.manifest(slot))
                except BadSlot as bad:
                    self._on_bad_slot(bad)
        put_value(self._store, f"restore/inventory/{self._member.node}", NodeInventory(slots))
        return slots

    def _gather_inventories(self) -> tuple[SlotInfo, ...]:
        """Return the slots that all other nodes of the roster published. Raises DistStoreError if one did not."""
        keys = [f"restore/inventory/{node}" for node in self._spec.seats if node != self._member.node]
        try:
            bodies = poll_values(self._store, keys, stop=self._stop, clock=self._clock, timeout_s=RANK_TIMEOUT_S)
        except Unavailable as error:
            raise DistStoreError(str(error)) from error
        return tuple(slot for body in bodies for slot in decode_value(body, NodeInventory).slots)

    def _publish_manifest(self, digest: str, body: bytes) -> None:
        self.add_local_manifest(digest, body)
        self._store.set(f"restore/manifest/{digest}", body)  # type: ignore[arg-type]  # takes bytes

    def add_local_manifest(self, digest: str, body: bytes) -> None:
        """Add a manifest read on this node, unless it does not match its digest."""
        if content_digest(body) == digest:
            self._bodies[digest] = body

    def knows_manifest(self, digest: str) -> bool:
        return digest in self._bodies

    def _is_manifest_available(self, digest: str) -> bool:
        """Return whether this rank has the manifest or another one published it."""
        return self.knows_manifest(digest) or self._store.check([f"restore/manifest/{digest}"])

    def manifest(self, digest: str) -> Manifest:
        """Return a known or published manifest. Raises MalformedMessage if no rank could read it, or it is damaged."""
        if digest not in self._manifests:
            if not self._is_manifest_available(digest):
                raise MalformedMessage(f"manifest {digest} could not be read by any node that holds it")
            if not self.knows_manifest(digest):
                self.add_local_manifest(digest, self._store.get(f"restore/manifest/{digest}"))
            if not self.knows_manifest(digest):
                raise MalformedMessage(f"manifest {digest} is not what was sealed")
            self._manifests[digest] = decode_manifest(self._bodies[digest])
        return self._manifests[digest]

    def propose(self, attempt: int, bad_slots: set[SlotKey]) -> None:
        """Publish the choice of this attempt, made without the slots that proved bad; for rank 0."""
        proposal = self._decide(bad_slots)
        is_newest = proposal.version == proposal.newest or (proposal.choice is not None and proposal.choice.repeats)
        if proposal.version is None or not is_newest:
            self._known += self._ask_former_nodes(FORMER_NODE_TIMEOUT_S)
            proposal = self._decide(bad_slots)
        if proposal.version is None and (protection := self._rule.protection) is not None:
            good = [slot for slot in self._known if slot_key(slot) not in bad_slots]
            ranks = {slot.rank for slot in good if slot.version == protection.version}
            self._known += tuple(self._parity_slots(protection, ranks))
            proposal = self._decide(bad_slots)
        if proposal.choice is None:
            self._known += self._ask_former_nodes(LAST_CHANCE_TIMEOUT_S)
            proposal = self._decide(bad_slots)
        if proposal.choice is not None and proposal.choice.unfinished:
            self._tell_unfinished(proposal.choice)
        put_value(self._store, f"restore/choice/{attempt}", proposal)

    def _tell_unfinished(self, choice: VersionChoice) -> None:
        if choice.repeats:
            log.info("%s, so that step is computed again", choice.unfinished, extra=self._log_fields)
            return
        message = "%s, and the run continues after it: what the script does there, such as a save, is not made again"
        log.warning(message, choice.unfinished, extra=self._log_fields)

    def _decide(self, bad_slots: set[SlotKey]) -> VersionProposal:
        slots = tuple(slot for slot in self._known if slot_key(slot) not in bad_slots)
        floor = [] if self._rule.floor is None or self._rule.from_scratch else [self._rule.floor]
        newest = max((*floor, *(s.version for s in slots if is_admitted(self._rule, s.version))), default=None)
        try:
            return VersionProposal(choose_version(self._rule, slots, self.manifest), newest)
        except NotRestorable as error:
            return VersionProposal(None, newest, str(error))

    def _ask_former_nodes(self, timeout_s: float) -> tuple[SlotInfo, ...]:
        """Return slots in vaults of nodes that left the roster but may still answer, and publish their manifests."""
        known = {slot.node for slot in self._known}.union(self._spec.seated_nodes)
        outside = tuple(holder.node for holder in self._spec.holders if holder.node not in known)
        if not outside:
            return ()
        try:
            slots = only_snapshots(self._vault.inventory(self._spec.job, outside, timeout_s=timeout_s))
        except EverstepError as error:
            log.info("no inventory from %s: %s", outside, error, extra=self._log_fields)
            return ()
        found = tuple(s for s in slots if s.node in outside and is_usable(self._rule, s.version))
        for digest, slot in {s.manifest_digest: s for s in found}.items():
            if not self._is_manifest_available(digest) and (body := self._remote_manifest(slot)) is not None:
                self._publish_manifest(digest, body)
        return found

    def _parity_slots(self, protection: Protection, there: Collection[int]) -> Iterator[SlotInfo]:
        """Yield shards of the protected version that no vault holds, as vaults can rebuild them from parity."""
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
                    parity_group=group,
                )
                if (body := self._remote_manifest(slot)) is not None:
                    slot = msgspec.structs.replace(slot, manifest_digest=content_digest(body))
                    self._publish_manifest(slot.manifest_digest, body)
                    yield slot

    def _remote_manifest(self, slot: SlotInfo) -> bytes | None:
        loader = SlotLoader(self._vault, self._spec.job, self._member, (), self._local)
        try:
            return loader.fetch_manifest(slot)
        except EverstepError as error:
            log.info("no manifest from %s: %s", slot.node, error, extra=self._log_fields)
            return None

    def receive_choice(self, attempt: int) -> VersionChoice:
        """Return the published choice, checked against the rule. Raises NotRestorable, saying what is missing."""
        (body,) = self._get([f"restore/choice/{attempt}"])
        made = decode_value(body, VersionProposal)
        if made.choice is None:
            raise NotRestorable(made.error)
        version = made.choice.version
        if version is not None and not is_usable(self._rule, version):
            raise NotRestorable(f"rank 0 chose {version}, which the generation's rule does not admit")
        return made.choice

    def exchange_outcomes(self, attempt: int, outcome: RestoreOutcome, names: Sequence[str] = ()) -> RestoreOutcome:
        """Publish this rank's outcome and return all ranks' combined one; rank 0 gives the version's tensor ``names``,
        each of which must be live on some rank. Raises NotRestorable, on all ranks, if no choice would help."""
        put_value(self._store, f"restore/outcome/{attempt}/{self._member.rank}", outcome)
        if self.is_coordinator:
            keys = [f"restore/outcome/{attempt}/{rank}" for rank in range(self._spec.world_size)]
            combined = combine_outcomes([decode_value(body, RestoreOutcome) for body in self._get(keys)], names)
            put_value(self._store, f"restore/combined/{attempt}", combined)
        else:
            (body,) = self._get([f"restore/combined/{attempt}"])
            combined = decode_value(body, RestoreOutcome)
        if combined.error:
            raise NotRestorable(combined.error)
        return combined

    def _get(self, keys: list[str]) -> list[bytes]:
        return wait_for_values(self._store, keys, self._clock, RANK_TIMEOUT_S)


def encode_live_tensors(indices: Iterable[int], count: int) -> bytes:
    """Encode which of ``count`` tensors are live, as RestoreOutcome.live_tensors."""
    distinct = set(indices)
    if len(distinct) == count:
        return b""
    bits = bytearray(-(-count // 8))
    for index in distinct:
        bits[index >> 3] |= 1 << (index & 7)
    return bytes(bits)


def combine_outcomes(outcomes: Sequence[RestoreOutcome], names: Sequence[str]) -> RestoreOutcome:
    """Combine all ranks' outcomes; see RestoreAgreement.exchange_outcomes."""
    bad = tuple(dict.fromkeys(key for outcome in outcomes for key in outcome.bad_slots))
    errors = [outcome.error for outcome in outcomes if outcome.error]
    ok = all(outcome.succeeded for outcome in outcomes)
    gone: list[str] = []
    if ok and all(outcome.live_tensors for outcome in outcomes):
        anywhere = 0
        for outcome in outcomes:
            anywhere |= int.from_bytes(outcome.live_tensors, "little")
        bits = anywhere.to_bytes(max(len(outcome.live_tensors) for outcome in outcomes), "little")
        gone = [name for index, name in enumerate(names) if not bits[index >> 3] >> (index & 7) & 1]
    if gone:
        errors.append(
            f"the tracked state is not what was stored: {len(gone)} tensors are gone from all ranks "
            f"({', '.join(sorted(gone)[:3])}); restore with the objects that were tracked. {ADD_BEFORE_TRACK}"
        )
    return RestoreOutcome(ok, bad, error=errors[0] if errors else "")
