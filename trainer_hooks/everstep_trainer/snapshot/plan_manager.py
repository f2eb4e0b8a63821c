"""Manage the plan of a rank's snapshots: replace it when it no longer fits, and report on it."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from everstep.clock import Clock
from everstep.errors import OutOfSlotMemory
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member
from everstep_trainer.memory_tier.vault_client import MappedSegment
from everstep_trainer.runtime.interrupt import WAIT_SLICE_S
from everstep_trainer.snapshot.active_plan import ActivePlan, SnapshotPlanner
from everstep_trainer.snapshot.copy import current_gpu
from everstep_trainer.snapshot.job import TensorScan
from everstep_trainer.snapshot.retention import VersionRetention
from everstep_trainer.snapshot.slot_negotiation import AgreedProvision, SnapshotOptions
from everstep_trainer.state.layout import Layout
from everstep_trainer.state.tensors import TrackedTensor, describe_layout_change

# ---- first plan of a generation, for jobs that must not train without checkpoints


class FirstPlan:
    """Tells the training thread whether the generation has slots; set by the copier thread.

    Args:
        is_required: Whether a lack of memory is raised to the training script. Once there are slots, later failures are
            only logged, as for every job.
    """

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
        """Record the first attempt as soon as possible: with a plan, without one, or if the state is not known yet."""
        self._attempted.set()

    def wait(self) -> None:
        """Wait for the first attempt, before the first step. Raises OutOfSlotMemory."""
        while self._is_required and not self._attempted.wait(WAIT_SLICE_S):
            pass
        self.raise_if_failed()

    def raise_if_failed(self) -> None:
        """Raise OutOfSlotMemory if the plan failed for that reason."""
        if self._error is not None:
            raise self._error


# ---- page-locked slot memory, which a GPU copies into: registered with CUDA while a process has it mapped

log = logging.getLogger(__name__)

HOST_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: for all GPUs of the process, not only the thread's current one."""


def page_lock(segment: MappedSegment) -> None:
    """Page-lock a segment's mapping for the GPU, until nobody holds the segment or the process ends in order.

    Hold the segment until copies into it are done.

    Raises:
        RuntimeError: The system refuses to lock that much (``ulimit -l``); the message has CUDA's error.
    """
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
"""Seconds without a plan, and so without snapshots, until a warning. Ranks that see a change at different steps need
several seconds to plan for it."""
MAX_SHOWN = 8
"""Most ranks named in a message."""


