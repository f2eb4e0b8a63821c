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
    from everstep_trainer.snapshot.job import Job

log = logging.getLogger(__name__)

NAMED = 3

_version = attrgetter("_version")


class Writes:
    """Counts of writes to parameters, some 50 ns each. Buffers that training changes are copied aside before, and state
    of tracked optimizers changes in their steps only."""

    def __init__(self, parameters: Iterable[TrackedTensor]) -> None:
        self._counted: list[torch.Tensor] = []
        self._names: list[str] = []
        for tracked in parameters:
            tensor = tracked.place[tracked.key]
            # a write to a DTensor counts for itself, one to its local tensor for that
            for each in (tensor, tensor._local_tensor) if isinstance(tensor, DTensor) else (tensor,):
                if not each.is_inference():
                    self._counted.append(each)
                    self._names.append(tracked.name)

    def counts(self) -> list[int]:
        return list(map(_version, self._counted))

    def since(self, counts: list[int]) -> list[str]:
        """The names of tensors that were written to since then; of an operation that still runs, not yet."""
        now = self.counts()
        if now == counts:
            return []
        return sorted({name for name, is_, was in zip(self._names, now, counts, strict=True) if is_ != was})


class Standing:
    """Of one rank in one generation.

    Args:
        asked: whether somebody will ask before the first update: an optimizer is tracked.
        where: fields for the log.
    """

    def __init__(self, asked: bool, where: Mapping[str, object]) -> None:
        self._asked = asked
        self._moves = False
        self._where = dict(where)

    def must_hold(self) -> bool:
        """Whether the copy that begins now must be complete before training goes on; once for each."""
        asked, self._asked = self._asked, False
        return self._moves or not asked

    def may_change(self, job: Job | None) -> None:
        """From the training thread: from here on the state need not stand as ``job`` copies it."""
        self._asked = True
        if job is not None:
            self.is_overtaken(job)
            job.released = True

    def is_overtaken(self, job: Job) -> bool:
        """Whether what ``job`` copies was changed before it might be. From any thread."""
        moved = [] if job.released else job.moved()
        if moved and not job.released:  # not released before the counts were read
            job.overtaken = True
            self._tell(moved, job.version.step)
        return job.overtaken

    def _tell(self, moved: list[str], step: int) -> None:
        if self._moves:
            return
        self._moves = True
        more = f" and {len(moved) - NAMED} more" if len(moved) > NAMED else ""
        log.warning(
            "%s%s changed while step %d was copied, and nobody had asked: such a copy is not kept, and from now on "
            "training waits for each. Track every optimizer, and call run.before_update() before any other update",
            ", ".join(moved[:NAMED]),
            more,
            step,
            extra=self._where,
        )
