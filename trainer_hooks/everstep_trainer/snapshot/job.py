"""Follow one snapshot from the training thread to a sealed slot, and detect changes of state during its copy."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import NamedTuple

import torch

from everstep.ids import Version
from everstep_trainer.digests.digest import to_unsigned
from everstep_trainer.slots.copy import CopyResult, ParameterKey, SlotTargets, SnapshotSources
from everstep_trainer.slots.shares import RankShare
from everstep_trainer.snapshot.planner import ActivePlan, TensorScan
from everstep_trainer.state.python_value_codec import Blob
from everstep_trainer.state.spots import SpotValues
from everstep_trainer.state.tensors import list_names


class SnapshotPhase(enum.Enum):
    QUEUED = enum.auto()
    COPYING = enum.auto()
    COPIED = enum.auto()
    OVER = enum.auto()


class FilledSlot(NamedTuple):
    """A filled slot and the seconds its copy took. ``slot_digests``: None if the slot is still to be hashed."""

    planned: ActivePlan
    slot: int
    digests: dict[str, torch.Tensor]
    slot_digests: list[bytes] | None
    copy_s: float

    def hex_digests(self) -> dict[str, str]:
        """Return the digest of each replica group in hex; the copy is finished, so they are on the host."""
        return {group: f"{to_unsigned(digest):016x}" for group, digest in self.digests.items()}


class OneShotSignal:
    """A one-time signal between threads, two per step; ``threading.Event`` takes 10 us more each time."""

    def __init__(self) -> None:
        self._held = threading.Lock()
        self._held.acquire()
        self._unset = [True]

    def set(self) -> None:
        """Release all waiters, now and later. From any thread, repeatedly."""
        try:
            self._unset.pop()  # only one thread succeeds
        except IndexError:
            return
        self._held.release()

    def is_set(self) -> bool:
        return not self._unset

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is set, for at most ``timeout_s``; return whether it is."""
        if self._unset and self._held.acquire(timeout=timeout_s):
            self._held.release()
        return self.is_set()


@dataclass(eq=False)
class SnapshotJob:
    """One snapshot on its way. ``is_candidate``: its version may be committed. ``was_copied``: a copy was made, even if
    it was discarded. ``blocks_training``: ``begin`` waits until it is copied. ``may_change``: the state may change now;
    ``changed_before_allowed``: it did so earlier."""

    version: Version
    scan: TensorScan
    sources: SnapshotSources
    blob: Blob
    overlap: InitVar[bool | None]
    must_block: InitVar[bool] = False

    def __post_init__(self, overlap: bool | None, must_block: bool) -> None:
        self.is_candidate = False
        self.was_copied = False
        self.filled: FilledSlot | None = None
        self.moment_digests: dict[str, str] | None = None  # if they are to be compared with other ranks'
        self.needs_comparison = False  # before it counts, since ranks' optimizer state may differ
        self.parameter_digests: dict[ParameterKey, str] | None = None  # the same
        # known from the second snapshot on; also covers a pipeline stage's state that the scan cannot recognise
        share = self.sources.share
        alone = self.scan.is_sharded or (share is not None and share.has_unshared_state)
        overlaps = self.sources.is_on_gpu if overlap is None else overlap
        self.blocks_training = must_block or (alone and not overlaps)
        self.may_change = self.changed_before_allowed = False
        self._write_counts: list[int] | None = None
        self._spots: SpotValues | None = None
        self.phase = SnapshotPhase.QUEUED
        self.copied = OneShotSignal()
        self.done = OneShotSignal()

    def record_writes(self) -> None:
        """Record write counts and some bytes of the state that is to be copied; from the training thread."""
        self._write_counts = self.sources.writes.counts()
        self._spots = self.sources.read_spots()

    def changed_parameters(self) -> list[str]:
        """Return the names of parameters to which torch has counted writes since then."""
        return [] if self._write_counts is None else self.sources.writes.written_since(self._write_counts)

    def is_unchanged(self) -> bool:
        """Return whether the state was recorded and is so still, by counts and by bytes. Waits for GPUs."""
        spots = self._spots
        return spots is not None and not self.changed_parameters() and not self.sources.spots_changed(spots)

    def torn_parameters(self, share: RankShare, copied: CopyResult, targets: SlotTargets) -> list[str]:
        """Return the names of parameters that changed before their copy, now complete, was made, without a count."""
        if self._spots is None or self.blocks_training:  # nothing could write: a difference is an error of the copy
            return []
        after = copied.spots if self.sources.is_on_gpu else None
        changed = [] if self.may_change and after is None else self.sources.spots_changed(self._spots, after)
        return changed or self.sources.spots_miscopied(self._spots, share, targets)


# ---- changes of tracked state while it is being copied
#
# Tracked optimizers announce a change (``Snapshotter.wait``). Unannounced changes (an untracked optimizer, a momentum
# encoder in a forward pass, an update by hand) show in torch's count of writes to each parameter. Such a copy is
# dropped, and from then on training waits for each copy. It also waits for the copy after a step without announcement.
# The count misses writes by fused optimizers, by ``_foreach`` operations on DTensors, through ``.data``, by kernels
# that bypass torch, and by CUDA graphs. So a few bytes of each parameter are compared, too (`state.spots`): the live
# ones with those before, for a change that stays, and those in the slot, for a change that was taken back meanwhile.

log = logging.getLogger(__name__)

MAX_NAMED = 3


class MutationGuard:
    """The guard of one rank in one generation; ``is_announced``: an optimizer, which announces updates, is tracked;
    ``is_needed``: False if the state never changes in place."""

    def __init__(self, is_announced: bool, log_fields: Mapping[str, object], *, is_needed: bool = True) -> None:
        self._is_needed = is_needed
        self._is_announced = is_announced
        self._changes_unannounced = False
        self._log_fields = dict(log_fields)

    def must_block(self) -> bool:
        """Return whether the copy that begins now must complete before training continues; once for each copy."""
        announced, self._is_announced = self._is_announced, False
        return self._is_needed and (self._changes_unannounced or not announced)

    def allow_changes(self, job: SnapshotJob | None) -> None:
        """Allow the state that ``job`` copies to change; from the training thread."""
        self._is_announced = True
        if job is not None:
            self.changed_before_allowed(job)
            job.may_change = True

    def changed_before_allowed(self, job: SnapshotJob) -> bool:
        """Return whether the state that ``job`` copies changed before it was allowed to. From any thread."""
        moved = [] if job.may_change else job.changed_parameters()
        if moved and not job.may_change:  # changes were still not allowed after the counts were read
            self.discard(job, moved)
        return job.changed_before_allowed

    def discard(self, job: SnapshotJob, changed: list[str]) -> None:
        """Discard a copy into which parameters were changed. From any thread."""
        job.changed_before_allowed = True
        self._warn_changed(changed, job.version.step)

    def _warn_changed(self, changed: list[str], step: int) -> None:
        if self._changes_unannounced:
            return
        self._changes_unannounced = True
        log.warning(
            "%s %s modified without notice while the snapshot of step %d was copied: the snapshot is discarded, and "
            "from now on training blocks during each copy. Track every optimizer, and call run.before_update() before "
            "any other update, also before one through .data, which is better made under torch.no_grad() without .data",
            list_names(changed, MAX_NAMED),
            "were" if len(changed) > 1 else "was",
            step,
            extra=self._log_fields,
        )
