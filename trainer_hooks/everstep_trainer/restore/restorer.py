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
from everstep.layout.manifests import Box, Manifest, Tensor
from everstep.layout.slots import SegmentView, segment_name
from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.local import SlotInfo
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore.agreement import Council, Outcome, SlotKey, Survey, lives_of, slot_key
from everstep_trainer.restore.fetch import Loader, Read, Supply, Want, plan_reads
from everstep_trainer.restore.local_slots import BadSlot, Check, LocalSlots, threads_for
from everstep_trainer.restore.remote_slots import BadTransfer
from everstep_trainer.restore.version_choice import Choice
from everstep_trainer.state.python_state import Merged, Name
from everstep_trainer.state.python_state import decode as decode_python
from everstep_trainer.state.tensors import TrackedTensor
from everstep_trainer.state.tracked_state import TrackedState

# ---- findings
# What a rank finds while it restores: bytes that are not what was written. They accuse no node by themselves.


def found_while_restoring(
    spec: GenerationSpec,
    clock: Clock,
    kind: FindingKind,
    subject: str,
    reason: str,
    *,
    instead: str,
    source: str,
    evidence: dict[str, str],
) -> FindingRaised:
    """A warning for the agent to pass on, under the generation's trace.

    Args:
        reason: what is wrong, in words; ``instead``: what is used in its place.
        source: by what it was seen.
    """
    finding = Finding(
        kind=kind,
        subject=subject,
        severity=Severity.WARNING,
        message=f"{reason}; found while restoring, {instead}",
        mode=Mode.OBSERVE,
        source=source,
        since=clock.wall(),
        trace=spec.trace,
        evidence=evidence,
    )
    return FindingRaised(finding=finding, job=spec.job)


# ---- before
# What a restore that is given up must leave no trace of: the tracked state as it was before.


class Before:
    """Tracked state as it is when this is made.

    Args:
        values: whether the tensors' values are to come back as well, of which copies are held in host memory.
    """

    def __init__(self, state: TrackedState, *, values: bool) -> None:
        self._state = state
        self._held = [(o, {parameter: dict(held) for parameter, held in o.state.items()}) for o in state.optimizers]
        live = state.tensors() if values else []
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
            self._state.settle()


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
        self._where = {"node": member.node, "job": spec.job, "generation": spec.number}

    def __call__(self, bad: BadSlot) -> None:
        log.warning("rank %d's slot on %s is not used: %s", bad.slot.rank, bad.slot.node, bad.reason, extra=self._where)
        slot = bad.slot
        if isinstance(bad, BadTransfer):
            evidence = {"rank": str(slot.rank), "version": str(slot.version), "received_by": self._member.node}
            self._tell(FindingKind.TRANSFER_CORRUPT, slot.node, bad.reason, evidence)
        elif bad.corrupt and slot.is_on(self._member.node):
            evidence = {"path": slot.path, "slot": str(slot.slot)}
            self._tell(
                FindingKind.SLOT_CORRUPT, f"{self._spec.job}/rank{slot.rank}/{slot.version}", bad.reason, evidence
            )

    def _tell(self, kind: FindingKind, subject: str, reason: str, evidence: dict[str, str]) -> None:
        if self._on_finding is not None:
            source, instead = "xxh3-128 of each 8 MiB chunk", "another copy is used"
            self._on_finding(
                found_while_restoring(
                    self._spec, self._clock, kind, subject, reason, instead=instead, source=source, evidence=evidence
                )
            )


# ---- nearness
# Which holder of the same bytes a rank reads from first.


def distance(spec: GenerationSpec, own: Member, slot: SlotInfo) -> tuple[int, int, int, int]:
    """A key to sort by, the nearest first.

    This node's slots come first, its own rank's before others. Then the roster's, those of its rack before others, each
    rank beginning with another, so that not all ask the same vault. Then those of nodes outside it, which may have been
    evicted for lying; last what has to be made from parity.
    """
    if slot.group is not None:
        return 3, 0, slot.rank, 0
    if slot.node == own.node:
        return 0, int(slot.rank != own.rank), slot.rank, 0
    if slot.node in spec.seated:
        far = int(not spec.is_near(own.node, slot.node))
        return 1, far, int(slot.replica), (slot.rank - own.rank) % spec.world_size
    return 2, slot.rank, int(slot.replica), 0


