"""Record what a rank knows of a regroup, and pass it to the callbacks of a training function."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch

from everstep.vocabulary import GenerationReason
from everstep.wire.v1.training import GenerationSpec

log = logging.getLogger(__name__)


class RegroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A regroup, as rank 0 and every other rank see it when they finish their first step after it.

    Attributes:
        job: Name of the job.
        generation: Number of the generation that the regroup began.
        reason: Why it replaced the one before.
        cause: The same as a sentence, with the names of ranks and nodes.
        world_size: Number of ranks from now on.
        step: First step that was finished after the regroup.
        restored_step: Step whose state was restored; 0 if training began anew.
        repeated_steps: Steps that were finished before and are computed again; None if no process survived to tell.
        lost_s: Seconds from the last finished step before the regroup to the first one after it. If no process
            survived to tell, they count from the decision to regroup.
        total_lost_s: Sum of ``lost_s`` over the job, as far as surviving processes know it.
        phases_s: Seconds of this rank by phase, such as ``rendezvous`` and ``restore``.
    """

    job: str
    generation: int
    reason: GenerationReason
    cause: str
    world_size: int
    step: int
    restored_step: int
    repeated_steps: int | None
    lost_s: float
    total_lost_s: float
    phases_s: dict[str, float]

    @property
    def regroups(self) -> int:
        """Number of regroups of the job so far."""
        return self.generation - 1


class RecoveryTally:
    """The last finished step and the lost seconds that a process knows of; it outlives generations.

    Ranks exchange entries through the rendezvous store, so that a new process continues the sums of the others.
    """

    def __init__(self) -> None:
        self.last_step = 0
        self.last_at = 0.0  # wall time, since it is compared across processes
        self.lost_s = 0.0

    def entry(self) -> str:
        """Return what this process knows, for ``merge`` in another one."""
        return f"{self.last_step} {self.last_at!r} {self.lost_s!r};"

    def merge(self, entries: str) -> None:
        """Take over what other processes know and this one does not."""
        for entry in filter(None, entries.split(";")):
            step, at, lost_s = entry.split()
            self.last_step = max(self.last_step, int(step))
            self.last_at = max(self.last_at, float(at))
            self.lost_s = max(self.lost_s, float(lost_s))

    def finish_step(self, step: int, at: float) -> None:
        """Record that a step was finished at this wall time."""
        self.last_step, self.last_at = step, at

    def record(
        self, spec: GenerationSpec, restored_step: int, step: int, at: float, phases_s: Mapping[str, float]
    ) -> RegroupRecord:
        """Return the record of a regroup whose first step was finished at wall time ``at``, and add its seconds."""
        known = self.last_step > 0
        lost_s = max(0.0, at - (self.last_at if known else spec.issued_at))
        self.lost_s += lost_s
        return RegroupRecord(
            job=spec.job,
            generation=spec.number,
            reason=spec.reason,
            cause=spec.sentence,
            world_size=spec.world_size,
            step=step,
            restored_step=restored_step,
            repeated_steps=max(0, self.last_step - restored_step) if known else None,
            lost_s=lost_s,
            total_lost_s=self.lost_s,
            phases_s=dict(phases_s),
        )


OnRegroup = Callable[[RegroupRecord], object]
OnReport = Callable[[int, torch.Tensor | float], object]


class RunCallbacks:
    """A training function's callbacks. One that raises is logged and left out from then on; training continues."""

    def __init__(self, log_fields: Mapping[str, object]) -> None:
        self.on_regroup: list[OnRegroup] = []
        self.on_report: list[OnReport] = []
        self._log_fields = dict(log_fields)

    def regrouped(self, record: RegroupRecord) -> None:
        """Pass on the record of a regroup."""
        self._call(self.on_regroup, record)

    def reported(self, step: int, loss: torch.Tensor | float) -> None:
        """Pass on a reported loss."""
        self._call(self.on_report, step, loss)

    def close(self) -> None:
        """Release the callbacks."""
        self.on_regroup.clear()
        self.on_report.clear()

    def _call(self, callbacks: list[Any], *arguments: object) -> None:
        for callback in list(callbacks):
            try:
                callback(*arguments)
            except Exception:
                callbacks.remove(callback)
                log.warning(
                    "a callback of the training function failed and is not called again: %r",
                    callback,
                    exc_info=True,
                    extra=self._log_fields,
                )
