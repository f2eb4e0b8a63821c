"""Plan a rank's snapshots: agree on shares and slots with all ranks, open the segment, and replace outdated plans."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import xxhash

from everstep.clock import Clock
from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.manifests import Manifest, encode_manifest, full_box
from everstep.layout.segment_header import PAGE_BYTES
from everstep.layout.slots import SLOTS_PER_RANK, SegmentView, slot_bytes_for
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.local import CheckCapacity
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member
from everstep_trainer.base.interrupt import WAIT_SLICE_S
from everstep_trainer.slots.copy import SlotTargets, current_gpu, gpus_of, slot_view
from everstep_trainer.slots.layout_exchange import LayoutExchange, RoundSuperseded
from everstep_trainer.slots.shares import (
    RankShare,
    build_manifest,
    divide_state,
    payload_bytes,
    segment_needs,
    translate_share,
    unify_sharing,
)
from everstep_trainer.slots.vault_client import MappedSegment, VaultClient
from everstep_trainer.slots.version_choice import FIRST_CHECKPOINT_RANK
from everstep_trainer.snapshot import slot_negotiation
from everstep_trainer.snapshot.retention import VersionRetention
from everstep_trainer.state.layout import ALIGN, Layout
from everstep_trainer.state.tensors import TrackedTensor, describe_layout_change, list_names

log = logging.getLogger(__name__)

MIN_BLOB_BYTES = 16 << 10
"""Smallest room for Python state, at first twice its size. Longer state needs a new manifest, but no new plan."""


SMALL_BYTES = 2 << 20
SMALL_PIECE_COUNT = 2048
"""Largest share that is copied sooner than another thread, which needs Python's lock, begins to: 0.1 to 0.5 ms."""


@dataclass(eq=False)
class ActivePlan:
    """The parts of a snapshot that do not depend on the step. ``other_shares``: what it takes to store the shares of
    other ranks of this node that this rank holds as well. ``is_small``: the training thread may copy the share
    itself."""

    layout: Layout
    share: RankShare
    manifest: Manifest
    segment: MappedSegment
    since_step: int
    round_number: int  # of the exchange of layouts, equal on all ranks
    other_shares: OtherShares | None = None

    def __post_init__(self) -> None:
        self.manifest_bytes = encode_manifest(self.manifest)
        self._manifest_digest = xxhash.xxh3_128_digest(self.manifest_bytes)
        self.is_small = self.manifest.payload_bytes <= SMALL_BYTES and len(self.manifest.stored) <= SMALL_PIECE_COUNT
        self._targets: dict[int, SlotTargets] = {}

    def fits(self, blob_bytes: int) -> bool:
        """Return whether Python state of this size fits into the manifest's room."""
        return blob_bytes <= self.manifest.blob_capacity

    def slot_digests(self, chunks: Sequence[bytes] | None) -> list[bytes] | None:
        """Return all digests that a slot is sealed with, from those of its payload's chunks."""
        return None if chunks is None else [self._manifest_digest, *chunks]

    def slot_targets(self, slot: int) -> SlotTargets:
        """Return views into a slot that was begun with this plan's manifest, one for each piece of the share."""
        if slot not in self._targets:
            self._targets[slot] = make_slot_targets(self.segment.view, slot, self.manifest)
        return self._targets[slot]


def make_slot_targets(view: SegmentView, slot: int, manifest: Manifest) -> SlotTargets:
    """Return views into a slot of ``view`` that was begun with this manifest, one for each piece of its share."""
    payload = torch.frombuffer(view.payload(slot), dtype=torch.uint8)
    views = []
    for stored in manifest.stored:
        tensor = manifest.catalog[stored.tensor]
        size = stored.box.size[1:] if tensor.per_rank else stored.box.size
        views.append(slot_view(payload, stored.offset, tensor.dtype, size))
    start, length = manifest.digests_range
    digests = payload[start : start + length].view(torch.int64) if length else None
    return SlotTargets(views, payload, digests)


@dataclass(frozen=True, eq=False)
class OtherShares:
    """The shares of other ranks of this node that this rank can store from its own tensors.

    ``shares``: by rank, in parts of this rank's layout. ``manifest``: makes the manifest of such a rank's slot.
    """

    shares: Mapping[int, RankShare]
    manifest: Callable[[int], Manifest]

    @property
    def parts(self) -> frozenset[int]:
        """Indices, in this rank's layout, of all parts that some share takes bytes of."""
        return frozenset(piece.part for share in self.shares.values() for piece in share.pieces)


