"""The plan that a rank's snapshots go by, made anew where it does not fit, and what is told of it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from everstep.clock import Clock
from everstep.errors import OutOfSlotMemory
from everstep.layout.slots import SLOTS
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member
from everstep_trainer.memory_tier.vault_client import MappedSegment
from everstep_trainer.runtime.interrupt import SLICE_S
from everstep_trainer.snapshot.active_plan import Planned, Planner
from everstep_trainer.snapshot.copy import current_gpu
from everstep_trainer.snapshot.job import Look
from everstep_trainer.snapshot.retention import Retention
from everstep_trainer.snapshot.slot_negotiation import Agreed, Choices
from everstep_trainer.state.layout import Layout
from everstep_trainer.state.tensors import TrackedTensor, difference

# ---- first plan
# The first plan of a generation, for jobs that would rather not train than train without checkpoints.


class FirstPlan:
    """Whether the generation has slots. The copier thread tells, the training thread asks.

    Args:
        required: whether the lack of memory for them is the training script's to hear of. Once there are slots, what
            fails later is told in the log alone, as for every job.
    """

    def __init__(self, required: bool) -> None:
        self._required = required
        self._tried = threading.Event()
        self._error: OutOfSlotMemory | None = None

    def made(self) -> None:
        self._error, self._required = None, False

    def failed(self, error: Exception) -> None:
        if self._required and isinstance(error, OutOfSlotMemory):
            self._error = error

    def tried(self) -> None:
        """As soon as can be: with a plan, without one, or where what is to be stored is not known yet."""
        self._tried.set()

    def wait(self) -> None:
        """Before the first step. Raises OutOfSlotMemory."""
        while self._required and not self._tried.wait(SLICE_S):
            pass
        self.check()

    def check(self) -> None:
        """Raises OutOfSlotMemory where it was what the plan failed for."""
        if self._error is not None:
            raise self._error


# ---- locked
# Slot memory that a GPU copies into by itself: registered with CUDA while a process has it mapped.

log = logging.getLogger(__name__)

PORTABLE = 1
"""cudaHostRegisterPortable: for all GPUs of the process, not only the one that the thread acts on."""


def page_lock(segment: MappedSegment) -> None:
    """Page-locks a segment's mapping for the GPU, until nobody holds the segment or the process ends in order.

    Whoever copies into it holds it until the copies are done. Raises RuntimeError with CUDA's reason where the system
    does not let us lock that much (``ulimit -l``).
    """
    if segment.page_locked:
        return
    mapped = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    address, length = mapped.data_ptr(), mapped.numel()
    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = int(cudart.cudaHostRegister(address, length, PORTABLE))
    if code != 0:
        raise RuntimeError(
            f"cannot page-lock {length} bytes of slot memory for the GPU: CUDA error {code}; "
            "raise the limit on locked memory (ulimit -l)"
        )
    segment.page_locked = True
    weakref.finalize(segment, _unlock, cudart, address, length)  # before its mapping goes


def _unlock(cudart: Any, address: int, length: int) -> None:
    """CUDA would keep the pages, and find the address taken when another mapping comes to lie there."""
    code = int(cudart.cudaHostUnregister(address))
    if code != 0:
        log.info("%d bytes of slot memory stay page-locked until this process ends: CUDA error %d", length, code)


UNPLANNED_S = 30.0
"""After so long without a plan it is told: nothing is stored meanwhile. A change that ranks see at different steps is
planned for within some seconds."""
SHOWN = 8
"""Ranks."""


class Plans:
    """Of one rank in one generation. ``make`` is for the copier thread, the rest for any. ``blob_bytes``: the Python
    state that there was room for the last time.

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
        self._unplanned_since: float | None = None
        self._told_unplanned = False
        self.blob_bytes = 0
        self.first = FirstPlan(choices.require)
        self.current: Planned | None = None

    @property
    def lean(self) -> bool:
        """Whether only what is to be committed is stored. The same on all ranks from the step on that was planned."""
        return self._planner.agreed.provision.lean

    def of(self, look: Look) -> Planned | None:
        """The plan there is, where it is one for this layout."""
        return self.current if self.current is not None and self.current.layout is look.layout else None

    def look(self, tensors: list[TrackedTensor], layout: Layout, known: Look | None, step: int) -> Look:
        """What was found after ``step``; to be planned only where it is another layout than the ``known`` one."""
        if known is None:
            return Look(tensors, layout)
        if known.layout == layout or self._takes_for_the_same(known, layout):
            return Look(tensors, known.layout, known.change)
        change = difference(known.layout, layout)
        log.info("planned anew from step %d on, since tracked tensors changed: %s", step, change, extra=self._where())
        return Look(tensors, layout, change)

    def _takes_for_the_same(self, known: Look, layout: Layout) -> bool:
        return self.of(known) is not None and self._planner.takes_for_the_same(known.layout, layout)

    def superseded(self) -> bool:
        """Whether other ranks plan anew. Nothing begins by the plan there is from then on; for the copier thread."""
        if self.current is None or not self._planner.superseded():
            return False
        self.current = None
        return True

    def make(self, look: Look, blob_bytes: int, since: int) -> Planned:
        """The plan there is where it fits, else a new one; its slots are page-locked where state lies on a GPU.

        ``since``: no step from there on was stored by an older one.

        Raises what Planner does, and RuntimeError where the slots cannot be locked.
        """
        gpu = look.gpus[0] if look.gpus else self._gpu
        if gpu is not None:
            torch.cuda.set_device(gpu)  # each thread has its own; a new one begins with the first GPU
        planned = self.of(look)
        try:
            if planned is None or not planned.fits(blob_bytes):
                self.current = None  # its segment may be about to make place for another
                self.blob_bytes = blob_bytes
                try:
                    planned = self._planner.plan(look.layout, blob_bytes, since)
                finally:  # also where there is no room for this rank's own slots
                    self._tell_agreed()
                self._retention.provide(self._planner.agreed.provision.slots)
                self.current = planned
                self._tell_planned()
                self.first.made()
            if look.gpus:
                page_lock(planned.segment)
        except Exception as error:
            self.first.failed(error)
            if not isinstance(error, OutOfSlotMemory):  # which is told in its own words
                self._tell_unplanned(error)
            raise
        return planned

    def _tell_planned(self) -> None:
        if self._told_unplanned:
            log.info("checkpoints of %s are stored again", self._spec.job, extra=self._where())
        self._unplanned_since, self._told_unplanned = None, False

    def _tell_unplanned(self, error: Exception) -> None:
        """Once, by the first of the ranks that are there."""
        now = self._clock.monotonic()
        if self._unplanned_since is None:
            self._unplanned_since = now
        if self._told_unplanned or now - self._unplanned_since < UNPLANNED_S:
            return
        self._told_unplanned = True
        absent = self._planner.absent()
        if any(rank not in absent for rank in range(self._member.rank)):
            return
        more = f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
        who = f"; ranks {', '.join(map(str, absent[:SHOWN]))}{more} have not told what they hold" if absent else ""
        message = (
            f"no checkpoint of {self._spec.job} has been stored for {now - self._unplanned_since:.0f} s, and a loss "
            f"costs the steps since: {error}{who}"
        )
        log.error("%s", message, extra=self._where())
        source = "every rank's word on which tensors it holds, which a plan takes"
        self._tell(self._finding(FindingKind.NOT_STORED, Severity.WARNING, "plan", message, source))

    def _where(self) -> dict[str, object]:
        return {"node": self._member.node, "job": self._spec.job, "generation": self._spec.number}

    def _tell_agreed(self) -> None:
        """Rank 0 says what all ranks have, where it is not the best that may be, or was not before."""
        before, self._told = self._told, self._planner.agreed
        if self._member.rank != 0 or self._told == before:
            return
        spec, agreed = self._spec, self._told
        where = self._where()
        if not agreed.why:
            if before is not None and before.why:
                log.info("there is room for all checkpoint slots again", extra=where)
        elif agreed.lacking or agreed.provision.lean:
            message = _lack(spec.job, agreed) if agreed.lacking else _thrift(spec.job, agreed)
            log.warning("%s", message, extra=where)
            severity = Severity.WARNING if agreed.lacking else Severity.INFO
            source = "the sum of what is planned, on each node of the job"
            self._tell(self._finding(FindingKind.MEMORY_SHORT, severity, "slots", message, source))
        else:
            log.info(
                "checkpoint slots have no room for the larger share that a loss leaves: %s", agreed.why, extra=where
            )

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
