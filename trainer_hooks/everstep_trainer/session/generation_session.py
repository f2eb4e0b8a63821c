"""Run the work around a training function's steps: snapshots, restore and exits from ended generations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from everstep.clock import Clock
from everstep.errors import NotRestorable
from everstep.ids import Version
from everstep.vocabulary import AuditKind, Finding, FindingKind, Mode, Severity
from everstep.wire.v1.directives import VersionNotice
from everstep.wire.v1.local import ToAgent, WrongProduct
from everstep.wire.v1.training import AuditsClean, AuditStatement, FindingRaised, Resumed, SdcMode, SdcPreset
from everstep_trainer.base.interrupt import Interrupter, Regroup
from everstep_trainer.base.progress import StepProgress, total_compile_s
from everstep_trainer.importers.source_agreement import SourceAgreement
from everstep_trainer.restore.overwrites import RestoredValues
from everstep_trainer.restore.restorer import Restoration, make_restore_finding
from everstep_trainer.runtime.directives import ReceivedDirectives
from everstep_trainer.runtime.process_group import GenerationGroup
from everstep_trainer.runtime.regroup_record import RecoveryTally, RegroupRecord
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.compute_kind import compute_kind
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.slot_negotiation import SnapshotOptions
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState

if TYPE_CHECKING:
    from everstep_trainer.importers.importer import CheckpointImport

log = logging.getLogger(__name__)

TALLY_KEY = "tally"  # in the generation's store
CLEAN_REPORT_S = 1.0
"""Minimum seconds between reports of clean audits, one of which can verify a version; each costs the controller."""
CLEAN_REPORT_PER_RANK_S = 0.001
"""The same per rank of the job: 10,000 ranks report every 10 s, a thousand reports a second."""
TALLIES = 64  # about as many ranks share theirs: all know nearly the same

# ---- timeline of a regrouping


class PhaseTimeline:
    """Seconds by phase, in sequence without gaps; their sum is the time from start to finish."""

    def __init__(self, began: float | None = None) -> None:
        self._last = perf_counter() if began is None else began
        self.phases_s: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """Assign the time since the last call (or the start) to ``phase``; repeated phases add up."""
        now = perf_counter()
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + now - self._last
        self._last = now

    def split_off(self, phase: str, parent: str, seconds: float) -> None:
        """Move this many seconds from the finished phase ``parent`` to ``phase``."""
        seconds = min(seconds, self.phases_s[parent])
        if seconds > 0.0:
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds
            self.phases_s[parent] -= seconds


class TrainingSession:
    """The interface that ``Run`` calls from the main thread; stores nothing, as without ``everstep-launch``."""

    def track(self, objects: Mapping[str, object], options: SnapshotOptions) -> int:
        """Restore the objects to the agreed version; return its step (0: from scratch)."""
        return 0

    def before_update(self) -> None:
        """Wait until an optimizer may change tracked state. May raise Regroup."""

    def record_hook_cpu(self, cpu_s: float) -> None:
        """Record CPU seconds that the hooks took of the running step."""

    def plan_steps(self, until: int) -> None:
        """Record the last step that the training function asks for."""

    def on_step_begun(self, step: int) -> None:
        """Record that a step begins."""

    def raise_if_interrupted(self) -> None:
        """Raise Regroup or a collective's error again if training code caught it, before a step counts as finished."""

    def on_step_finished(self, step: int) -> None:
        """Record that a step is finished and snapshot the tracked state. May raise Regroup."""

    def on_steps_ended(self, step: int) -> None:
        """Record that ``step`` was the last one: what follows is the work after the loop."""

    def report_loss(self, loss: torch.Tensor | float) -> None:
        """Report the loss of the running step."""

    def report_loss_refused(self, data_step: int, message: str) -> None:
        """Report once that the loss guard refused an update, on all ranks."""

    def share_tally(self) -> None:
        """Tell other ranks the last finished step and lost seconds that this process knows of."""

    def take_regroup_record(self) -> RegroupRecord | None:
        """Return the record of this generation's regroup once, after its first finished step; else None."""
        return None

    def record_wait(self, seconds: float) -> None:
        """Record seconds of the running step that this rank waited for others in a collective."""

    @property
    def sdc_preset(self) -> SdcPreset:
        """How thoroughly the job audits its work, unless the training function says otherwise."""
        return "off"

    @property
    def sdc_mode(self) -> SdcMode:
        """What follows from a difference that audits find."""
        return "enforce"

    @property
    def audits_off(self) -> Collection[AuditKind]:
        """Audits that the controller has switched off for this job, because the program makes them differ."""
        return ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """The node of each rank; empty without Everstep."""
        return ()

    @property
    def running_buffers(self) -> Collection[str]:
        """Names of non-persistent buffers that ``track`` has restored."""
        return ()

    def report_mismatch(self, mismatch: Mismatch) -> None:
        """Report what this rank computed for an audit that found a difference."""

    def keep_wrong_product(self, product: WrongProduct) -> None:
        """Have this node keep a product that this rank computed wrongly, for later diagnostics."""

    def report_clean_audits(self, step: int) -> None:
        """Report that all parts of this rank's work were checked once in the steps after ``step``."""

    def atomic(self) -> AbstractContextManager[None]:
        """Return a section in which no Regroup is raised from outside."""
        return nullcontext()

    def alone(self, name: str, limit_s: float | None) -> AbstractContextManager[None]:
        """Return a section in which this rank works while others may wait for it."""
        return nullcontext()


