"""One rank's part in a restore, from beginning to end."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import msgspec
import torch
from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from everstep.clock import Clock
from everstep.errors import MalformedMessage, NotRestorable
from everstep.ids import Version
from everstep.layout.manifests import Box, Manifest, TensorInfo
from everstep.layout.slots import SegmentView, segment_name
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore.agreement import (
    InventorySurvey,
    RestoreAgreement,
    RestoreOutcome,
    SlotKey,
    encode_live_tensors,
    slot_key,
)
from everstep_trainer.restore.fetch import NeededBox, PlannedRead, ReadSource, SlotLoader, plan_reads
from everstep_trainer.restore.local_slots import BadSlot, HashScope, LocalSlots, threads_for
from everstep_trainer.restore.remote_slots import BadTransfer
from everstep_trainer.restore.version_choice import VersionChoice
from everstep_trainer.state.python_state import MergedState, StateName
from everstep_trainer.state.python_state import decode as decode_python
from everstep_trainer.state.tensors import TrackedTensor
from everstep_trainer.state.tracked_state import TrackedState

# ---- findings
# What a rank finds while it restores: bytes that are not what was written. They accuse no node by themselves.


def make_restore_finding(
    spec: GenerationSpec,
    clock: Clock,
    kind: FindingKind,
    subject: str,
    reason: str,
    *,
    fallback: str,
    source: str,
    evidence: dict[str, str],
) -> FindingRaised:
    """A warning for the agent to pass on, under the generation's trace.

    Args:
        reason: what is wrong, in words; ``fallback``: what is used in its place.
        source: by what it was seen.
    """
    finding = Finding(
        kind=kind,
        subject=subject,
        severity=Severity.WARNING,
        message=f"{reason}; found while restoring, {fallback}",
        mode=Mode.OBSERVE,
        source=source,
        since=clock.wall(),
        trace=spec.trace,
        evidence=evidence,
    )
    return FindingRaised(finding=finding, job=spec.job)


# ---- before
# What a restore that is given up must leave no trace of: the tracked state as it was before.


class StateBackup:
    """Tracked state as it is when this is made.

    Args:
        with_values: whether the tensors' values are to come back as well, of which copies are held in host memory.
    """

    def __init__(self, state: TrackedState, *, with_values: bool) -> None:
        self._state = state
        self._held = [(o, {parameter: dict(held) for parameter, held in o.state.items()}) for o in state.optimizers]
        live = state.tensors() if with_values else []
        self._values = [(tensor.local, tensor.local.to("cpu", copy=True)) for tensor in live]

    def undo(self) -> None:
        """Optimizers have the state that they had, and tensors their values, where those were to come back. Else the
        tensors hold what was tried last, for another version to be read over it."""
        for optimizer, held in self._held:
            optimizer.state.clear()
            optimizer.state.update(held)
        with torch.no_grad():
            for live, value in self._values:
                live.copy_(value)
        if self._values:
            self._state.record_buffers()


# ---- report
# What is said of a slot that cannot be used: a line in the log, and a finding where its bytes are not those sealed.

log = logging.getLogger(__name__)


class SlotReporter:
    """Tells of bad slots; callable from any thread.

    Args:
        on_finding: takes findings about slots on this rank's node, and about what came otherwise than it was sent; of
            a slot elsewhere its own vault tells.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        member: Member,
        on_finding: Callable[[FindingRaised], None] | None,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._member = member
        self._on_finding = on_finding
        self._clock = clock
        self._log_fields = {"node": member.node, "job": spec.job, "generation": spec.number}

    def __call__(self, bad: BadSlot) -> None:
        log.warning(
            "rank %d's slot on %s is not used: %s", bad.slot.rank, bad.slot.node, bad.reason, extra=self._log_fields
        )
        slot = bad.slot
        if isinstance(bad, BadTransfer):
            evidence = {"rank": str(slot.rank), "version": str(slot.version), "received_by": self._member.node}
            self._report_finding(FindingKind.TRANSFER_CORRUPT, slot.node, bad.reason, evidence)
        elif bad.is_corrupt and slot.is_on(self._member.node):
            evidence = {"path": slot.path, "slot": str(slot.slot)}
            self._report_finding(
                FindingKind.SLOT_CORRUPT, f"{self._spec.job}/rank{slot.rank}/{slot.version}", bad.reason, evidence
            )

    def _report_finding(self, kind: FindingKind, subject: str, reason: str, evidence: dict[str, str]) -> None:
        if self._on_finding is not None:
            source, instead = "xxh3-128 of each 8 MiB chunk", "another copy is used"
            self._on_finding(
                make_restore_finding(
                    self._spec, self._clock, kind, subject, reason, fallback=instead, source=source, evidence=evidence
                )
            )


