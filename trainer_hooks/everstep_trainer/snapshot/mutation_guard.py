"""Detect changes of tracked state while it is being copied.

Tracked optimizers announce a change (``Snapshotter.wait``). Unannounced changes (an untracked optimizer, a momentum
encoder in a forward pass, an update by hand) show in torch's count of writes to each parameter. Such a copy is
dropped, and from then on training waits for each copy. It also waits for the copy after a step without announcement.

The count misses writes by fused optimizers, by ``_foreach`` operations on DTensors, through ``.data``, by kernels that
bypass torch, and by CUDA graphs.
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
    """Counts of writes to parameters, about 50 ns each.

    Buffers that training changes are staged earlier, and state of tracked optimizers changes only in their steps.
    """

    def __init__(self, parameters: Iterable[TrackedTensor]) -> None:
        self._counted: list[torch.Tensor] = []
        self._names: list[str] = []
        for tracked in parameters:
            tensor = tracked.container[tracked.key]
            # a DTensor and its local tensor count separately
            for each in (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,):
                if not each.is_inference():
                    self._counted.append(each)
                    self._names.append(tracked.name)

    def counts(self) -> list[int]:
        return list(map(_version, self._counted))

    def written_since(self, counts: list[int]) -> list[str]:
        """Return the names of tensors written to since then; an operation that still runs is not counted yet."""
        now = self.counts()
        if now == counts:
            return []
        return sorted({name for name, is_, was in zip(self._names, now, counts, strict=True) if is_ != was})


class MutationGuard:
    """The guard of one rank in one generation; ``is_announced``: an optimizer, which announces updates, is tracked."""

    def __init__(self, is_announced: bool, log_fields: Mapping[str, object]) -> None:
        self._is_announced = is_announced
        self._changes_unannounced = False
        self._log_fields = dict(log_fields)

    def must_block(self) -> bool:
        """Return whether the copy that begins now must complete before training continues; once for each copy."""
        announced, self._is_announced = self._is_announced, False
        return self._changes_unannounced or not announced

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
            job.changed_before_allowed = True
            self._warn_changed(moved, job.version.step)
        return job.changed_before_allowed

    def _warn_changed(self, changed: list[str], step: int) -> None:
        if self._changes_unannounced:
            return
        self._changes_unannounced = True
        more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
        log.warning(
            "%s%s was modified while the snapshot of step %d was copied, without run.before_update(): the snapshot is "
            "discarded, and from now on training blocks during each copy. Track every optimizer, and call "
            "run.before_update() before any other update",
            ", ".join(changed[:MAX_NAMED]),
            more,
            step,
            extra=self._log_fields,
        )
