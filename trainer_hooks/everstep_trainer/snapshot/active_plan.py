"""A snapshot plan in use: this rank's share, its manifest, and the segment with views into its slots."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import xxhash

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.manifests import Manifest, encode_manifest
from everstep.layout.segments import PAGE_BYTES
from everstep.layout.slots import slot_bytes_for
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_trainer.memory_tier.vault_client import MappedSegment, VaultClient
from everstep_trainer.restore.version_choice import FIRST_CHECKPOINT_RANK
from everstep_trainer.snapshot.copy import SlotTargets, slot_view
from everstep_trainer.snapshot.exchange import LayoutExchange, RoundSuperseded
from everstep_trainer.snapshot.plan import (
    RankShare,
    build_manifest,
    divide_state,
    payload_bytes,
    segment_needs,
    unify_sharing,
)
from everstep_trainer.snapshot.slot_negotiation import (
    DEFAULT_OPTIONS,
    AgreedProvision,
    SlotNegotiation,
    SlotProvision,
    SnapshotOptions,
    acceptable_provisions,
)
from everstep_trainer.state.layout import ALIGN, Layout

log = logging.getLogger(__name__)

MIN_BLOB_BYTES = 16 << 10
"""Smallest room for Python state; the room is twice the state's first size. Longer state needs a new manifest, but no
new plan."""


SMALL_BYTES = 2 << 20
SMALL_PIECE_COUNT = 2048
"""Largest share that is copied sooner than another thread, which needs Python's lock, begins to: 0.1 to 0.5 ms."""


class ActivePlan:
    """The parts of a snapshot that do not depend on the step, made once.

    Attributes:
        since_step: First step that is stored by this plan.
        plan_with_covers: The plan for all that this rank can store, if that includes other ranks' pieces.
        is_small: Whether the training thread may copy the share itself.
    """

    def __init__(
        self,
        layout: Layout,
        share: RankShare,
        manifest: Manifest,
        segment: MappedSegment,
        since: int,
        including_replicated_state: ActivePlan | None = None,
    ) -> None:
        self.layout = layout
        self.since_step = since
        self.share = share
        self.manifest = manifest
        self.manifest_bytes = encode_manifest(manifest)
        self._manifest_digest = xxhash.xxh3_128_digest(self.manifest_bytes)
        self.segment = segment
        self.plan_with_covers = including_replicated_state
        self.is_small = manifest.payload_bytes <= SMALL_BYTES and len(manifest.stored) <= SMALL_PIECE_COUNT
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
            payload = torch.frombuffer(self.segment.view.payload(slot), dtype=torch.uint8)
            views = (
                slot_view(
                    payload, stored.offset, tensor.dtype, stored.box.size[1:] if tensor.per_rank else stored.box.size
                )
                for stored in self.manifest.stored
                for tensor in (self.manifest.catalog[stored.tensor],)
            )
            self._targets[slot] = SlotTargets(views, self.segment, payload)
        return self._targets[slot]


class _LayoutAgreement(NamedTuple):
    """The outcome of an exchange of layouts. ``mine``: this rank's layout with the sharing that all ranks agreed on."""

    layout: Layout
    mine: Layout
    layouts: list[Layout]
    share: RankShare
    since: int


