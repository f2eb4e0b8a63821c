"""Whether tracked state stands still while it is copied.

Tracked optimizers ask before they change it (``Snapshotter.wait``). What does not ask (an optimizer that is not
tracked, a momentum encoder in a forward pass, an update by hand) is seen by torch's own count of writes to each
parameter: such a copy is dropped, and from then on training waits for each one. It also waits for the one that follows
a step in which nobody asked.

Not counted are writes by fused optimizers, of ``_foreach`` operations to DTensors, through ``.data``, by kernels that
go past torch, and of CUDA graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from everstep_trainer.state.tensors import TrackedTensor

if TYPE_CHECKING:
    from everstep_trainer.snapshot.job import SnapshotJob

log = logging.getLogger(__name__)

MAX_NAMED = 3

_version = attrgetter("_version")


class WriteCounts:
    """Counts of writes to parameters, some 50 ns each. Buffers that training changes are copied aside before, and state
    of tracked optimizers changes in their steps only."""

    def __init__(self, parameters: Iterable[TrackedTensor]) -> None:
        self._counted: list[torch.Tensor] = []
        self._names: list[str] = []
        for tracked in parameters:
            tensor = tracked.container[tracked.key]
            # a write to a DTensor counts for itself, one to its local tensor for that
            for each in (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,):
                if not each.is_inference():
                    self._counted.append(each)
                    self._names.append(tracked.name)

    def counts(self) -> list[int]:
        return list(map(_version, self._counted))

    def written_since(self, counts: list[int]) -> list[str]:
        """The names of tensors that were written to since then; of an operation that still runs, not yet."""
        now = self.counts()
        if now == counts:
            return []
        return sorted({name for name, is_, was in zip(self._names, now, counts, strict=True) if is_ != was})


class MutationGuard:
    """Of one rank in one generation.

    Args:
        is_announced: whether somebody will ask before the first update: an optimizer is tracked.
        log_fields: fields for the log.
    """

    def __init__(self, is_announced: bool, log_fields: Mapping[str, object]) -> None:
        self._is_announced = is_announced
        self._changes_unannounced = False
        self._log_fields = dict(log_fields)

    def must_block(self) -> bool:
        """Whether the copy that begins now must be complete before training goes on; once for each."""
        asked, self._is_announced = self._is_announced, False
        return self._changes_unannounced or not asked

    def allow_changes(self, job: SnapshotJob | None) -> None:
        """From the training thread: from here on the state need not stand as ``job`` copies it."""
        self._is_announced = True
        if job is not None:
            self.was_overtaken(job)
            job.may_change = True

    def was_overtaken(self, job: SnapshotJob) -> bool:
        """Whether what ``job`` copies was changed before it might be. From any thread."""
        moved = [] if job.may_change else job.changed_parameters()
        if moved and not job.may_change:  # not released before the counts were read
            job.was_overtaken = True
            self._warn_changed(moved, job.version.step)
        return job.was_overtaken

    def _warn_changed(self, changed: list[str], step: int) -> None:
        if self._changes_unannounced:
            return
        self._changes_unannounced = True
        more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        log.warning(
            "%s%s changed while step %d was copied, and nobody had asked: such a copy is not kept, and from now on "
            "training waits for each. Track every optimizer, and call run.before_update() before any other update",
            ", ".join(changed[:MAX_NAMED]),
            more,
            step,
            extra=self._log_fields,
        )
