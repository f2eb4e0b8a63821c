"""The plan that a rank's snapshots go by, made anew where it does not fit, and what is told of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from everstep.clock import Clock
from everstep.slots import SLOTS
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member
from trainer_hooks.snapshot.choices import Choices
from trainer_hooks.snapshot.device import current_gpu
from trainer_hooks.snapshot.first_plan import FirstPlan
from trainer_hooks.snapshot.job import Look
from trainer_hooks.snapshot.locked import page_lock
from trainer_hooks.snapshot.planned import Planned, Planner
from trainer_hooks.snapshot.provision import Agreed
from trainer_hooks.snapshot.retention import Retention

log = logging.getLogger(__name__)


class Plans:
    """Of one rank in one generation. ``make`` is for the copier thread, the rest for any.

    Args:
        retention: hears how many slots there are.
        tell: takes what is to be known of the job, from the copier thread; must not block.
    """

    def __init__(
        self,
        planner: Planner,
        spec: GenerationSpec,
        member: Member,
        retention: Retention,
        tell: Callable[[FindingRaised], None],
        choices: Choices,
        clock: Clock,
    ) -> None:
        self._planner = planner
        self._spec = spec
        self._member = member
        self._retention = retention
        self._tell = tell
        self._clock = clock
        self._gpu = current_gpu()
        self._told: Agreed | None = None
        self.first = FirstPlan(choices.require)
        self.current: Planned | None = None

    @property
    def lean(self) -> bool:
        """Whether only what is to be committed is stored. The same on all ranks from the step on that was planned."""
        return self._planner.agreed.provision.lean

    def of(self, look: Look) -> Planned | None:
        """The plan there is, where it is one for this layout."""
        return self.current if self.current is not None and self.current.layout is look.layout else None

    def make(self, look: Look, blob_bytes: int) -> Planned:
        """The plan there is where it fits, else a new one; its slots are page-locked where state lies on a GPU.

        Raises what Planner does, and RuntimeError where the slots cannot be locked.
        """
        gpu = look.gpus[0] if look.gpus else self._gpu
        if gpu is not None:
            torch.cuda.set_device(gpu)  # each thread has its own; a new one begins with the first GPU
        planned = self.of(look)
        try:
            if planned is None or not planned.fits(blob_bytes):
                self.current = None  # its segment may be about to make place for another
                try:
                    planned = self._planner.plan(look.tag, look.layout, blob_bytes)
                finally:  # also where there is no room for this rank's own slots
                    self._tell_agreed()
                self._retention.provide(self._planner.agreed.provision.slots)
                self.current = planned
                self.first.made()
            if look.gpus:
                page_lock(planned.segment)
        except Exception as error:
            self.first.failed(error)
            raise
        return planned

    def _tell_agreed(self) -> None:
        """Rank 0 says what all ranks have, where it is not the best that may be, or was not before."""
        before, self._told = self._told, self._planner.agreed
        if self._member.rank != 0 or self._told == before:
            return
        spec, agreed = self._spec, self._told
        where = {"node": self._member.node, "job": spec.job, "generation": spec.number}
        if not agreed.why:
            if before is not None and before.why:
                log.info("there is room for all checkpoint slots again", extra=where)
        elif agreed.lacking or agreed.provision.lean:
            message = _lack(spec.job, agreed) if agreed.lacking else _thrift(spec.job, agreed)
            log.warning("%s", message, extra=where)
            self._tell(self._finding(message, Severity.WARNING if agreed.lacking else Severity.INFO))
        else:
            log.info(
                "checkpoint slots have no room for the larger share that a loss leaves: %s", agreed.why, extra=where
            )

    def _finding(self, message: str, severity: Severity) -> FindingRaised:
        finding = Finding(
            kind=FindingKind.MEMORY_SHORT,
            subject=f"slots/{self._spec.job}",
            severity=severity,
            message=message,
            mode=Mode.OBSERVE,
            source="the sum of what is planned, on each node of the job",
            since=self._clock.wall(),
            trace=self._spec.trace,
        )
        return FindingRaised(finding=finding, job=self._spec.job)


def _thrift(job: str, agreed: Agreed) -> str:
    return (
        f"checkpoints of {job} are in {agreed.provision.slots} slots a rank instead of {SLOTS}: only what is to be "
        f"committed is stored, about twice a second, and a loss costs the steps since. {agreed.why}"
    )


def _lack(job: str, agreed: Agreed) -> str:
    return (
        f"{agreed.lacking} has no memory for all checkpoints of {job} in {agreed.provision.slots} slots a rank: "
        "training goes on, nothing is committed until there is memory, and the loss of a node costs all steps since "
        f"what was committed last. {agreed.why}"
    )