MOST_ASKED_IN_VAIN = 8
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
def _uncollected() -> Iterator[None]:
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
        self._council = Council(store, spec, member, clock)
        self._local = LocalSlots(self._own_segment, threads_for(spec.spec.nproc_per_node))
        self._report = SlotReporter(spec, member, on_finding, clock)
        self._survey = Survey(vault, spec, member, self._council, self._local, self._report)
        self._where = {"node": member.node, "job": spec.job, "generation": spec.number}
        self._phases = dict.fromkeys(("inventory", "choose", "read", "agree"), 0.0)
        self._since = perf_counter()
        self._refused: Exception | None = None

    def begin(self) -> None:
        """Begins with what needs no state, beside the caller. ``fill`` does it where nobody did."""
        if not self._spec.restore.scratch:
            self._survey.begin()

    def fill(self, state: TrackedState) -> RestoreResult:
        """Fills ``state``; once, together with all ranks.

        Raises NotRestorable where nothing admitted is whole, or the tracked objects are others than were stored;
        what a rank cannot store or fill raises TypeError, or what torch says, there, and NotRestorable on the others;
        DistStoreError where a rank stays away.
        """
        with _uncollected():
            return self._fill(state)

    def _fill(self, state: TrackedState) -> RestoreResult:
        self._since = perf_counter()
        if self._spec.restore.scratch:
            return self._done(None, {}, "the generation starts from scratch")
        self._survey.begin()
        self._survey.finish()
        self._ends("inventory")
        bad: set[SlotKey] = set()
        number = 0
        before: Before | None = None
        while True:
            choice = self._council.choice(number)
            self._ends("choose")
            if choice.version is None:
                return self._done(None, {}, choice.sentence)
            if before is None:  # once something was committed, a version or a checkpoint is read over what was built
                before = Before(state, values=self._spec.restore.floor is None)
            outcome, python, sources = self._try(state, choice)
            self._ends("read")
            try:
                verdict = self._council.settle(number, outcome, self._names(choice))
            except NotRestorable as refused:
                raise self._refused or refused from None
            self._ends("agree")
            if verdict.ok:
                assert python is not None
                state.load_python(python)
                state.settle()
                return self._done(choice.version, sources, choice.sentence)
            before.undo()
            bad |= set(verdict.bad)
            number += 1
            if self._council.chairs:
                self._survey.propose(number, bad)

    def close(self) -> None:
        """The generation is over: what was begun is left."""
        self._survey.close()

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

    # --- reading

    def _names(self, choice: Choice) -> tuple[str, ...]:
        """Of the version's tensors, for rank 0, which looks whether all of them are live somewhere."""
        if not self._council.chairs:
            return ()
        return tuple(tensor.name for tensor in self._catalog(choice.slots))

    def _catalog(self, slots: Sequence[SlotInfo]) -> tuple[Tensor, ...]:
        """The same in every slot of a version. Raises MalformedMessage where no manifest can be read."""
        for slot in slots[:-1]:
            try:
                return self._manifest(slot).catalog
            except MalformedMessage:
                continue
        return self._manifest(slots[-1]).catalog

    def _try(self, state: TrackedState, choice: Choice) -> tuple[Outcome, Merged | None, dict[str, int]]:
        """Reads the choice. Where this rank's objects are others than were stored, all ranks hear of it."""
        try:
            return self._read(state, choice)
        except DistError:
            raise  # of the store, by which the others would hear
        except (NotRestorable, MalformedMessage, RuntimeError, TypeError, ValueError) as error:
            self._refused = None if isinstance(error, NotRestorable | MalformedMessage) else error
            return Outcome(False, error=f"rank {self._member.rank}: {error}"), None, {}

    def _read(self, state: TrackedState, choice: Choice) -> tuple[Outcome, Merged | None, dict[str, int]]:
        """Reads what this rank needs; slots that fail are left out and the rest tried, as long as it suffices."""
        slots = sorted(choice.slots, key=lambda slot: distance(self._spec, self._member, slot))
        targets, wants = self._wants(state, slots)
        lives = lives_of((want.tensor for want in wants), len(self._catalog(slots)))
        loader = Loader(self._vault, self._spec.job, self._member, targets, self._local, self._check)
        bad: list[SlotKey] = []
        while True:
            try:
                reads, supplies = self._plan(wants, slots)
            except NotRestorable as error:
                log.warning("%s cannot be read: %s", choice.version, error, extra=self._where)
                return Outcome(False, tuple(bad)), None, {}
            source = self._blob_source(supplies)
            blob, failures = loader.load(reads, supplies, source)
            failures += self._check_unread(slots, supplies, reads, source)
            if not failures:
                try:
                    python = self._python(state, loader, slots, supplies[source].slot, blob)
                    return Outcome(True, tuple(bad), lives), python, loader.bytes_by_source
                except BadSlot as rotten:
                    failures.append(rotten)
            for failure in failures:
                self._report(failure)
                bad.append(slot_key(failure.slot))
            if any(self._check(failure.slot) is Check.ALL for failure in failures):
                return Outcome(False, tuple(bad)), None, {}  # others trust this rank's word on it
            slots = [slot for slot in slots if slot_key(slot) not in bad]

    def _check_unread(
        self, slots: list[SlotInfo], supplies: list[Supply], reads: list[Read], source: int
    ) -> list[BadSlot]:
        """Hashes those of this rank's own slots that it reads nothing of: others of the node may."""
        read = {slot_key(supplies[number].slot) for number in {source, *(read.supply for read in reads)}}
        failures = []
        for slot in slots:
            if self._check(slot) is Check.ALL and slot_key(slot) not in read:
                try:
                    self._local.sweep(slot)
                except BadSlot as rotten:
                    failures.append(rotten)
        return failures

    def _check(self, slot: SlotInfo) -> Check:
        """Ranks of a node read much the same slots there, so each hashes its own for all of them."""
        if not self._has_checker(slot):
            return Check.READ
        return Check.ALL if slot.rank == self._member.rank else Check.NONE

    def _own_segment(self, path: str) -> SegmentView | None:
        """The rank's own segment in the mapping that it is written through, whose pages are mapped already."""
        if Path(path).name != segment_name("own", self._member.local_rank):
            return None
        return self._vault.mapped(path).view

    def _has_checker(self, slot: SlotInfo) -> bool:
        """Whether the rank that wrote the slot is still on this node, and so hashes it."""
        return not slot.replica and slot.is_on(self._member.node) and self._spec.has(slot.node, slot.rank)

    def _wants(self, state: TrackedState, slots: list[SlotInfo]) -> tuple[list[TrackedTensor], list[Want]]:
        """The live tensors to fill, and which boxes they need. Raises NotRestorable for another model."""
        catalog = self._catalog(slots)
        targets, wants = [], []
        for index, target in state.targets(catalog):
            box = target.box
            if catalog[index].own:
                row = catalog[index].row_of(self._member.rank)
                box = Box((row, *box.offset), (1, *box.size))
            targets.append(target)
            wants.append(Want(index, box))
        return targets, wants

    def _plan(self, wants: list[Want], slots: list[SlotInfo]) -> tuple[list[Read], list[Supply]]:
        """Reads from as few slots as suffice: the manifests of others are not even looked at."""
        supplies: list[Supply] = []

        def manifests() -> Iterator[Manifest]:
            for supply in self._supplies(slots):
                supplies.append(supply)
                yield supply.manifest

        reads = plan_reads(wants, manifests())
        if not supplies:
            raise NotRestorable("no slot is left")
        return reads, supplies

    def _supplies(self, slots: list[SlotInfo]) -> Iterator[Supply]:
        """Those of the slots whose manifest can be read, one after another."""
        for slot in slots:
            try:
                supply = Supply(slot, self._manifest(slot))
            except MalformedMessage as error:
                log.info("a slot on %s is left out: %s", slot.node, error, extra=self._where)
                continue
            yield supply

    def _manifest(self, slot: SlotInfo) -> Manifest:
        """Read where it lies, if that is on this node, which spares the store. Raises MalformedMessage."""
        if slot.is_on(self._member.node) and not self._council.knows_manifest(slot.manifest_digest):
            try:
                self._council.learn(slot.manifest_digest, self._local.manifest(slot))
            except BadSlot:
                pass  # found out, and told, when its bytes are read
        return self._council.manifest(slot.manifest_digest)

    def _blob_source(self, supplies: list[Supply]) -> int:
        """The rank's own Python state if it is there, else that of the lowest rank: most of it is equal anyway."""
        return min(
            range(len(supplies)),
            key=lambda i: (supplies[i].slot.rank != self._member.rank, supplies[i].slot.rank, i),
        )

    def _python(
        self, state: TrackedState, loader: Loader, slots: list[SlotInfo], first: SlotInfo, blob: bytes
    ) -> Merged:
        """The Python state of as many ranks as know all that this one needs; mostly ``first`` alone does.

        Raises BadSlot; NotRestorable where no rank knows of something that is tracked now.
        """
        names, read, told = state.python_names(), {first.rank}, [decode_python(blob)]
        while lacking := names.difference(*(python.names for python in told)):
            rest = [slot for slot in slots if slot.rank not in read]
            knowing = [slot for slot in rest if self._lives_there(slot, lacking)]
            if not rest or (not knowing and len(read) > MOST_ASKED_IN_VAIN):
                break
            slot = (knowing or rest)[0]
            read.add(slot.rank)
            for supply in self._supplies([slot]):
                told.append(decode_python(loader.python_state(supply)))
        merged = Merged(told, names)
        state.require_python(merged)
        if first.rank != self._member.rank and merged.objects:
            log.info(
                "the state of %s comes from rank %d: what is not alike on all ranks, name in track(per_rank=...)",
                ", ".join(sorted(merged.objects)),
                first.rank,
                extra=self._where,
            )
        return merged

    def _lives_there(self, slot: SlotInfo, lacking: frozenset[Name]) -> bool:
        """Whether the slot's rank had one of these parameters or modules: what it stored it had."""
        fqns = {fqn for _, fqn in lacking if fqn}
        try:
            manifest = self._manifest(slot)
        except MalformedMessage:
            return False
        stored = {manifest.catalog[index].name for index in {s.tensor for s in manifest.stored}}
        return not fqns.isdisjoint(stored) or any(name.rpartition(".")[0] in fqns for name in stored)
