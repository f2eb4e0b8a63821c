"""Audit the copies of versions: the bytes in a slot must be those of the state that was copied.

The state is digested on its device before the copy, and the slot's bytes on the host. From then on each chunk of the
slot has a hash, which every reader checks. The slot keeps the digest of each of its tensors. They add up to the digest
on the device, so that a restore can compare its tensors, on their device again (`everstep_trainer.sdc.restore_audit`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from everstep.clock import Clock
from everstep.ids import Version
from everstep.vocabulary import AuditKind, AuditRole
from everstep_trainer.digests.digest import combined_digest, to_hex
from everstep_trainer.digests.piece_digests import separate_digests
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.presets import AuditOptions

if TYPE_CHECKING:
    from everstep_trainer.slots.copy import CopyResult, SlotTargets

log = logging.getLogger(__name__)


class CopyAudit:
    """Compares the copies of one rank, in the thread that copies. ``report`` receives a copy that differs.

    From a GPU every candidate is audited, since training goes on meanwhile. On the host the next update may wait for
    the copy, so audits keep to their share of the time, or to their interval.
    """

    def __init__(self, rank: int, options: AuditOptions, report: Callable[[Mismatch], None], clock: Clock) -> None:
        self._rank, self._options, self._report, self._clock = rank, options, report, clock
        self._started = self._began = clock.monotonic()
        self._taken_s = 0.0
        self._last_step: int | None = None

    def begin(self, step: int, *, is_on_gpu: bool) -> bool:
        """Return whether the candidate of ``step`` is audited; its copy begins now."""
        self._began = self._clock.monotonic()
        interval, last = self._options.interval, self._last_step
        if interval is not None:
            is_due = last is None or step - last >= interval
        else:
            is_due = is_on_gpu or self._taken_s <= self._options.share * (self._began - self._started)
        if is_due:
            self._last_step = step
        return is_due

    def is_right(
        self,
        version: Version,
        copied: CopyResult,
        targets: SlotTargets,
        digest_again: Callable[[], torch.Tensor],
    ) -> bool:
        """Return whether the slot's bytes are those of the state. Only a change between them is reported.

        If the state itself changed during the copy, the program wrote to it without notice. Then no rank is
        accused, and the copy is as useless. ``digest_again`` digests the state, which nothing changes now, unless it is
        on a GPU.
        """
        assert copied.before is not None
        if copied.after is None:
            total = combined_digest(targets)  # the host's copy has kept their digests
        else:
            pieces = separate_digests(targets)
            targets.keep_digests(pieces)
            total = pieces.sum()
        original, digest = to_hex(copied.before), to_hex(total)
        if original == digest:
            self._taken_s += self._clock.monotonic() - self._began  # with the copy itself, to be on the safe side
            return True
        if to_hex(digest_again() if copied.after is None else copied.after) != original:
            log.warning("the state changed while step %d was copied: the snapshot is discarded", version.step)
            return False
        self._report(
            Mismatch(
                audit=AuditKind.CHECKPOINT,
                step=version.step,
                unit=f"copy of version {version}",
                owner=self._rank,
                role=AuditRole.OWNER,
                original=original,
                digest=digest,
            )
        )
        return False