# ---- nearness
# Which holder of the same bytes a rank reads from first.


def slot_distance(spec: GenerationSpec, own: Member, slot: SlotInfo) -> tuple[int, int, int, int]:
    """A key to sort by, the nearest first.

    This node's slots come first, its own rank's before others. Then the roster's, those of its rack before others, each
    rank beginning with another, so that not all ask the same vault. Then those of nodes outside it, which may have been
    evicted for lying; last what has to be made from parity.
    """
    if slot.parity_group is not None:
        return 3, 0, slot.rank, 0
    if slot.node == own.node:
        return 0, int(slot.rank != own.rank), slot.rank, 0
    if slot.node in spec.seated_nodes:
        far = int(not spec.is_same_rack(own.node, slot.node))
        return 1, far, int(slot.replica), (slot.rank - own.rank) % spec.world_size
    return 2, slot.rank, int(slot.replica), 0


MAX_UNHELPFUL_RANKS = 8
"""Ranks whose Python state is read for something of which no slot says whose it was."""


class RestoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank starts from.

    ``version`` None and ``step`` 0: from scratch. ``phases_s``: seconds in inventory, choose, read and agree.
    ``bytes_by_source``: tensor bytes from this rank's own slot (own), other slots on its node (node), elsewhere
    (remote), made again from parity (parity). ``sentence`` says why this version.
    """

    version: Version | None
    step: int
    phases_s: dict[str, float]
    bytes_by_source: dict[str, int]
    sentence: str


@contextmanager
def _gc_paused() -> Iterator[None]:
    """A plan is many small objects and no cycles: to look for some among them takes as long as to make it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Restoration:
    """Fills a rank's state from the newest version that the generation's rule admits and that is whole.

    Every rank of the roster makes one; all get the same version or none does.

    Args:
        store: the generation's, already under its prefix.
        on_finding: hears of slots whose bytes are not what was sealed; from any thread.
    """

    def __init__(
        self,
        vault: VaultClient,
        spec: GenerationSpec,
        member: Member,
        store: Store,
        *,
        on_finding: Callable[[FindingRaised], None] | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._vault = vault
        self._spec = spec
        self._member = member
        self._agreement = RestoreAgreement(store, spec, member, clock)
        self._local = LocalSlots(self._own_segment, threads_for(spec.spec.nproc_per_node))
        self._report = SlotReporter(spec, member, on_finding, clock)
        self._survey = InventorySurvey(vault, spec, member, self._agreement, self._local, self._report)
        self._log_fields = {"node": member.node, "job": spec.job, "generation": spec.number}
        self._phases = dict.fromkeys(("inventory", "choose", "read", "agree"), 0.0)
        self._since = perf_counter()
        self._state_error: Exception | None = None

    def start(self) -> None:
        """Begins with what needs no state, beside the caller. ``fill`` does it where nobody did."""
        if not self._spec.restore.from_scratch:
            self._survey.begin()

    def fill(self, state: TrackedState) -> RestoreResult:
        """Fills ``state``; once, together with all ranks.

        Raises NotRestorable where nothing admitted is whole, or the tracked objects are others than were stored;
        what a rank cannot store or fill raises TypeError, or what torch says, there, and NotRestorable on the others;
        DistStoreError where a rank stays away.
        """
        with _gc_paused():
            return self._fill(state)

    def _fill(self, state: TrackedState) -> RestoreResult:
        self._since = perf_counter()
        if self._spec.restore.from_scratch:
            return self._done(None, {}, "the generation starts from scratch")
        self._survey.begin()
        self._survey.finish()
        self._end_phase("inventory")
        bad: set[SlotKey] = set()
        number = 0
        before: StateBackup | None = None
        while True:
            choice = self._agreement.receive_choice(number)
            self._end_phase("choose")
            if choice.version is None:
                return self._done(None, {}, choice.sentence)
            if before is None:  # once something was committed, a version or a checkpoint is read over what was built
                before = StateBackup(state, with_values=self._spec.restore.floor is None)
            outcome, python, sources = self._try(state, choice)
            self._end_phase("read")
            try:
                verdict = self._agreement.exchange_outcomes(number, outcome, self._names(choice))
            except NotRestorable as refused:
                raise self._state_error or refused from None
            self._end_phase("agree")
            if verdict.succeeded:
                assert python is not None
                state.load_python(python)
                state.record_buffers()
                return self._done(choice.version, sources, choice.sentence)
            before.undo()
            bad |= set(verdict.bad_slots)
            number += 1
            if self._agreement.is_coordinator:
                self._survey.propose(number, bad)

    def close(self) -> None:
        """The generation is over: what was begun is left."""
        self._survey.close()

    def _done(self, version: Version | None, sources: dict[str, int], sentence: str) -> RestoreResult:
        self._end_phase("read")
        log.info("%s", sentence, extra=self._log_fields)
        step = 0 if version is None else version.step
        return RestoreResult(
            version=version, step=step, phases_s=self._phases, bytes_by_source=sources, sentence=sentence
        )

    def _end_phase(self, phase: str) -> None:
        now = perf_counter()
        self._phases[phase] += now - self._since
        self._since = now

    # --- reading

    def _names(self, choice: VersionChoice) -> tuple[str, ...]:
        """Of the version's tensors, for rank 0, which looks whether all of them are live somewhere."""
        if not self._agreement.is_coordinator:
            return ()
        return tuple(tensor.name for tensor in self._catalog(choice.slots))

    def _catalog(self, slots: Sequence[SlotInfo]) -> tuple[TensorInfo, ...]:
        """The same in every slot of a version. Raises MalformedMessage where no manifest can be read."""
        for slot in slots[:-1]:
            try:
                return self._manifest(slot).catalog
            except MalformedMessage:
                continue
        return self._manifest(slots[-1]).catalog

    def _try(
        self, state: TrackedState, choice: VersionChoice
    ) -> tuple[RestoreOutcome, MergedState | None, dict[str, int]]:
        """Reads the choice. Where this rank's objects are others than were stored, all ranks hear of it."""
        try:
            return self._read(state, choice)
        except DistError:
            raise  # of the store, by which the others would hear
        except (NotRestorable, MalformedMessage, RuntimeError, TypeError, ValueError) as error:
            self._state_error = None if isinstance(error, NotRestorable | MalformedMessage) else error
            return RestoreOutcome(False, error=f"rank {self._member.rank}: {error}"), None, {}

    def _read(
        self, state: TrackedState, choice: VersionChoice
    ) -> tuple[RestoreOutcome, MergedState | None, dict[str, int]]:
        """Reads what this rank needs; slots that fail are left out and the rest tried, as long as it suffices."""
        slots = sorted(choice.slots, key=lambda slot: slot_distance(self._spec, self._member, slot))
        targets, wants = self._wants(state, slots)
        lives = encode_live_tensors((want.tensor_index for want in wants), len(self._catalog(slots)))
        loader = SlotLoader(self._vault, self._spec.job, self._member, targets, self._local, self._hash_scope)
        bad: list[SlotKey] = []
        while True:
            try:
                reads, supplies = self._plan(wants, slots)
            except NotRestorable as error:
                log.warning("%s cannot be read: %s", choice.version, error, extra=self._log_fields)
                return RestoreOutcome(False, tuple(bad)), None, {}
            source = self._blob_source(supplies)
            blob, failures = loader.load(reads, supplies, source)
            failures += self._check_unread(slots, supplies, reads, source)
            if not failures:
                try:
                    python = self._python(state, loader, slots, supplies[source].slot, blob)
                    return RestoreOutcome(True, tuple(bad), lives), python, loader.bytes_by_source
                except BadSlot as rotten:
                    failures.append(rotten)
            for failure in failures:
                self._report(failure)
                bad.append(slot_key(failure.slot))
            if any(self._hash_scope(failure.slot) is HashScope.ALL for failure in failures):
                return RestoreOutcome(False, tuple(bad)), None, {}  # others trust this rank's word on it
            slots = [slot for slot in slots if slot_key(slot) not in bad]

    def _check_unread(
        self, slots: list[SlotInfo], supplies: list[ReadSource], reads: list[PlannedRead], source: int
    ) -> list[BadSlot]:
        """Hashes those of this rank's own slots that it reads nothing of: others of the node may."""
        read = {slot_key(supplies[number].slot) for number in {source, *(read.source_index for read in reads)}}
        failures = []
        for slot in slots:
            if self._hash_scope(slot) is HashScope.ALL and slot_key(slot) not in read:
                try:
                    self._local.copy_and_check(slot)
                except BadSlot as rotten:
                    failures.append(rotten)
        return failures

    def _hash_scope(self, slot: SlotInfo) -> HashScope:
        """Ranks of a node read much the same slots there, so each hashes its own for all of them."""
        if not self._has_checker(slot):
            return HashScope.READ
        return HashScope.ALL if slot.rank == self._member.rank else HashScope.NONE

    def _own_segment(self, path: str) -> SegmentView | None:
        """The rank's own segment in the mapping that it is written through, whose pages are mapped already."""
        if Path(path).name != segment_name("own", self._member.local_rank):
            return None
        return self._vault.map_segment(path).view

    def _has_checker(self, slot: SlotInfo) -> bool:
        """Whether the rank that wrote the slot is still on this node, and so hashes it."""
        return not slot.replica and slot.is_on(self._member.node) and self._spec.has_rank_on(slot.node, slot.rank)

    def _wants(self, state: TrackedState, slots: list[SlotInfo]) -> tuple[list[TrackedTensor], list[NeededBox]]:
        """The live tensors to fill, and which boxes they need. Raises NotRestorable for another model."""
        catalog = self._catalog(slots)
        targets, wants = [], []
        for index, target in state.restore_targets(catalog):
            box = target.box
            if catalog[index].per_rank:
                row = catalog[index].source_rank(self._member.rank)
                box = Box((row, *box.offset), (1, *box.size))
            targets.append(target)
            wants.append(NeededBox(index, box))
        return targets, wants

    def _plan(self, needed: list[NeededBox], slots: list[SlotInfo]) -> tuple[list[PlannedRead], list[ReadSource]]:
        """Reads from as few slots as suffice: the manifests of others are not even looked at."""
        supplies: list[ReadSource] = []

        def manifests() -> Iterator[Manifest]:
            for supply in self._supplies(slots):
                supplies.append(supply)
                yield supply.manifest

        reads = plan_reads(needed, manifests())
        if not supplies:
            raise NotRestorable("no slot is left")
        return reads, supplies

    def _supplies(self, slots: list[SlotInfo]) -> Iterator[ReadSource]:
        """Those of the slots whose manifest can be read, one after another."""
        for slot in slots:
            try:
                supply = ReadSource(slot, self._manifest(slot))
            except MalformedMessage as error:
                log.info("a slot on %s is left out: %s", slot.node, error, extra=self._log_fields)
                continue
            yield supply

    def _manifest(self, slot: SlotInfo) -> Manifest:
        """Read where it lies, if that is on this node, which spares the store. Raises MalformedMessage."""
        if slot.is_on(self._member.node) and not self._agreement.knows_manifest(slot.manifest_digest):
            try:
                self._agreement.add_local_manifest(slot.manifest_digest, self._local.manifest(slot))
            except BadSlot:
                pass  # found out, and told, when its bytes are read
        return self._agreement.manifest(slot.manifest_digest)

    def _blob_source(self, supplies: list[ReadSource]) -> int:
        """The rank's own Python state if it is there, else that of the lowest rank: most of it is equal anyway."""
        return min(
            range(len(supplies)),
            key=lambda i: (supplies[i].slot.rank != self._member.rank, supplies[i].slot.rank, i),
        )

    def _python(
        self, state: TrackedState, loader: SlotLoader, slots: list[SlotInfo], first: SlotInfo, blob: bytes
    ) -> MergedState:
        """The Python state of as many ranks as know all that this one needs; mostly ``first`` alone does.

        Raises BadSlot; NotRestorable where no rank knows of something that is tracked now.
        """
        names, read, told = state.python_names(), {first.rank}, [decode_python(blob)]
        while lacking := names.difference(*(python.names for python in told)):
            rest = [slot for slot in slots if slot.rank not in read]
            knowing = [slot for slot in rest if self._has_names(slot, lacking)]
            if not rest or (not knowing and len(read) > MAX_UNHELPFUL_RANKS):
                break
            slot = (knowing or rest)[0]
            read.add(slot.rank)
            for supply in self._supplies([slot]):
                told.append(decode_python(loader.read_python_state(supply)))
        merged = MergedState(told, names)
        state.require_python(merged)
        if first.rank != self._member.rank and merged.objects:
            log.info(
                "the state of %s comes from rank %d: what is not alike on all ranks, name in track(per_rank=...)",
                ", ".join(sorted(merged.objects)),
                first.rank,
                extra=self._log_fields,
            )
        return merged

    def _has_names(self, slot: SlotInfo, lacking: frozenset[StateName]) -> bool:
        """Whether the slot's rank had one of these parameters or modules: what it stored it had."""
        fqns = {fqn for _, fqn in lacking if fqn}
        try:
            manifest = self._manifest(slot)
        except MalformedMessage:
            return False
        stored = {manifest.catalog[index].name for index in {s.tensor for s in manifest.stored}}
        return not fqns.isdisjoint(stored) or any(name.rpartition(".")[0] in fqns for name in stored)