class PlanManager:
    """The plan of one rank in one generation. ``make`` is for the copier thread, the rest for any.

    Attributes:
        blob_bytes: Room for Python state in the last plan.

    Args:
        retention: Receives the number of slots.
        send_finding: Receives findings about the job, from the copier thread; must not block.
    """

    def __init__(
        self,
        planner: SnapshotPlanner,
        spec: GenerationSpec,
        member: Member,
        retention: VersionRetention,
        send_finding: Callable[[FindingRaised], None],
        options: SnapshotOptions,
        clock: Clock,
    ) -> None:
        self._planner = planner
        self._spec = spec
        self._member = member
        self._retention = retention
        self._send_finding = send_finding
        self._clock = clock
        self._gpu = current_gpu()
        self._reported: AgreedProvision | None = None
        self._unplanned_since: float | None = None
        self._has_reported_unplanned = False
        self.blob_bytes = 0
        self.first_plan = FirstPlan(options.require_checkpoints)
        self.current: ActivePlan | None = None

    @property
    def candidates_only(self) -> bool:
        """True if only versions to be committed are stored; the same on all ranks from the planned step on."""
        return self._planner.agreed.provision.candidates_only

    def plan_for(self, scan: TensorScan) -> ActivePlan | None:
        """Return the current plan if it is for this scan's layout."""
        return self.current if self.current is not None and self.current.layout is scan.layout else None

    def make_scan(
        self, tensors: list[TrackedTensor], layout: Layout, known: TensorScan | None, step: int
    ) -> TensorScan:
        """Return the scan after ``step``; it reuses the ``known`` scan's layout, and so its plan, if nothing
        changed."""
        if known is None:
            return TensorScan(tensors, layout)
        if known.layout == layout or self._is_equivalent(known, layout):
            return TensorScan(tensors, known.layout, known.change)
        change = describe_layout_change(known.layout, layout)
        log.info(
            "planned anew from step %d on, since tracked tensors changed: %s", step, change, extra=self._log_fields()
        )
        return TensorScan(tensors, layout, change)

    def _is_equivalent(self, known: TensorScan, layout: Layout) -> bool:
        return self.plan_for(known) is not None and self._planner.is_equivalent(known.layout, layout)

    def is_superseded(self) -> bool:
        """Return whether other ranks plan anew; the current plan is then dropped. For the copier thread."""
        if self.current is None or not self._planner.is_superseded():
            return False
        self.current = None
        return True

    def make_plan(self, scan: TensorScan, blob_bytes: int, since: int) -> ActivePlan:
        """Return the current plan if it fits, else a new one; page-lock its slots if state is on a GPU.

        Args:
            scan: The tensors and their layout.
            blob_bytes: Room for Python state.
            since: First step that no older plan stored.

        Raises:
            RuntimeError: The slots cannot be locked; or any error of SnapshotPlanner.plan.
        """
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
                self._report_planned()
                self.first_plan.mark_made()
            if scan.gpus:
                page_lock(planned.segment)
        except Exception as error:
            self.first_plan.mark_failed(error)
            if not isinstance(error, OutOfSlotMemory):  # reported separately
                self._report_unplanned(error)
            raise
        return planned

    def _report_planned(self) -> None:
        if self._has_reported_unplanned:
            log.info("checkpoints of %s are stored again", self._spec.job, extra=self._log_fields())
        self._unplanned_since, self._has_reported_unplanned = None, False

    def _report_unplanned(self, error: Exception) -> None:
        """Report once, from the first of the ranks that are there."""
        now = self._clock.monotonic()
        if self._unplanned_since is None:
            self._unplanned_since = now
        if self._has_reported_unplanned or now - self._unplanned_since < UNPLANNED_WARN_S:
            return
        self._has_reported_unplanned = True
        absent = self._planner.missing_ranks()
        if any(rank not in absent for rank in range(self._member.rank)):
            return
        more = f" and {len(absent) - MAX_SHOWN} more" if len(absent) > MAX_SHOWN else ""
        who = f"; ranks {', '.join(map(str, absent[:MAX_SHOWN]))}{more} have not told what they hold" if absent else ""
        message = (
            f"no checkpoint of {self._spec.job} has been stored for {now - self._unplanned_since:.0f} s, and a loss "
            f"costs the steps since: {error}{who}"
        )
        log.error("%s", message, extra=self._log_fields())
        source = "every rank's word on which tensors it holds, which a plan takes"
        self._send_finding(self._finding(FindingKind.NO_CHECKPOINT, Severity.WARNING, "plan", message, source))

    def _log_fields(self) -> dict[str, object]:
        return {"node": self._member.node, "job": self._spec.job, "generation": self._spec.number}

    def _report_agreed(self) -> None:
        """Report the agreed provision from rank 0, if it is not the best possible or was not before."""
        before, self._reported = self._reported, self._planner.agreed
        if self._member.rank != 0 or self._reported == before:
            return
        spec, agreed = self._spec, self._reported
        where = self._log_fields()
        if not agreed.reason:
            if before is not None and before.reason:
                log.info("there is room for all checkpoint slots again", extra=where)
        elif agreed.short_node or agreed.provision.candidates_only:
            message = (
                _no_memory_message(spec.job, agreed) if agreed.short_node else _fewer_slots_message(spec.job, agreed)
            )
            log.warning("%s", message, extra=where)
            severity = Severity.WARNING if agreed.short_node else Severity.INFO
            source = "the sum of what is planned, on each node of the job"
            self._send_finding(self._finding(FindingKind.MEMORY_LOW, severity, "slots", message, source))
        else:
            log.info(
                "checkpoint slots have no room for the larger share that a loss leaves: %s", agreed.reason, extra=where
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


def _fewer_slots_message(job: str, agreed: AgreedProvision) -> str:
    return (
        f"checkpoints of {job} are in {agreed.provision.slots} slots a rank instead of {SLOTS_PER_RANK}: only "
        "what is to be "
        f"committed is stored, about twice a second, and a loss costs the steps since. {agreed.reason}"
    )


def _no_memory_message(job: str, agreed: AgreedProvision) -> str:
    return (
        f"{agreed.short_node} has no memory for all checkpoints of {job} in {agreed.provision.slots} slots a rank: "
        "training goes on, nothing is committed until there is memory, and the loss of a node costs all steps since "
        f"what was committed last. {agreed.reason}"
    )
