"""Run one rank's part in a restore from beginning to end."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from everstep.layout.segment_header import segment_name
from everstep.layout.slots import SegmentView
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member
from everstep_trainer.restore.agreement import RestoreAgreement, RestoreOutcome, SlotKey, encode_live_tensors, slot_key
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.restore_audit import RestoreAudit
from everstep_trainer.slots.fetch import (
    FilledPiece,
    NeededBox,
    PlannedRead,
    ReadSource,
    RestoreTarget,
    SlotLoader,
    plan_reads,
)
from everstep_trainer.slots.local_slots import BadSlot, HashScope, LocalSlots, SlotDiffersFromState, threads_for
from everstep_trainer.slots.remote_slots import BadTransfer
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.slots.version_choice import VersionChoice
from everstep_trainer.state.python_state import MergedState, PythonState, StateName
from everstep_trainer.state.python_state import decode as decode_python
from everstep_trainer.state.tensors import TrackedTensor
from everstep_trainer.state.tracked_state import TrackedState

# ---- findings: bytes that are not those written; they accuse no node by themselves


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
    """Return a warning for the agent: ``reason`` was found by the check ``source``, and ``fallback`` follows."""
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


# ---- backup: the tracked state before a restore, which an abandoned restore must leave unchanged


class StateBackup:
    """The tracked state at the time this is made; ``with_values``: with copies of the tensors in host memory."""

    def __init__(self, state: TrackedState, *, with_values: bool) -> None:
        self._state = state
        self._states = [(o, {parameter: dict(of) for parameter, of in o.state.items()}) for o in state.optimizers]
        live = [tensor for tensor in state.tensors() if not tensor.is_replaced] if with_values else []
        self._values = [(tensor.local, tensor.local.to("cpu", copy=True)) for tensor in live]

    def undo(self) -> None:
        """Restore the optimizers' state and the copied values; otherwise another version is read over the tensors."""
        for optimizer, state in self._states:
            optimizer.state.clear()
            optimizer.state.update(state)
        with torch.no_grad():
            for live, value in self._values:
                live.copy_(value)
        if self._values:
            self._state.record_buffers()


# ---- reports of unusable slots: a log line, and a finding if the bytes are not those sealed

log = logging.getLogger(__name__)


@dataclass(eq=False)
class SlotReporter:
    """Reports bad slots, from any thread. ``on_finding``: of this node's slots, and of bytes that arrived wrong."""

    _spec: GenerationSpec
    _member: Member
    _on_finding: Callable[[FindingRaised], None] | None
    _clock: Clock

    def __post_init__(self) -> None:
        self._log_fields = {"node": self._member.node, "job": self._spec.job, "generation": self._spec.number}

    def __call__(self, bad: BadSlot) -> None:
        slot = bad.slot
        log.warning("rank %d's slot on %s is not used: %s", slot.rank, slot.node, bad.reason, extra=self._log_fields)
        if isinstance(bad, BadTransfer):
            kind, subject = FindingKind.TRANSFER_CORRUPT, slot.node
            evidence = {"rank": str(slot.rank), "version": str(slot.version), "received_by": self._member.node}
        elif isinstance(bad, SlotDiffersFromState) or (bad.is_corrupt and slot.is_on(self._member.node)):
            kind, subject = FindingKind.SLOT_CORRUPT, f"{self._spec.job}/rank{slot.rank}/{slot.version}"
            evidence = {"path": slot.path, "slot": str(slot.slot)}
        else:
            return
        if self._on_finding is not None:
            finding = make_restore_finding(
                self._spec,
                self._clock,
                kind,
                subject,
                bad.reason,
                fallback="another copy is used",
                source=bad.check,
                evidence=evidence,
            )
            self._on_finding(finding)


# ---- distance: which holder of the same bytes a rank reads from first