@dataclass(eq=False)
class GenerationSession(TrainingSession):
    """Snapshots and restores one rank's state through one generation."""

    group: GenerationGroup
    directives: ReceivedDirectives
    progress: StepProgress
    interrupter: Interrupter
    connect_vault: Callable[[], VaultClient]  # called once state is tracked or certain to be
    send: Callable[[ToAgent], None]
    timeline: PhaseTimeline | None  # of the regrouping; ends with the first finished step
    clock: Clock
    start_from: str = ""  # checkpoint on storage, used if nothing else is restorable; empty for none
    on_first_step: Callable[[], object] | None = None  # called once, after the first finished step was reported
    tally: RecoveryTally = field(default_factory=RecoveryTally)  # of the process, over all its generations
    equal_moments: set[str] = field(default_factory=set)  # the same: optimizer state that ranks were seen to hold alike

    def __post_init__(self) -> None:
        self._spec = self.group.spec
        self._compiled_before_s = total_compile_s()
        self._snapshotter: Snapshotter | None = None
        self._restored: Version | None = None
        self._restored_step = 0
        self._shares_tally = False
        self._regroup_record: RegroupRecord | None = None
        self._phases_before_step: dict[str, float] = {}  # of a regrouping that ended before any step
        self._restoration: Restoration | None = None
        self._restored_values: RestoredValues | None = None
        self._running_buffers: frozenset[str] = frozenset()
        self._next_clean_report_at = 0.0
        if self._spec.restore.floor is not None:  # a committed version is restored for certain
            self._restoration = self._new_restoration()
            self._restoration.start()

    def track(self, objects: Mapping[str, object], options: SnapshotOptions) -> int:
        """Restore and track the objects; see `TrainingSession`. Raises ValueError on a second call."""
        if self._snapshotter is not None:
            raise ValueError("run.track was called twice in this generation: name everything in one call")
        self._end_phase("build")
        group, vault, state = self.group, self.connect_vault(), TrackedState(objects, options.exclude)
        restoration = self._restoration = self._restoration or self._new_restoration()
        result = restoration.fill(state, self.report_mismatch if options.audits_copies else None)
        self._restored, step = result.version, result.step
        if result.version is None:
            step = self._start_from_storage(objects, state)
        self._end_phase("restore")
        self._snapshotter = Snapshotter(
            vault,
            state,
            group.spec,
            group.member,
            group.store,
            self.send,
            restored=result.version,
            stored_step=step,
            options=options,
            clock=self.clock,
            is_over=self._is_over,
            on_mismatch=self.report_mismatch,
            kind=compute_kind(self.group.device),
            equal_moments=self.equal_moments,
        )
        self.progress.resume_from(step)
        self._restored_step = step
        if step:
            self._restored_values = RestoredValues(state)
            self._running_buffers = frozenset(state.running_buffers)
        self._snapshotter.first_plan.wait()
        self._end_phase("plan")
        return step

    def _start_from_storage(self, objects: Mapping[str, object], state: TrackedState) -> int:
        """Restore from the job's stored checkpoints or its starting checkpoint; return the step, 0 without either."""
        group, rule = self.group, self._spec.restore
        rank, world = group.member.rank, group.spec.world_size

        def read(url: str) -> CheckpointImport:
            # imported here: this takes longer than a regrouping
            from everstep_trainer.importers.importer import read_checkpoint

            return read_checkpoint(url, objects, state, rank, world)

        places = (rule.storage_url, *rule.older_storage_urls) if rule.storage_url else (self.start_from,)
        choice = SourceAgreement(group.store, rank, world, self.clock, self._stored_unusable)
        try:
            return choice.load([place for place in places if place], read)
        except NotRestorable as error:
            if not rule.storage_url:
                raise
            advice = "give another --job or --spill-to, or --fresh, which starts anew in a new folder"
            raise NotRestorable(
                f"{error}. If this is another job's checkpoint, {advice}. Nothing was deleted"
            ) from error

    def _stored_unusable(self, url: str, reason: str) -> None:
        finding = make_restore_finding(
            self._spec,
            self.clock,
            FindingKind.STORAGE_CORRUPT,
            url,
            reason,
            fallback="an earlier checkpoint is used if there is one",
            source="digests and checksums of data read from storage",
            evidence={"rank": str(self.group.member.rank)},
        )
        self.send(finding)

    def _new_restoration(self) -> Restoration:
        group = self.group
        return Restoration(
            self.connect_vault(), group.spec, group.member, group.store, on_finding=self.send, clock=self.clock
        )

    def before_update(self) -> None:
        self._raise_if_over()  # first, while the state is still consistent
        if self._snapshotter is not None:
            with self.interrupter.atomic():  # shares a condition with the copier's thread
                self._snapshotter.wait()
        self._raise_if_over()

    def record_hook_cpu(self, cpu_s: float) -> None:
        if self._snapshotter is not None:
            self._snapshotter.record_hook_cpu(cpu_s)

    def plan_steps(self, until: int) -> None:
        self.progress.plan(until)
        if self._snapshotter is not None:
            self._snapshotter.mark_loop_ended(False)  # another loop follows
        from_storage = self._restored is None and self._restored_step >= until
        if from_storage and self._restored_step and self.group.member.rank == 0:
            message = "step %d is restored from storage, and training ends at step %d: nothing is left to train (raise "
            log.warning(message + "the number of steps, or start anew with --fresh)", self._restored_step, until)

    def on_step_begun(self, step: int) -> None:
        self.progress.begin_step(step)
        values, self._restored_values = self._restored_values, None
        if values is not None:
            rank = self.group.member.rank
            log_fields = {"generation": self._spec.number, "rank": rank}
            level = logging.INFO if rank else logging.WARNING  # all ranks load alike
            values.warn_if_overwritten(self._restored_step, log_fields, level=level)

    def raise_if_interrupted(self) -> None:
        self.interrupter.raise_if_interrupted()

    def on_step_finished(self, step: int) -> None:
        with self.interrupter.atomic():
            self.progress.finish_step(step)
            if self._snapshotter is not None:
                self._snapshotter.begin(step)
                self.progress.snapshot_every = self._snapshotter.interval_at(step)
                self.progress.are_cores_full = self._snapshotter.are_cores_full
            phases_s = self._report_resumed(step) if self.timeline is not None else self._phases_before_step
            if phases_s and self._spec.number > 1:
                self._record_regroup(step, phases_s)
            self._phases_before_step = {}
            self.tally.finish_step(step, self.clock.wall())
        self._raise_if_over()

    def on_steps_ended(self, step: int) -> None:
        self.progress.end_steps(step)
        if self._snapshotter is not None:
            self._snapshotter.mark_loop_ended(True)
        if self.timeline is not None:  # no step was left here; a second loop may have some
            self._phases_before_step = self._report_resumed(step)

    def report_loss(self, loss: torch.Tensor | float) -> None:
        self.progress.loss.update(loss)

    def report_loss_refused(self, data_step: int, message: str) -> None:
        spec = self._spec
        if self.group.member.rank == 0:
            finding = Finding(
                kind=FindingKind.RANK_LOSS,
                subject=f"{spec.job}/g{spec.number}/step{self.progress.finished_step + 1}",
                severity=Severity.INFO,
                message=f"job {spec.job}: {message}",
                mode=Mode.OBSERVE,
                source="run.guard",
                since=self.clock.wall(),
                evidence={"data_step": str(data_step)},
            )
            self.send(FindingRaised(finding=finding, job=spec.job))

    def share_tally(self) -> None:
        rank, apart = self.group.member.rank, max(1, self._spec.world_size // TALLIES)
        if self._spec.number == 1 or self._shares_tally:
            return
        self._shares_tally = True
        if self.tally.last_step and rank % apart == 0:
            store: Any = self.group.store  # its stub lacks ``append``
            with suppress(RuntimeError, AttributeError):  # the store is gone, and this generation with it
                store.append(TALLY_KEY, self.tally.entry())

    def take_regroup_record(self) -> RegroupRecord | None:
        record, self._regroup_record = self._regroup_record, None
        return record

    def record_wait(self, seconds: float) -> None:
        self.progress.record_wait(seconds)

    @property
    def sdc_preset(self) -> SdcPreset:
        return self._spec.spec.sdc

    @property
    def sdc_mode(self) -> SdcMode:
        return self._spec.spec.sdc_mode

    @property
    def audits_off(self) -> Collection[AuditKind]:
        return self._spec.audits_off

    @property
    def running_buffers(self) -> Collection[str]:
        return self._running_buffers

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._spec.node_of(rank) for rank in range(self._spec.world_size))

    def report_mismatch(self, mismatch: Mismatch) -> None:
        log.log(
            logging.WARNING if mismatch.clears_owner else logging.ERROR,
            "audit %s of step %d: %s of rank %d %s%s",
            mismatch.audit,
            mismatch.step,
            mismatch.unit,
            mismatch.owner,
            "are those of its samples" if mismatch.clears_owner else "differs",
            f" ({mismatch.difference})" if mismatch.difference else "",
            extra={"generation": self._spec.number, "rank": self.group.member.rank},
        )
        self.send(
            AuditStatement(
                job=self._spec.job,
                at=self.clock.wall(),
                generation=self._spec.number,
                rank=self.group.member.rank,
                kind=compute_kind(self.group.device),
                **msgspec.structs.asdict(mismatch),
            )
        )

    def keep_wrong_product(self, product: WrongProduct) -> None:
        self.send(product)

    def report_clean_audits(self, step: int) -> None:
        spec, rank, now = self._spec, self.group.member.rank, self.clock.monotonic()
        if now < self._next_clean_report_at:  # a later report says more
            return
        self._next_clean_report_at = now + max(CLEAN_REPORT_S, spec.world_size * CLEAN_REPORT_PER_RANK_S)
        self.send(AuditsClean(job=spec.job, at=self.clock.wall(), generation=spec.number, rank=rank, step=step))

    @contextmanager
    def atomic(self) -> Iterator[None]:
        with self.interrupter.atomic(), self.progress.section("run.atomic()"):
            yield

    def alone(self, name: str, limit_s: float | None) -> AbstractContextManager[None]:
        return self.progress.section(name, limit_s)

    def handle_versions(self, notice: VersionNotice) -> None:
        """Update, on the signal thread, which version is committed and which may be next."""
        snapshotter = self._snapshotter  # ``close`` resets it
        if snapshotter is not None and notice.generation == self._spec.number:
            snapshotter.update_versions(notice.committed, notice.candidate, notice.pinned, notice.compared_ranks)

    def close(self, rescue_wait_s: float | None = None) -> None:
        """End this generation's snapshots; complete one that has begun. ``rescue_wait_s``: see `Snapshotter.close`. All
        tracked objects are released: the garbage collector does not see their cycle through DistributedDataParallel's
        hook in C++."""
        if self._restoration is not None:
            self._restoration.close()
        snapshotter, self._snapshotter, self._restoration = self._snapshotter, None, None
        if snapshotter is not None:
            snapshotter.close(finish=True, rescue_wait_s=rescue_wait_s)

    def _is_over(self) -> bool:
        return self.directives.is_generation_over(self._spec.number, self.progress.finished_step)

    def _raise_if_over(self) -> None:
        if self._is_over():
            over = Regroup()
            self.interrupter.record_interruption(over)
            raise over

    def _end_phase(self, phase: str) -> None:
        if self.timeline is not None:
            self.timeline.end(phase)

    def _record_regroup(self, step: int, phases_s: Mapping[str, float]) -> None:
        """Record the regroup for callbacks; every rank has shared its tally before it began the step."""
        store = self.group.store
        if self._shares_tally and (self.group.member.rank == 0 or not self.tally.last_step):
            with suppress(RuntimeError):  # as in share_tally
                if store.check([TALLY_KEY]):  # a missing key would be waited for
                    self.tally.merge(store.get(TALLY_KEY).decode())
        now = self.clock.wall()
        self._regroup_record = self.tally.record(self._spec, self._restored_step, step, now, phases_s)

    def _report_resumed(self, step: int) -> dict[str, float]:
        """Report the end of the regrouping, with the first finished step; return its phases."""
        self._end_phase("first_step")
        assert self.timeline is not None
        compiled_s = total_compile_s()
        if compiled_s >= self._compiled_before_s:  # less after a torch.compiler.reset
            compiled_s -= self._compiled_before_s
        self.timeline.split_off("compile", "first_step", compiled_s)
        phases, self.timeline = self.timeline.phases_s, None
        self._restoration = None  # only now: unmapping the slots takes a millisecond
        self.send(
            Resumed(
                job=self._spec.job,
                at=self.clock.wall(),
                trace=self._spec.trace,
                generation=self._spec.number,
                rank=self.group.member.rank,
                step=step,
                restored=self._restored,
                phases_s=phases,
                finished_step=self.progress.finished_before or None,
            )
        )
        if self.on_first_step is not None:
            self.on_first_step()
        return phases