class _LayoutAgreement(NamedTuple):
    """The outcome of an exchange of layouts. ``mine``: this rank's layout with the sharing that all ranks agreed on."""

    layout: Layout
    mine: Layout
    layouts: list[Layout]
    share: RankShare
    since: int
    round_number: int
    node_shares: dict[int, RankShare]  # of the other ranks of this node


@dataclass(eq=False)
class SnapshotPlanner:
    """Makes plans in the copier thread: exchanges layouts, divides state, agrees on slots, opens the segment."""

    _vault: VaultClient
    _spec: GenerationSpec
    _member: Member
    exchange: LayoutExchange
    _timeout_s: float
    _options: slot_negotiation.SnapshotOptions = slot_negotiation.DEFAULT_OPTIONS
    _versions_to_carry: Callable[[], Sequence[Version]] = tuple

    def __post_init__(self) -> None:
        receive = partial(self.exchange.get, timeout_s=self._timeout_s)
        self._negotiation = slot_negotiation.SlotNegotiation(
            self._spec, self._member, self._options, self.exchange.put, receive
        )
        self._agreement: _LayoutAgreement | None = None
        self.agreed = slot_negotiation.AgreedProvision(slot_negotiation.acceptable_provisions(self._options)[0])

    def plan(self, layout: Layout, blob_bytes: int, since: int) -> ActivePlan:
        """Return a plan for ``layout`` with room for ``blob_bytes``; ``since`` as in LayoutExchange.layouts. Raises
        OutOfSlotMemory, ValueError for unequal tensors, Unavailable."""
        if self._agreement is None or self._agreement.layout is not layout:
            self._agree(layout, blob_bytes, since)
            self._report_lack()
        assert self._agreement is not None
        _, mine, layouts, share, since, number, node_shares = self._agreement
        manifest = self._manifest(self._member.rank, layouts, share, blob_bytes)
        held = {rank: translate_share(other, layouts[rank], mine) for rank, other in node_shares.items()}
        others = OtherShares(
            {rank: theirs for rank, theirs in held.items() if theirs is not None},
            lambda rank: self._manifest(rank, layouts, node_shares[rank], 0),
        )
        segment = self._open(manifest)
        return ActivePlan(layout, share, manifest, segment, since, number, others if others.shares else None)

    def is_superseded(self) -> bool:
        """Return whether other ranks make a new plan, so that this one must too; see LayoutExchange."""
        if not self.exchange.is_superseded():
            return False
        self._agreement = None
        return True

    def is_equivalent(self, planned: Layout, layout: Layout) -> bool:
        """Return whether ``layout`` is that of the plan for ``planned``, with the sharing that all ranks agreed on."""
        agreement = self._agreement
        return agreement is not None and agreement.layout is planned and agreement.mine == layout

    def _agree(self, layout: Layout, blob_bytes: int, since: int) -> None:
        rank = self._member.rank
        while True:
            try:
                received = self.exchange.layouts(layout, since, self._timeout_s)
                layouts = unify_sharing(received.layouts)
                nodes = [self._spec.node_of(rank) for rank in range(self._spec.world_size)]
                shares = divide_state(layouts, nodes, self._spec.spec.replicas, self._spec.replica_nodes)
                manifest = self._manifest(rank, layouts, shares[rank], blob_bytes)
                check_room = partial(self._check_room, layouts, shares, manifest)
                self.agreed = self._negotiation.agree(str(received.number), check_room)
            except RoundSuperseded:
                continue
            others = {m.rank: shares[m.rank] for m in self._spec.members_on(self._member.node) if m.rank != rank}
            self._agreement = _LayoutAgreement(
                layout, layouts[rank], layouts, shares[rank], received.since_step, received.number, others
            )
            return

    def _manifest(self, rank: int, layouts: Sequence[Layout], share: RankShare, blob_bytes: int) -> Manifest:
        return build_manifest(rank, layouts, share, _capacity(blob_bytes), digests=self._options.audits_copies)

    def _check_room(
        self,
        layouts: list[Layout],
        shares: list[RankShare],
        manifest: Manifest,
        provision: slot_negotiation.SlotProvision,
        tentative: bool,
    ) -> None:
        """Raise OutOfSlotMemory unless the node has room for all that its ranks and its vault will need."""
        encoded, whole = len(encode_manifest(manifest)), _whole_bytes(manifest)

        def slot_bytes(rank: int) -> int:
            # Python state and manifest of other ranks are taken to be as large as this rank's
            capacity, digests = manifest.blob_capacity, self._options.audits_copies
            payload = payload_bytes(layouts[rank], shares[rank], capacity, digests=digests)
            return self._slot_bytes(provision, encoded, payload, whole)

        needs = segment_needs(self._member.node, self._spec, shares, provision.slots, slot_bytes)
        # a reserve for a possible loss must not crowd out existing checkpoints
        below = 0 if provision.has_spare_room else FIRST_CHECKPOINT_RANK
        job, needed, keep = self._spec.job, tuple(needs), tuple(self._versions_to_carry())
        self._vault.check_room(
            CheckCapacity(request=0, job=job, needs=needed, has_fallback=tentative, reclaim_below_rank=below, keep=keep)
        )

    def _report_lack(self) -> None:
        """Report a lack of memory early, unless rank 0 is about to (``SnapshotPlans``).

        Raises OutOfSlotMemory if the job requires checkpoints.
        """
        node, reason = self.agreed.short_node, self.agreed.reason
        if not node:
            return
        if self._options.require_checkpoints:
            raise OutOfSlotMemory(reason)
        if node == self._member.node and self._member.local_rank == 0 and self._member.rank != 0:
            where = {"node": node, "job": self._spec.job, "generation": self._spec.number}
            log.error("this node has no memory for all of the job's checkpoints: %s", reason, extra=where)

    def _open(self, manifest: Manifest) -> MappedSegment:
        """Open a segment with room for ``manifest``, and for more if the job has memory to spare."""
        encoded, provision = len(encode_manifest(manifest)), self.agreed.provision
        nbytes = self._slot_bytes(provision, encoded, manifest.payload_bytes, _whole_bytes(manifest))
        job, local_rank, keep = self._spec.job, self._member.local_rank, tuple(self._versions_to_carry())
        if pinned := self._spec.spec.pinned_slots:  # without slots of their own, pinned versions are dropped too early
            try:
                return self._vault.open_segment(job, local_rank, nbytes, provision.slots + pinned, keep)
            except OutOfSlotMemory as error:
                log.warning("no memory to keep versions for parity, storage or audits: %s", error, extra={"job": job})
        return self._vault.open_segment(job, local_rank, nbytes, provision.slots, keep)

    def _slot_bytes(self, provision: slot_negotiation.SlotProvision, encoded: int, payload: int, whole: int) -> int:
        """Return the size of a slot for a manifest and a payload of these sizes. ``whole``: no share can be larger."""
        if not provision.has_spare_room:
            return slot_bytes_for(encoded, payload)
        # a rank's share grows when one node is lost, and growing a segment then would take time
        world, node = self._spec.world_size, self._spec.spec.nproc_per_node
        larger = -(-payload * world // max(world - node, node)) if world > node else 0
        return slot_bytes_for(2 * encoded, max(payload, min(larger, whole))) + PAGE_BYTES


def _capacity(blob_bytes: int) -> int:
    return max(MIN_BLOB_BYTES, 2 * blob_bytes)


def _whole_bytes(manifest: Manifest) -> int:
    """Return the payload of a slot that holds everything: no share can be larger."""
    tensors = sum(math.prod(t.shape) * t.itemsize + ALIGN for t in manifest.catalog)
    return tensors + manifest.blob_capacity + manifest.digests_range[1] + 3 * ALIGN


class TensorScan:
    """The tensors found by a search, and their layout; ``change``: how they differ from the search before."""

    def __init__(self, tensors: list[TrackedTensor], layout: Layout, change: str = "") -> None:
        self.tensors, self.layout, self.change = tensors, layout, change
        self.gpus = gpus_of(tensors)
        self.is_sharded = any(part.box != full_box(part.shape) for part in layout.parts)


# ---- first plan of a generation, for jobs that must not train without checkpoints


class FirstPlan:
    """Tells the training thread whether the generation has slots; if ``is_required``, raises a lack of memory."""

    def __init__(self, is_required: bool) -> None:
        self._is_required = is_required
        self._attempted = threading.Event()
        self._error: OutOfSlotMemory | None = None

    def mark_made(self) -> None:
        self._error, self._is_required = None, False

    def mark_failed(self, error: Exception) -> None:
        if self._is_required and isinstance(error, OutOfSlotMemory):
            self._error = error

    def mark_attempted(self) -> None:
        """Record the first attempt as soon as possible, with or without a plan."""
        self._attempted.set()

    def wait(self) -> None:
        """Wait for the first attempt, before the first step. Raises OutOfSlotMemory."""
        while self._is_required and not self._attempted.wait(WAIT_SLICE_S):
            pass
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error


# ---- page-locked slot memory, which a GPU copies into: registered with CUDA while a process has it mapped

HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs of the process, not only the thread's current one


def page_lock(segment: MappedSegment) -> None:
    """Page-lock a segment's mapping for the GPU while a process holds it. Raises RuntimeError (``ulimit -l``)."""
    if segment.is_page_locked:
        return
    mapped = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    address, length = mapped.data_ptr(), mapped.numel()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(address, length, HOST_REGISTER_PORTABLE))
    if code != 0:
        raise RuntimeError(
            f"cannot page-lock {length} bytes of slot memory for the GPU: CUDA error {code}; "
            "raise the limit on locked memory (ulimit -l)"
        )
    segment.is_page_locked = True
    weakref.finalize(segment, _unlock, cudart, address, length)  # runs before the mapping is released