def slot_distance(spec: GenerationSpec, member: Member, slot: SlotInfo) -> tuple[int, int, int, int]:
    """Return a sort key, nearest slot first: own, node, rack, roster, then nodes outside it, last those from parity.
    Ranks begin with different nodes of a group. Nodes outside the roster may have been evicted for wrong data."""
    if slot.parity_group is not None:
        return 3, 0, slot.rank, 0
    if slot.node == member.node:
        return 0, int(slot.rank != member.rank), slot.rank, 0
    if slot.node in spec.seated_nodes:
        far = int(not spec.is_same_rack(member.node, slot.node))
        return 1, far, int(slot.replica), (slot.rank - member.rank) % spec.world_size
    return 2, slot.rank, int(slot.replica), 0


MAX_COMPARED_GENERATORS = 64
"""Most ranks whose random generators are compared before one is taken for all."""
MAX_FALLBACK_STATE_READS = 8
"""Most ranks whose Python state is read in search of a name that no slot can be linked to."""


class RestoreResult(msgspec.Struct, frozen=True, kw_only=True):
    """The state that a rank starts from."""

    version: Version | None  # None: from scratch
    phases_s: dict[str, float]  # seconds in inventory, choose, read and agree
    bytes_by_source: dict[str, int]  # tensor bytes: this rank's slot (own), its node's (node), remote, and parity
    sentence: str  # why this version was chosen

    @property
    def step(self) -> int:
        """The version's step; 0 from scratch."""
        return 0 if self.version is None else self.version.step


_Reading = tuple[RestoreOutcome, MergedState | None, dict[str, int]]  # the last: bytes by source


