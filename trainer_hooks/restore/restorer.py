"""One rank's part in a restore, from beginning to end."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import msgspec
from torch._C._distributed_c10d import Store

from everstep.clock import Clock
from everstep.errors import EverstepError, MalformedMessage, NotRestorable
from everstep.ids import Version
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member
from trainer_hooks.restore.choose import Choice, admitted
from trainer_hooks.restore.council import Council, Outcome, SlotKey, slot_key
from trainer_hooks.restore.fetch import Loader, Supply
from trainer_hooks.restore.local import BadSlot, LocalSlots
from trainer_hooks.restore.reshard import Read, Want, plan_reads
from trainer_hooks.snapshot.layout import Box
from trainer_hooks.state import TrackedState, TrackedTensor
from trainer_hooks.vault_client import VaultClient

log = logging.getLogger(__name__)

OUTSIDER_TIMEOUT_S = 0.5
"""For vaults outside the roster, which may be gone: they are asked only where the roster's do not have the newest."""


class RestoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank starts from.

    ``version`` None and ``step`` 0: from scratch. ``phases_s``: seconds in inventory, choose, read and agree.
    ``bytes_by_source``: tensor bytes from this rank's own slot (own), other slots on its node (node), elsewhere
    (remote). ``sentence`` says why this version.
    """

    version: Version | None
    step: int
    phases_s: dict[str, float]
    bytes_by_source: dict[str, int]
    sentence: str


def restore(
    vault: VaultClient,
    state: TrackedState,
    spec: GenerationSpec,
    member: Member,
    store: Store,
    *,
    on_finding: Callable[[FindingRaised], None] | None = None,
    clock: Clock = SYSTEM_CLOCK,
) -> RestoreResult:
    """Fills ``state`` from the newest version that the generation's rule admits and that is whole.

    Every rank of the roster calls it; all get the same version or none returns. ``store`` is the generation's, already
    under its prefix. ``on_finding`` hears of slots whose bytes are not what was sealed. Raises NotRestorable where
    nothing admitted is whole, or the tracked objects are others than were stored; DistStoreError where a rank stays
    away.
    """
    return _Restorer(vault, state, spec, member, Council(store, spec, member, clock), on_finding, clock).run()


class _Restorer:
    def __init__(
        self,
        vault: VaultClient,
        state: TrackedState,
        spec: GenerationSpec,
        member: Member,
        council: Council,
        on_finding: Callable[[FindingRaised], None] | None,
        clock: Clock,
    ) -> None:
        self._vault = vault
        self._state = state
        self._spec = spec
        self._member = member
        self._council = council
        self._on_finding = on_finding
        self._clock = clock
        self._where = {"node": member.node, "job": spec.job, "generation": spec.number}
        self._known: tuple[SlotInfo, ...] = ()
        self._phases = dict.fromkeys(("inventory", "choose", "read", "agree"), 0.0)
        self._since = perf_counter()

    def run(self) -> RestoreResult:
        if self._spec.restore.scratch:
            return self._done(None, {}, "the generation starts from scratch")
        if self._council.speaks_for_node:
            self._tell_inventory()
        self._ends("inventory")
        bad: set[SlotKey] = set()
        number = 0
        while True:
            choice = self._choose(number, bad)
            self._ends("choose")
            if choice.version is None:
                return self._done(None, {}, choice.sentence)
            outcome, blob, sources = self._read(choice)
            self._ends("read")
            verdict = self._council.settle(number, outcome)
            self._ends("agree")
            if verdict.ok:
                self._state.load_blob(blob)
                self._state.settle()
                return self._done(choice.version, sources, choice.sentence)
            bad |= set(verdict.bad)
            number += 1

    def _done(self, version: Version | None, sources: dict[str, int], sentence: str) -> RestoreResult:
        self._ends("read")
        log.info("%s", sentence, extra=self._where)
        step = 0 if version is None else version.step
        return RestoreResult(
            version=version, step=step, phases_s=self._phases, bytes_by_source=sources, sentence=sentence
        )

    def _ends(self, phase: str) -> None:
        now = perf_counter()
        self._phases[phase] += now - self._since
        self._since = now

    # --- what is there

    def _tell_inventory(self) -> None:
        try:
            slots = self._vault.inventory(self._spec.job)
        except EverstepError as error:
            log.warning("this node's vault gives no inventory: %s", error, extra=self._where)
            slots = ()
        local, manifests = LocalSlots(), {}
        for slot in slots:
            if slot.manifest_digest not in manifests and admitted(self._spec.restore, slot.version):
                try:
                    manifests[slot.manifest_digest] = local.manifest(slot)
                except BadSlot as bad:
                    self._report(bad)
        self._council.tell(slots, manifests)

    def _choose(self, number: int, bad: set[SlotKey]) -> Choice:
        if self._council.chairs:
            if number == 0:
                self._known = self._council.gather()
            proposal = self._council.decide(self._usable(bad))
            if not proposal.takes_newest:
                self._known += self._ask_outsiders()
                proposal = self._council.decide(self._usable(bad))
            self._council.propose(number, proposal)
        return self._council.choice(number)

    def _usable(self, bad: set[SlotKey]) -> tuple[SlotInfo, ...]:
        return tuple(slot for slot in self._known if slot_key(slot) not in bad)

    def _ask_outsiders(self) -> tuple[SlotInfo, ...]:
        """Slots in vaults of nodes that left the roster but may still answer, with their manifests published."""
        roster = {m.node for m in self._spec.roster}
        asked = {s.node for s in self._known}
        outside = tuple(h.node for h in self._spec.holders if h.node not in roster | asked)
        if not outside:
            return ()
        try:
            slots = self._vault.inventory(self._spec.job, outside, timeout_s=OUTSIDER_TIMEOUT_S)
        except EverstepError as error:
            log.info("no inventory from %s: %s", outside, error, extra=self._where)
            return ()
        found = tuple(s for s in slots if s.node in outside and admitted(self._spec.restore, s.version))
        self._publish_remote_manifests(found)
        return found

    def _publish_remote_manifests(self, slots: tuple[SlotInfo, ...]) -> None:
        for slot in {s.manifest_digest: s for s in slots}.values():
            if self._council.has_manifest(slot.manifest_digest):
                continue
            loader = Loader(self._vault, self._spec.job, self._member, ())
            try:
                self._council.add_manifest(slot.manifest_digest, loader.fetch_manifest(slot))
            except EverstepError as error:
                log.info("no manifest from %s: %s", slot.node, error, extra=self._where)
            finally:
                loader.close()

    # --- reading

    def _read(self, choice: Choice) -> tuple[Outcome, bytes, dict[str, int]]:
        """Reads what this rank needs; slots that fail are left out and the rest tried, as long as it suffices."""
        slots = sorted(choice.slots, key=self._distance)
        targets, wants = self._wants(slots)
        loader = Loader(self._vault, self._spec.job, self._member, targets)
        bad: list[SlotKey] = []
        try:
            while True:
                try:
                    reads, supplies = self._plan(wants, slots)
                except NotRestorable as error:
                    log.warning("%s cannot be read: %s", choice.version, error, extra=self._where)
                    return Outcome(False, tuple(bad)), b"", {}
                blob, failures = loader.load(reads, supplies, self._blob_source(supplies))
                if not failures:
                    return Outcome(True, tuple(bad)), blob, loader.bytes_by_source
                for failure in failures:
                    self._report(failure)
                    bad.append(slot_key(failure.slot))
                slots = [slot for slot in slots if slot_key(slot) not in bad]
        finally:
            loader.close()

    def _distance(self, slot: SlotInfo) -> tuple[int, int, int]:
        """This node's slots first, its own rank's before others. Then the roster's, each rank beginning with another,
        so that not all ask the same vault. Last those of nodes outside it, which may have been evicted for lying."""
        roster = [m.node for m in self._spec.roster]
        if slot.node == self._member.node:
            return 0, int(slot.rank != self._member.rank), slot.rank
        if slot.node in roster:
            return 1 + int(slot.replica), (slot.rank - self._member.rank) % self._spec.world_size, slot.rank
        return 3, slot.rank, int(slot.replica)

    def _wants(self, slots: list[SlotInfo]) -> tuple[list[TrackedTensor], list[Want]]:
        """The live tensors to fill, and which boxes they need. Raises NotRestorable for another model."""
        catalog = self._council.manifest(slots[0].manifest_digest).catalog
        targets, wants = [], []
        for index, target in self._state.targets(catalog):
            box = target.box
            if catalog[index].own:  # in a larger world, ranks beyond the old ones begin as copies of them
                row = self._member.rank % catalog[index].shape[0]
                box = Box((row, *box.offset), (1, *box.size))
            targets.append(target)
            wants.append(Want(index, box))
        return targets, wants

    def _plan(self, wants: list[Want], slots: list[SlotInfo]) -> tuple[list[Read], list[Supply]]:
        """Reads from this node alone where that suffices, so that no other manifest is even looked at."""
        near = [slot for slot in slots if slot.node == self._member.node]
        if near:
            try:
                return self._plan_from(wants, near)
            except NotRestorable:
                pass  # others have the rest
        return self._plan_from(wants, slots)

    def _plan_from(self, wants: list[Want], slots: list[SlotInfo]) -> tuple[list[Read], list[Supply]]:
        supplies = []
        for slot in slots:
            try:
                supplies.append(Supply(slot, self._council.manifest(slot.manifest_digest)))
            except MalformedMessage as error:
                log.info("a slot on %s is left out: %s", slot.node, error, extra=self._where)
        return plan_reads(wants, [supply.manifest for supply in supplies]), supplies

    def _blob_source(self, supplies: list[Supply]) -> int:
        """The rank's own Python state if it is there, else that of the lowest rank: most of it is equal anyway."""
        return min(
            range(len(supplies)),
            key=lambda i: (supplies[i].slot.rank != self._member.rank, supplies[i].slot.rank, i),
        )

    def _report(self, bad: BadSlot) -> None:
        log.warning("rank %d's slot on %s is not used: %s", bad.slot.rank, bad.slot.node, bad.reason, extra=self._where)
        if not bad.corrupt or self._on_finding is None or bad.slot.node != self._member.node:
            return  # of a slot elsewhere its own vault tells
        finding = Finding(
            kind=FindingKind.SLOT_CORRUPT,
            subject=f"{self._spec.job}/rank{bad.slot.rank}/{bad.slot.version}",
            severity=Severity.WARNING,
            message=f"{bad.reason}; found while restoring, another copy is used",
            mode=Mode.OBSERVE,
            source="xxh3-128 of each 8 MiB chunk",
            since=self._clock.wall(),
            trace=self._spec.trace,
            evidence={"path": bad.slot.path, "slot": str(bad.slot.slot)},
        )
        self._on_finding(FindingRaised(finding=finding, job=self._spec.job))