def _unlock(cudart: Any, address: int, length: int) -> None:
    """Unlock the pages; CUDA would keep them, and refuse another mapping at the same address."""
    code = int(cudart.cudaHostUnregister(address))
    if code != 0:
        log.info("%d bytes of slot memory stay page-locked until this process ends: CUDA error %d", length, code)


UNPLANNED_WARN_S = 30.0
"""Seconds without a plan until a warning: ranks that see a change at different steps need several to plan for it."""
MAX_SHOWN = 8  # most ranks named in a message


@dataclass(eq=False)
class PlanManager:
    """The plan of one rank in one generation. ``make_plan`` is for the copier thread, the rest for any."""

    _planner: SnapshotPlanner
    _spec: GenerationSpec
    _member: Member
    _retention: VersionRetention
    _send_finding: Callable[[FindingRaised], None]
    _options: slot_negotiation.SnapshotOptions
    _clock: Clock

    def __post_init__(self) -> None:
        self._log_fields = {"node": self._member.node, "job": self._spec.job, "generation": self._spec.number}
        self._gpu = current_gpu()
        self._reported: slot_negotiation.AgreedProvision | None = None
        self._unplanned_since: float | None = None
        self._has_reported_unplanned = False
        self.blob_bytes = 0  # room for Python state in the last plan
        self.first_plan = FirstPlan(self._options.require_checkpoints)
        self.current: ActivePlan | None = None

    @property
    def candidates_only(self) -> bool:
        """True if only versions to be committed are stored; the same on all ranks from the planned step on."""
        return self._planner.agreed.provision.candidates_only

    def plan_for(self, scan: TensorScan) -> ActivePlan | None:
        """Return the current plan if it is for this scan's layout."""
        return self.current if self.current is not None and self.current.layout is scan.layout else None

    @property
    def has_reported_lack(self) -> bool:
        """Return whether the log says already that a node has no memory for all checkpoints, and what to do."""
        return bool(self._planner.agreed.short_node)

    def make_scan(self, tensors: list[TrackedTensor], layout: Layout, last: TensorScan | None, step: int) -> TensorScan:
        """Return the scan after ``step``, with the ``last`` scan's layout, and so its plan, if nothing changed."""
        if last is None:
            return TensorScan(tensors, layout)
        is_planned = self.plan_for(last) is not None
        if last.layout == layout or (is_planned and self._planner.is_equivalent(last.layout, layout)):
            return TensorScan(tensors, last.layout, last.change)
        change = describe_layout_change(last.layout, layout)
        log.info("new plan from step %d on, since tracked tensors changed: %s", step, change, extra=self._log_fields)
        return TensorScan(tensors, layout, change)

    def is_superseded(self) -> bool:
        """Return whether other ranks make a new plan; the current one is then dropped. For the copier thread."""
        if self.current is None or not self._planner.is_superseded():
            return False
        self.current = None
        return True

    def make_plan(self, scan: TensorScan, blob_bytes: int, since: int) -> ActivePlan:
        """Return the current plan if it fits, else a new one for steps from ``since`` on; page-lock it for a GPU."""
        gpu = scan.gpus[0] if scan.gpus else self._gpu
        if gpu is not None:
            torch.cuda.set_device(gpu)  # each thread has its own current GPU, initially the first
        planned = self.plan_for(scan)
        try:
            if planned is None or not planned.fits(blob_bytes):
                self.current = None  # its segment may have to make room for another
                self.blob_bytes = blob_bytes
                try:
                    planned = self._planner.plan(scan.layout, blob_bytes, since)
                finally:  # also if there is no room for this rank's own slots
                    self._report_agreed()
                self._retention.set_slot_count(self._planner.agreed.provision.slots)
                self.current = planned
                if self._has_reported_unplanned:
                    log.info("checkpoints of %s are stored again", self._spec.job, extra=self._log_fields)
                self._unplanned_since, self._has_reported_unplanned = None, False
                self.first_plan.mark_made()
            if scan.gpus:
                page_lock(planned.segment)
        except Exception as error:
            self.first_plan.mark_failed(error)
            if not isinstance(error, OutOfSlotMemory):  # reported separately
                self._report_unplanned(error)
            raise
        return planned

    def _report_unplanned(self, error: Exception) -> None:
        """Report once, from the first of the ranks that are there."""
        now = self._clock.monotonic()
        if self._unplanned_since is None:
            self._unplanned_since = now
        if self._has_reported_unplanned or now - self._unplanned_since < UNPLANNED_WARN_S:
            return
        self._has_reported_unplanned = True
        absent = self._planner.exchange.missing_ranks()
        if any(rank not in absent for rank in range(self._member.rank)):
            return
        ranks = f"; ranks {list_names([*map(str, absent)], MAX_SHOWN)} have not reported their tensors"
        message = (
            f"no checkpoint of {self._spec.job} has been stored for {now - self._unplanned_since:.0f} s; a loss costs "
            f"the steps since then: {error}{ranks if absent else ''}"
        )
        log.error("%s", message, extra=self._log_fields)
        source = "the tensor layouts of all ranks, needed for a snapshot plan"
        self._send_finding(self._finding(FindingKind.NO_CHECKPOINT, Severity.WARNING, "plan", message, source))

    def _report_agreed(self) -> None:
        """Report the agreed provision from rank 0, if it is not the best possible or was not before."""
        before, self._reported = self._reported, self._planner.agreed
        if self._member.rank != 0 or self._reported == before:
            return
        agreed = self._reported
        if not agreed.reason:
            if before is not None and before.reason:
                log.info("there is room for all checkpoint slots again", extra=self._log_fields)
        elif agreed.short_node or agreed.provision.candidates_only:
            message = _describe_shortage(self._spec.job, agreed)
            log.warning("%s", message, extra=self._log_fields)
            severity = Severity.WARNING if agreed.short_node else Severity.INFO
            source = "the planned memory of all segments on each node of the job"
            self._send_finding(self._finding(FindingKind.MEMORY_LOW, severity, "slots", message, source))
        else:
            message = "checkpoint slots have no room for the larger shares after a loss: %s"
            log.info(message, agreed.reason, extra=self._log_fields)

    def _finding(self, kind: FindingKind, severity: Severity, of: str, message: str, source: str) -> FindingRaised:
        finding = Finding(
            kind=kind,
            subject=f"{of}/{self._spec.job}",
            severity=severity,
            message=message,
            mode=Mode.OBSERVE,
            source=source,
            since=self._clock.wall(),
            trace=self._spec.trace,
        )
        return FindingRaised(finding=finding, job=self._spec.job)


def _describe_shortage(job: str, agreed: slot_negotiation.AgreedProvision) -> str:
    slots = agreed.provision.slots
    if agreed.short_node:
        return (
            f"{agreed.short_node} has no memory for all checkpoints of {job} in {slots} slots per rank: training "
            "continues, but nothing is committed until there is memory, and the loss of a node costs all steps since "
            f"the last commit. {agreed.reason}"
        )
    return (
        f"checkpoints of {job} use {slots} slots per rank instead of {SLOTS_PER_RANK}: only commit candidates (about "
        f"two per second) are stored; after a loss, steps since the last commit are repeated. {agreed.reason}"
    )