class SnapshotPlanner:
    """Makes plans in the copier thread: exchanges layouts, divides state, agrees on slots, opens the segment.

    Args:
        versions_to_carry: Returns the versions to move into a segment of fewer slots, the most important first.
    """

    def __init__(
        self,
        vault: VaultClient,
        spec: GenerationSpec,
        member: Member,
        exchange: LayoutExchange,
        timeout_s: float,
        options: SnapshotOptions = DEFAULT_OPTIONS,
        versions_to_carry: Callable[[], Sequence[Version]] = tuple,
    ) -> None:
        self._vault = vault
        self._spec = spec
        self._member = member
        self._exchange = exchange
        self._timeout_s = timeout_s
        self._require_checkpoints = options.require_checkpoints
        self._versions_to_carry = versions_to_carry
        self._negotiation = SlotNegotiation(
            spec, member, options, exchange.put, partial(exchange.get, timeout_s=timeout_s)
        )
        self._agreement: _LayoutAgreement | None = None
        self.agreed = AgreedProvision(acceptable_provisions(options)[0])

    def plan(self, layout: Layout, blob_bytes: int, since: int) -> ActivePlan:
        """Return a plan for ``layout`` with room for ``blob_bytes`` of Python state.

        The ranks exchange layouts only if ``layout`` is not the last one planned, or after ``is_superseded`` returned
        True.

        Args:
            layout: This rank's layout.
            blob_bytes: Room for Python state.
            since: As in LayoutExchange.layouts.

        Raises:
            Unavailable: Other ranks or the vault do not answer.
            OutOfSlotMemory: There is no memory for slots.
            ValueError: Ranks hold different tensors under one name.
        """
        if self._agreement is None or self._agreement.layout is not layout:
            self._agree(layout, blob_bytes, since)
            self._report_lack()
        assert self._agreement is not None
        _, _, layouts, share, since = self._agreement
        manifest = build_manifest(self._member.rank, layouts, share, _capacity(blob_bytes))
        if not share.cover_pieces or self.agreed.provision.candidates_only:
            return ActivePlan(layout, share, manifest, self._open(manifest), since)
        wide = share.including_replicated_state()
        wide_manifest = build_manifest(self._member.rank, layouts, wide, _capacity(blob_bytes))
        segment = self._open(wide_manifest)
        return ActivePlan(
            layout, share, manifest, segment, since, ActivePlan(layout, wide, wide_manifest, segment, since)
        )

    def is_superseded(self) -> bool:
        """Return whether other ranks plan anew, so that this one must too; see LayoutExchange."""
        if not self._exchange.is_superseded():
            return False
        self._agreement = None
        return True

    def missing_ranks(self) -> list[int]:
        """Return the ranks whose layouts are missing; see LayoutExchange."""
        return self._exchange.missing_ranks()

    def is_equivalent(self, planned: Layout, layout: Layout) -> bool:
        """Return whether ``layout`` equals the plan's version of ``planned``, whose sharing other ranks knew
        earlier."""
        agreement = self._agreement
        return agreement is not None and agreement.layout is planned and agreement.mine == layout

    def _agree(self, layout: Layout, blob_bytes: int, since: int) -> None:
        rank = self._member.rank
        while True:
            try:
                told = self._exchange.layouts(layout, since, self._timeout_s)
                layouts = unify_sharing(told.layouts)
                shares = divide_state(layouts, self._nodes(), self._spec.spec.replicas, self._spec.replica_nodes)
                manifest = build_manifest(rank, layouts, shares[rank], _capacity(blob_bytes))
                ask = partial(self._check_room, layouts, shares, manifest)
                self.agreed = self._negotiation.agree(str(told.number), ask)
            except RoundSuperseded:
                continue
            self._agreement = _LayoutAgreement(layout, layouts[rank], layouts, shares[rank], told.since_step)
            return

    def _nodes(self) -> list[str]:
        return [self._spec.node_of(rank) for rank in range(self._spec.world_size)]

    def _check_room(
        self,
        layouts: list[Layout],
        shares: list[RankShare],
        manifest: Manifest,
        provision: SlotProvision,
        tentative: bool,
    ) -> None:
        """Check that the node has room for all that its ranks and its vault will need. Raises OutOfSlotMemory.

        Python state and manifest of other ranks are taken to be as large as this rank's.
        """
        encoded, whole = len(encode_manifest(manifest)), _whole_bytes(manifest)

        def slot_bytes(rank: int) -> int:
            share = (
                shares[rank]
                if provision.candidates_only or not shares[rank].cover_pieces
                else shares[rank].including_replicated_state()
            )
            payload = payload_bytes(layouts[rank], share, manifest.blob_capacity)
            return self._slot_bytes(provision, encoded, payload, whole)

        needs = segment_needs(self._member.node, self._spec, shares, provision.slots, slot_bytes)
        # a reserve for a possible loss must not crowd out existing checkpoints
        below = 0 if provision.has_spare_room else FIRST_CHECKPOINT_RANK
        self._vault.check_room(
            self._spec.job, tuple(needs), tentative=tentative, below=below, keep=tuple(self._versions_to_carry())
        )

    def _report_lack(self) -> None:
        """Report a lack of memory early. Raises OutOfSlotMemory if the job requires checkpoints."""
        lacking, why = self.agreed.short_node, self.agreed.reason
        if not lacking:
            return
        if self._require_checkpoints:
            raise OutOfSlotMemory(why)
        if lacking == self._member.node and self._member.local_rank == 0:
            where = {"node": lacking, "job": self._spec.job, "generation": self._spec.number}
            log.error("this node has no memory for all of the job's checkpoints: %s", why, extra=where)

    def _open(self, manifest: Manifest) -> MappedSegment:
        """Open the rank's segment, with room for ``manifest`` and more if the job has memory to spare."""
        encoded, provision = len(encode_manifest(manifest)), self.agreed.provision
        whole = _whole_bytes(manifest)
        return self._open_slots(provision.slots, self._slot_bytes(provision, encoded, manifest.payload_bytes, whole))

    def _slot_bytes(self, provision: SlotProvision, encoded: int, payload: int, whole: int) -> int:
        """Return the size of a slot for a manifest and a payload of these sizes. ``whole``: no share can be larger."""
        if not provision.has_spare_room:
            return slot_bytes_for(encoded, payload)
        return slot_bytes_for(2 * encoded, self._larger_payload(payload, whole)) + PAGE_BYTES

    def _larger_payload(self, payload: int, whole: int) -> int:
        """Return the size of the share that a rank gets when one node is lost, in bytes.

        Enlarging a segment costs the first touch of its pages, which should not add to the cost of a loss.
        """
        world, node = self._spec.world_size, self._spec.spec.nproc_per_node
        fewer = max(world - node, node)
        more = -(-payload * world // fewer) if world > node else 0
        return max(payload, min(more, whole))

    def _open_slots(self, slots: int, slot_bytes: int) -> MappedSegment:
        """Open a segment with slots for pinned versions if memory allows; without them those versions are dropped too
        early."""
        job, more, keep = self._spec.job, self._spec.spec.pinned_slots, tuple(self._versions_to_carry())
        if more:
            try:
                return self._vault.open_segment(job, self._member.local_rank, slot_bytes, slots + more, keep)
            except OutOfSlotMemory as error:
                log.warning("no memory to keep versions for parity or storage: %s", error, extra={"job": job})
        return self._vault.open_segment(job, self._member.local_rank, slot_bytes, slots, keep)


def _capacity(blob_bytes: int) -> int:
    return max(MIN_BLOB_BYTES, 2 * blob_bytes)


def _whole_bytes(manifest: Manifest) -> int:
    """Return the payload of a slot that holds everything: no share can be larger."""
    tensors = sum(math.prod(t.shape) * t.itemsize + ALIGN for t in manifest.catalog)
    return tensors + manifest.blob_capacity + 2 * ALIGN