@contextmanager
def _gc_paused() -> Iterator[None]:
    """Pause garbage collection: a plan is many small objects without cycles, and searching them doubles its cost."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class Restoration:
    """Fills a rank's state from the newest complete version that the generation's rule admits, as on all ranks."""

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
        self._vault, self._spec, self._member = vault, spec, member
        self._local = LocalSlots(self._own_segment, threads_for(spec.spec.nproc_per_node))
        self._report = SlotReporter(spec, member, on_finding, clock)
        self._agreement = RestoreAgreement(store, spec, member, clock, vault, self._local, self._report)
        self._log_fields = {"node": member.node, "job": spec.job, "generation": spec.number}
        self._phases = dict.fromkeys(("inventory", "choose", "read", "agree"), 0.0)
        self._since = perf_counter()
        self._state_error: Exception | None = None
        self._audit: RestoreAudit | None = None

    def start(self) -> None:
        """Begin the work that needs no state, in the background; otherwise ``fill`` does it."""
        if not self._spec.restore.from_scratch:
            self._agreement.begin_survey()

    def fill(self, state: TrackedState, on_mismatch: Callable[[Mismatch], None] | None = None) -> RestoreResult:
        """Fill ``state``; once, together with all ranks. ``on_mismatch``: compare the filled tensors with the digests
        that were kept with the version, and call it with tensors that this rank filled wrongly. Raises NotRestorable on
        all ranks, TypeError if this rank cannot store or fill an object, DistStoreError if a rank does not take part,
        or torch's own errors."""
        if on_mismatch is not None:
            self._audit = RestoreAudit(self._member.rank, on_mismatch)
        with _gc_paused():
            return self._fill(state)

    def _fill(self, state: TrackedState) -> RestoreResult:
        self._since = perf_counter()
        if self._spec.restore.from_scratch:
            return self._done(None, {}, "the generation starts from scratch")
        self._agreement.begin_survey()
        self._agreement.finish_survey()
        self._end_phase("inventory")
        bad: set[SlotKey] = set()
        number = 0
        before: StateBackup | None = None
        while True:
            choice = self._agreement.receive_choice(number)
            self._end_phase("choose")
            if choice.version is None:
                return self._done(None, {}, choice.sentence)
            if before is None:  # after a commit, another version or a checkpoint is always read over the tensors
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
                self._agreement.propose(number, bad)

    def close(self) -> None:
        """End with the generation: abandon work in progress."""
        self._agreement.close()

    def _done(self, version: Version | None, sources: dict[str, int], sentence: str) -> RestoreResult:
        self._end_phase("read")
        log.info("%s", sentence, extra=self._log_fields)
        return RestoreResult(version=version, phases_s=self._phases, bytes_by_source=sources, sentence=sentence)

    def _end_phase(self, phase: str) -> None:
        now = perf_counter()
        self._phases[phase] += now - self._since
        self._since = now

    def _names(self, choice: VersionChoice) -> tuple[str, ...]:
        """Return the names of the version's tensors on rank 0, which checks that all of them are live somewhere."""
        if not self._agreement.is_coordinator:
            return ()
        return tuple(tensor.name for tensor in self._catalog(choice.slots))

    def _catalog(self, slots: Sequence[SlotInfo]) -> tuple[TensorInfo, ...]:
        """Return the catalog, equal in every slot of a version. Raises MalformedMessage if no manifest can be read."""
        for slot in slots[:-1]:
            try:
                return self._manifest(slot).catalog
            except MalformedMessage:
                continue
        return self._manifest(slots[-1]).catalog

    def _try(self, state: TrackedState, choice: VersionChoice) -> _Reading:
        """Read the choice. If this rank's objects differ from the stored ones, the outcome reports it to all ranks."""
        try:
            return self._read(state, choice)
        except DistError:
            raise  # an error of the store, which the outcome would go through
        except (NotRestorable, MalformedMessage, RuntimeError, TypeError, ValueError) as error:
            self._state_error = None if isinstance(error, NotRestorable | MalformedMessage) else error
            return RestoreOutcome(False, error=f"rank {self._member.rank}: {error}"), None, {}

    def _read(self, state: TrackedState, choice: VersionChoice) -> _Reading:
        """Read what this rank needs; slots that fail are left out and the rest tried, as long as they suffice."""
        slots = sorted(choice.slots, key=lambda slot: slot_distance(self._spec, self._member, slot))
        targets, wants = self._needed_boxes(state, slots)
        lives = encode_live_tensors((want.tensor_index for want in wants), len(self._catalog(slots)))
        loader = self._loader(targets, self._hash_scope, reads_digests=self._audit is not None)
        bad: list[SlotKey] = []
        while True:
            try:
                reads, supplies = self._plan(wants, slots)
            except NotRestorable as error:
                log.warning("version %s cannot be read: %s", choice.version, error, extra=self._log_fields)
                # Without a slot to leave out, the same version would be proposed again, without end.
                return RestoreOutcome(False, tuple(bad), error="" if bad else f"{choice.version}: {error}"), None, {}
            source = self._blob_source(supplies)
            blob, failures = loader.load(reads, supplies, source)
            failures += self._check_unread(slots, supplies, reads, source)
            if self._audit is not None and not failures:
                failures += self._audit.check(loader, self._read_again)
                if self._audit.refuses_version:
                    for failure in failures:
                        self._report(failure)
                    return RestoreOutcome(False, tuple(map(slot_key, choice.slots))), None, {}
            if not failures:
                try:
                    python = self._python(state, loader, slots, supplies[source].slot, blob)
                    return RestoreOutcome(True, tuple(bad), lives), python, loader.bytes_by_source
                except BadSlot as bad_slot:
                    failures.append(bad_slot)
            for failure in failures:
                self._report(failure)
                bad.append(slot_key(failure.slot))
            if any(self._hash_scope(failure.slot) is HashScope.ALL for failure in failures):
                return RestoreOutcome(False, tuple(bad)), None, {}  # others rely on this rank's check of the slot
            slots = [slot for slot in slots if slot_key(slot) not in bad]

    def _loader(
        self,
        targets: Sequence[RestoreTarget | TrackedTensor],
        hash_scope: Callable[[SlotInfo], HashScope] = lambda _: HashScope.READ,
        *,
        reads_digests: bool = False,
    ) -> SlotLoader:
        vault, job = self._vault, self._spec.job
        return SlotLoader(vault, job, self._member, targets, self._local, hash_scope, reads_digests)

    def _read_again(self, pieces: Sequence[FilledPiece]) -> list[torch.Tensor]:
        """Return the stored bytes of pieces of one slot in fresh host memory. Raises BadSlot."""
        source = pieces[0].source
        fresh = [torch.empty(piece.live.shape, dtype=piece.live.dtype) for piece in pieces]
        targets, reads = [], []
        for number, (piece, tensor) in enumerate(zip(pieces, fresh, strict=True)):
            box = piece.read.box
            if source.tensor(piece.read).per_rank:
                box = Box(box.offset[1:], box.size[1:])
            targets.append(RestoreTarget(tensor, box))
            reads.append(PlannedRead(number, 0, piece.read.stored, piece.read.box))
        _, failures = self._loader(targets).load(reads, [source], 0)
        if failures:
            raise failures[0]
        return fresh

    def _check_unread(
        self, slots: list[SlotInfo], sources: list[ReadSource], reads: list[PlannedRead], source: int
    ) -> list[BadSlot]:
        """Hash those of this rank's own slots that it does not read, because others of the node may read them."""
        read = {slot_key(sources[number].slot) for number in {source, *(read.source_index for read in reads)}}
        failures = []
        for slot in slots:
            if self._hash_scope(slot) is HashScope.ALL and slot_key(slot) not in read:
                try:
                    self._local.copy_and_check(slot)
                except BadSlot as bad_slot:
                    failures.append(bad_slot)
        return failures

    def _hash_scope(self, slot: SlotInfo) -> HashScope:
        """Return what to hash: each rank that is still on its slot's node hashes its own slot for all ranks there."""
        is_own_node = slot.is_on(self._member.node) and self._spec.has_rank_on(slot.node, slot.rank)
        if slot.replica or not is_own_node:
            return HashScope.READ
        return HashScope.ALL if slot.rank == self._member.rank else HashScope.NONE

    def _own_segment(self, path: str) -> SegmentView | None:
        """Return the rank's own segment in its writable mapping, whose pages are mapped already."""
        if Path(path).name != segment_name("own", self._member.local_rank):
            return None
        return self._vault.map_segment(path).view

    def _needed_boxes(self, state: TrackedState, slots: list[SlotInfo]) -> tuple[list[TrackedTensor], list[NeededBox]]:
        """Return the live tensors to fill and the boxes they need. Raises NotRestorable for another model."""
        catalog = self._catalog(slots)
        targets, wants = [], []
        for index, target in state.restore_targets(catalog):
            box = target.box
            if catalog[index].per_rank and target.is_moment and catalog[index].shape[0] != self._spec.world_size:
                raise NotRestorable(
                    f"{target.name} differed between the {catalog[index].shape[0]} ranks that stored it, and there are "
                    f"{self._spec.world_size} now: keep the number of ranks (everstep-launch --nnodes N:N), or divide "
                    "the state by fully_shard or in DTensors"
                )
            if catalog[index].per_rank:
                row = catalog[index].source_rank(self._member.rank)
                box = Box((row, *box.offset), (1, *box.size))
            targets.append(target)
            wants.append(NeededBox(index, box))
        return targets, wants

    def _plan(self, needed: list[NeededBox], slots: list[SlotInfo]) -> tuple[list[PlannedRead], list[ReadSource]]:
        """Plan reads from as few slots as suffice, without looking at the manifests of others."""
        supplies: list[ReadSource] = []

        def manifests() -> Iterator[Manifest]:
            for supply in self._readable_sources(slots):
                supplies.append(supply)
                yield supply.manifest

        reads = plan_reads(needed, manifests())
        if not supplies:
            raise NotRestorable("no usable slot is left")
        return reads, supplies

    def _readable_sources(self, slots: list[SlotInfo]) -> Iterator[ReadSource]:
        """Yield the slots whose manifest can be read."""
        for slot in slots:
            try:
                supply = ReadSource(slot, self._manifest(slot))
            except MalformedMessage as error:
                log.info("a slot on %s is ignored: %s", slot.node, error, extra=self._log_fields)
                continue
            yield supply

    def _manifest(self, slot: SlotInfo) -> Manifest:
        """Return a manifest, read on this node if possible, which spares the store. Raises MalformedMessage."""
        if slot.is_on(self._member.node) and not self._agreement.knows_manifest(slot.manifest_digest):
            try:
                self._agreement.add_local_manifest(slot.manifest_digest, self._local.manifest(slot))
            except BadSlot:
                pass  # reported when the slot's bytes are read
        return self._agreement.manifest(slot.manifest_digest)

    def _blob_source(self, sources: list[ReadSource]) -> int:
        """Return the index of the rank's own Python state, else of the lowest rank's: most of it is equal anyway."""
        ranks = [supply.slot.rank for supply in sources]
        return min(range(len(ranks)), key=lambda i: (ranks[i] != self._member.rank, ranks[i]))

    def _python(
        self, state: TrackedState, loader: SlotLoader, slots: list[SlotInfo], first: SlotInfo, blob: bytes
    ) -> MergedState:
        """Return the Python state of as many ranks as cover all names that this one needs, mostly of ``first``."""
        names, read, states = state.python_names(), {first.rank}, [decode_python(blob)]
        while lacking := names.difference(*(python.names for python in states)):
            rest = [slot for slot in slots if slot.rank not in read]
            knowing = [slot for slot in rest if self._has_names(slot, lacking)]
            if not rest or (not knowing and len(read) > MAX_FALLBACK_STATE_READS):
                break
            slot = (knowing or rest)[0]
            read.add(slot.rank)
            for supply in self._readable_sources([slot]):
                states.append(decode_python(loader.read_python_state(supply)))
        merged = MergedState(states, names)
        self._adopt_generators(state, merged, states, loader, [slot for slot in slots if slot.rank not in read])
        state.require_python(merged)
        if first.rank != self._member.rank and merged.objects:
            log.info(
                "the state of %s comes from rank %d: name state that differs between ranks in track(per_rank=...)",
                ", ".join(sorted(merged.objects)),
                first.rank,
                extra=self._log_fields,
            )
        return merged

    def _adopt_generators(
        self,
        state: TrackedState,
        merged: MergedState,
        states: Sequence[PythonState],
        loader: SlotLoader,
        unread: Sequence[SlotInfo],
    ) -> None:
        """Let this rank take another's random generators if all ranks stored them alike."""
        foreign = {
            key: tracked
            for key, tracked in state.generators.items()
            if key in merged.objects and not tracked.is_own(merged.objects[key])
        }
        if not foreign:
            return
        others = {slot.rank: slot for slot in reversed(unread)}.values()  # the nearest slot of each rank
        known = [*states]
        for supply in self._readable_sources([*others][:MAX_COMPARED_GENERATORS]):
            known.append(decode_python(loader.read_python_state(supply)))
        for key, tracked in foreign.items():
            stored = [python.objects[key] for python in known if key in python.objects]
            merged.objects[key] = tracked.adopt([merged.objects[key], *stored])

    def _has_names(self, slot: SlotInfo, lacking: frozenset[StateName]) -> bool:
        """Return whether the slot's rank had one of these parameters or modules, judged by its stored tensors."""
        fqns = {fqn for _, fqn in lacking if fqn}
        try:
            manifest = self._manifest(slot)
        except MalformedMessage:
            return False
        stored = {manifest.catalog[index].name for index in {s.tensor for s in manifest.stored}}
        return not fqns.isdisjoint(stored) or any(name.rpartition(".")[0] in fqns for name in stored)
