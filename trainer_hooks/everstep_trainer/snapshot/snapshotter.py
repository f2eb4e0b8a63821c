"""Snapshot a rank's state: the training thread says when the state is consistent, a copier thread does the rest.

``begin`` waits until the previous snapshot is hashed and sealed, which usually happened long before. The copy runs
beside the next forward and backward pass, after the replication of the previous snapshot (for a second at most).
``wait``, before the next optimizer step, blocks until the bytes are in the slot. If a rank is lost before it has sealed
a copied slot, its vault seals it (docs/decisions/0008). A small share, copied sooner than another thread wakes up, is
copied by ``begin`` itself (docs/decisions/0039). Changes without ``wait`` are detected (job.py). What is still unstored
when the generation ends is stored from the live state, also for dead ranks (live_rescue.py).

No failure in here reaches the training loop: a snapshot that cannot be made is skipped, with a warning that says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from time import thread_time

import msgspec
from torch._C._distributed_c10d import Store

from everstep.clock import Clock
from everstep.errors import EverstepError, OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.segment_header import FinishedStep
from everstep.layout.slot_header import SlotHeader
from everstep.system_clock import SYSTEM_CLOCK
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Member, VersionSealed
from everstep_trainer.base.core_contention import CoreContention
from everstep_trainer.base.interrupt import WAIT_SLICE_S
from everstep_trainer.sdc.audit import Mismatch
from everstep_trainer.sdc.copy_audit import CopyAudit
from everstep_trainer.slots.copy import SnapshotSources, write_blob
from everstep_trainer.slots.layout_exchange import ROUND_CHECK_S, LayoutExchange, PythonStateComparison
from everstep_trainer.slots.vault_client import VaultClient
from everstep_trainer.snapshot.differing_parameters import ParameterComparison
from everstep_trainer.snapshot.job import FilledSlot, MutationGuard, OneShotSignal, SnapshotJob, SnapshotPhase
from everstep_trainer.snapshot.live_rescue import RESCUE_WAIT_S, LiveRescue, StoringLocks, is_stored, store_live
from everstep_trainer.snapshot.moments import MomentComparison, moment_digests
from everstep_trainer.snapshot.pace import SnapshotPace, StepStopwatch
from everstep_trainer.snapshot.planner import ActivePlan, PlanManager, SnapshotPlanner, TensorScan
from everstep_trainer.snapshot.reports import SealReporter
from everstep_trainer.snapshot.retention import VersionRetention
from everstep_trainer.snapshot.slot_negotiation import DEFAULT_OPTIONS, SnapshotOptions
from everstep_trainer.state.tracked_state import TrackedState

log = logging.getLogger(__name__)

PLAN_WAIT_S = 2.0  # longest time that ``wait`` lets a snapshot be planned before training goes on without it
PLAN_TIMEOUT_S = 10.0
"""Time for making a plan, without training waiting: ranks that change at different steps meet in it."""
RETRY_S = 5.0
"""Seconds without snapshots after a plan failed, so that training does not stop for each attempt; and of warnings."""
FINISH_TIMEOUT_S = 20.0
"""Longest wait for the last copy when a generation ends, which may still have to make slots or to copy gigabytes. Other
ranks wait for a late one in the rendezvous for ``join_timeout_s``."""
MAX_HASH_DELAY_S = 0.05
"""Longest pause before a copy on the CPU is hashed: the first to finish must not slow ranks still copying."""
COPIER_POLL_S = 0.1
"""Interval at which the copier looks for snapshots that the training thread copied itself: it is not woken for them
before ``wait``. A shorter one took more CPU time of small models than the snapshots."""


class Snapshotter:
    """Snapshots of one rank in one generation. ``send_report`` is called from another thread. Version ``restored`` is
    kept until two newer ones are sealed; without it, training starts after ``stored_step``. Once ``is_over``, errors
    from the store are not reported. ``on_mismatch`` is called from another thread with a copy that differs from what
    was copied. ``kind``: what the rank computes with (``sdc.compute_kind``). ``equal_moments``: names of optimizer
    state that earlier generations found equal on all ranks; those of this one are added."""

    def __init__(
        self,
        vault: VaultClient,
        state: TrackedState,
        spec: GenerationSpec,
        member: Member,
        store: Store,
        send_report: Callable[[VersionSealed | FindingRaised], None],
        *,
        restored: Version | None = None,
        stored_step: int = 0,
        options: SnapshotOptions = DEFAULT_OPTIONS,
        clock: Clock = SYSTEM_CLOCK,
        is_over: Callable[[], bool] = lambda: False,
        on_mismatch: Callable[[Mismatch], None] | None = None,
        kind: str = "",
        equal_moments: set[str] | None = None,
    ) -> None:
        self._is_over, self._state = is_over, state
        self._copy_audit: CopyAudit | None = None
        if on_mismatch is not None and options.copy_audits is not None:
            self._copy_audit = CopyAudit(member.rank, options.copy_audits, on_mismatch, clock)
        self._spec, self._member = spec, member
        self._reports = SealReporter(vault, spec, member, send_report, clock, kind)
        self._options, self._clock = options, clock
        self._log_fields = {"node": member.node, "job": spec.job, "generation": spec.number}
        self._stop = threading.Event()
        self._wanted = threading.Event()
        self._changed = threading.Condition()
        self._queued: SnapshotJob | None = None
        self._last: SnapshotJob | None = None
        self._unchanged_job: SnapshotJob | None = None
        self._live: SnapshotJob | None = None  # of the last finished step, until an update may begin
        self._has_searched = False  # for tensors that are new after the last finished step
        self._locks: StoringLocks | None = None
        self._mutation_guard = MutationGuard(bool(state.optimizers), self._log_fields, is_needed=state.changes_in_place)
        self._closing = False
        self._retention = VersionRetention(spec.number, spec.restore, restored, stored_step)
        contention = CoreContention(sum(other.node == member.node for other in spec.roster), clock)
        interval = 1 if options.candidates_only else options.interval
        self._pace = SnapshotPace(store, member.rank, interval, options.budget, contention)
        self._comparison = PythonStateComparison(store, member.rank, spec.world_size, self._log_fields)
        known = set() if equal_moments is None else equal_moments
        self._moments = MomentComparison(
            store, member.rank, spec.world_size, clock, self._stop, is_over, self._log_fields, known
        )
        self._parameters = ParameterComparison(store, member.rank, clock, self._stop, is_over, kind, self._log_fields)
        self._stopwatch = StepStopwatch(self._pace.record_step if self._pace.fixed_interval is None else None, clock)
        self._retry_at = self._warn_at = float("-inf")
        self._exchange = LayoutExchange(store, member.rank, spec.world_size, clock, self._stop)
        planner = SnapshotPlanner(
            vault, spec, member, self._exchange, PLAN_TIMEOUT_S, options, self._retention.versions_to_carry
        )
        self._plans = PlanManager(planner, spec, member, self._retention, send_report, options, clock)
        self.first_plan = self._plans.first_plan
        self._sources: SnapshotSources | None = None
        self._scan: TensorScan | None = None
        self._begun_step = 0
        self._finished = FinishedStep(spec.number, 0 if restored is None else restored.step, member.rank)
        self._mark_lock = threading.Lock()
        if state.is_complete():
            self._scan = self._rescan(0)
        self._thread = threading.Thread(target=self._run, name="everstep-copier", daemon=True)
        self._thread.start()

    # --- for the training thread

    def begin(self, step: int) -> None:
        """Snapshot the state after ``step``, if it is stored, once the previous snapshot is sealed; no changes before
        ``wait`` returns. Waits for the copy, so that the step outlives this process, if state is sharded or unshared
        and not overlapped, or changes without ``wait``. Raises TypeError if tracked state cannot be stored."""
        self._finished = msgspec.structs.replace(self._finished, step=step, loop_ended=False)
        self._mark_finished()
        self._pace.end_step(step)
        self._stopwatch.end_step(() if self._scan is None else self._scan.gpus)
        is_due = self._retention.is_candidate(step) or (not self._plans.candidates_only and self._pace.is_due(step))
        with self._stopwatch.blocked(has_snapshot=is_due):
            self._begin(step, is_due)

    def record_hook_cpu(self, cpu_s: float) -> None:
        """Record CPU time that the hooks took of the running step on this thread."""
        self._pace.record_hook_cpu(cpu_s)

    def mark_loop_ended(self, loop_ended: bool) -> None:
        """Note whether the loop has ended with the last finished step, so that only the work after it is left."""
        if self._finished.loop_ended is not loop_ended:
            self._finished = msgspec.structs.replace(self._finished, loop_ended=loop_ended)
            self._mark_finished()

    def _mark_finished(self) -> None:
        """Note in the segment how far this rank is: others store the version even if it died at the step's end."""
        with self._mark_lock:  # the copier's thread opens segments
            if (planned := self._plans.current) is not None:
                planned.segment.view.mark_finished(self._finished)

    @property
    def are_cores_full(self) -> bool:
        """Whether this rank's training waits for cores, so that any other work takes them from it."""
        return self._pace.are_cores_full

    def interval_at(self, step: int) -> int:
        """Return the number of steps between snapshots at ``step``; 0 if only versions to be committed are stored."""
        return 0 if self._plans.candidates_only else self._pace.interval_at(step)

    def _begin(self, step: int, is_due: bool) -> None:
        """Snapshot the state, or only note what it takes to store it should the generation end (not ``is_due``)."""
        self._begun_step = step  # before the current plan is read
        self._live = None
        if self._last is not None and not self._last.done.is_set():  # else a wake-up would only take a core
            self._wanted.set()
            with self._changed:
                self._changed.notify_all()
            self._await(self._last, self._last.done)  # so that no rank is two sealed versions behind another
        self._has_searched = is_due or self._scan is None  # else it is done when the generation ends
        if self._scan is None or (is_due and not self._state.is_unchanged()):
            self._scan = self._rescan(step)
        sources = self._fitting_sources(self._scan)
        sources.stage()
        version, overlap = Version(self._spec.number, step), self._options.overlap
        if not is_due or self._clock.monotonic() < self._retry_at:
            self._live = SnapshotJob(version, self._scan, sources, self._state.capture(), overlap)
            self._live.record_writes()
            return
        # what a GPU copies later may change before it is compared with other ranks
        is_compared = not self._moments.has_begun or (self._retention.is_candidate(step) and self._parameters.is_due)
        hold = self._mutation_guard.must_block() or (sources.is_on_gpu and is_compared)
        job = self._live = SnapshotJob(version, self._scan, sources, self._state.capture(), overlap, must_block=hold)
        small = self._plan_if_small(job)
        if small is None or small.other_shares is not None:
            job.record_writes()
        with self._changed:
            if self._closing:
                return
            self._last = self._unchanged_job = job
            self._wanted.clear()
            if small is None:
                self._queued = job
                self._changed.notify_all()
        if small is not None:
            job.may_change = True  # once it is copied this thread may continue
            self._fill_at_once(job, small)
        elif job.blocks_training:
            self._await(job, job.copied)
            job.may_change = True

    def _plan_if_small(self, job: SnapshotJob) -> ActivePlan | None:
        """Return the plan under which the training thread copies this snapshot itself, without the copier, or None."""
        planned = self._plans.plan_for(job.scan)
        if planned is None or not planned.fits(job.blob.max_bytes) or job.version.step < planned.since_step:
            return None
        digested = planned.share.digest_groups and (
            self._retention.is_candidate(job.version.step) or self._digest_due(job)
        )
        others = job.sources.is_on_gpu or digested or self._options.overlap or self._reports.is_copying
        return planned if planned.is_small and not others else None

    def _fill_at_once(self, job: SnapshotJob, planned: ActivePlan) -> None:
        try:
            self._attempt(partial(self._fill, job, planned), f"snapshot step {job.version.step}")
        finally:  # also if the generation ended in between
            with self._changed:
                if job.phase is SnapshotPhase.COPIED and not self._closing:
                    self._queued = job  # without a wake-up, which would take the core or Python's lock from training
                else:
                    self._end(job)

    def wait(self) -> None:
        """Block until the last ``begin``'s copy is done; returns without it if the generation ended, or after
        PLAN_WAIT_S. Raises OutOfSlotMemory if that prevents a plan and checkpoints are required."""
        self._live = None
        last = self._last
        if last is not None and (last.sources.is_on_gpu or not last.copied.is_set()):
            with self._stopwatch.blocked():
                self._await(last, last.copied)
                last.sources.mover.order_before_step()
        if self._queued is not None:  # copied by this thread: the copier has only to seal it
            with self._changed:
                self._changed.notify_all()
        self._mutation_guard.allow_changes(self._unchanged_job)
        self._unchanged_job = None
        self.first_plan.raise_if_failed()

    def _await(self, job: SnapshotJob, event: OneShotSignal) -> None:
        deadline = self._clock.monotonic() + PLAN_WAIT_S
        while not event.wait(WAIT_SLICE_S):
            if self._clock.monotonic() > deadline and self._give_up(job):
                break

    def update_versions(
        self,
        committed: Version | None,
        candidate: int | None,
        pinned: Iterable[Version] = (),
        compared_ranks: Iterable[int] = (),
    ) -> None:
        """Apply the controller's notice; see VersionRetention and ParameterComparison."""
        self._parameters.request(compared_ranks)
        if self._retention.update(committed, candidate, pinned):
            self._exchange.handle_commit()

    def close(self, finish: bool, *, rescue_wait_s: float | None = RESCUE_WAIT_S) -> None:
        """End the generation for this rank.

        Args:
            finish: Whether the state does not change meanwhile, so that a copy that has begun is completed and sealed
                (within FINISH_TIMEOUT_S). Otherwise only a finished copy is sealed.
            rescue_wait_s: With ``finish``, what this rank and dead ranks of its node have not stored of the last
                finished step is stored now; it waits so many seconds for others to store or to end. None: not stored,
                since no rank is lost.
        """
        with self._changed:
            self._closing = True
            if not finish:
                if self._queued is not None and self._queued.phase is SnapshotPhase.QUEUED:
                    self._queued = None
                if self._last is not None and self._last.phase in (SnapshotPhase.QUEUED, SnapshotPhase.COPYING):
                    self._end(self._last)
            self._changed.notify_all()
        self._stop.set()
        self._wanted.set()
        self._reports.close()
        self._thread.join(timeout=FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("the last copy did not end in %.0f s: abandoned", FINISH_TIMEOUT_S, extra=self._log_fields)
            return
        job = self._live if finish and rescue_wait_s is not None else None
        planned = None
        if job is not None and job.is_unchanged() and (self._has_searched or self._state.is_unchanged()):
            planned = self._plans.plan_for(job.scan)
        if job is not None and not self._moments.are_known_equal(job.scan.tensors):
            planned = None  # this rank's optimizer state must not stand for another's
        if job is None or planned is None or job.version.step < planned.since_step:
            self._release_lock()
            return
        self._attempt(partial(self._store_late, job, planned), f"store step {job.version.step}", at_end=True)
        self._release_lock()
        if rescue_wait_s is not None:
            self._rescue_others(job, planned, rescue_wait_s)

    def _rescan(self, step: int) -> TensorScan:
        """Search for the tensors again."""
        tensors = self._state.tensors()
        layout = self._state.layout(tensors, self._member.rank, self._spec.world_size)
        self._sources = None
        return self._plans.make_scan(tensors, layout, self._scan, step)

    def _fitting_sources(self, scan: TensorScan) -> SnapshotSources:
        """Return views for the planned share; before there is a plan, of everything that must be staged."""
        planned = self._plans.plan_for(scan)
        share = None if planned is None else planned.share
        if self._sources is None or self._sources.share is not share:
            other_shares = None if planned is None else planned.other_shares
            self._sources = SnapshotSources(scan.tensors, share, () if other_shares is None else other_shares.parts)
        return self._sources

    def _give_up(self, job: SnapshotJob) -> bool:
        """Give up a snapshot that is not being copied yet. Return False if it is: then its bytes must be waited for."""
        with self._changed:
            if job.phase in (SnapshotPhase.COPYING, SnapshotPhase.COPIED):
                return False
            self._end(job)
            self._retry_at = self._clock.monotonic() + RETRY_S
        step, change = job.version.step, job.scan.change
        reason = f" (tracked tensors changed here, so all ranks make a new plan: {change})" if change else ""
        log.warning("no snapshot of step %d: it could not be planned in time%s", step, reason, extra=self._log_fields)
        return True

    # --- for the copier thread

    def _run(self) -> None:
        if self._scan is not None:
            self._attempt(partial(self._plan, self._scan, 0, 0), "plan snapshots")
        self.first_plan.mark_attempted()
        while (job := self._next()) is not None:
            began_s = thread_time()
            self._attempt(partial(self._snapshot, job), f"snapshot step {job.version.step}")
            if not self._plans.candidates_only:
                self._attempt(partial(self._pace.agree, job.version.step), "agree on how often to snapshot")
            if job.filled is not None:
                compare = partial(self._comparison.compare, job.version.step, job.scan.layout, job.blob)
                self._attempt(compare, "compare the Python state of ranks")
            self._pace.record_copy(thread_time() - began_s)
            with self._changed:
                self._end(job)

    def _attempt(self, work: Callable[[], object], label: str, at_end: bool = False) -> None:
        """Run ``work``; log a failure, unless the generation is ending, and go on. ``at_end``: log it even then."""
        try:
            work()
        except (EverstepError, RuntimeError, OSError, ValueError) as error:
            now = self._clock.monotonic()
            if at_end or (not self._closing and not self._is_over() and now >= self._warn_at):
                self._warn_at = now + RETRY_S
                is_known = isinstance(error, OutOfSlotMemory) and self._plans.has_reported_lack
                level = logging.DEBUG if is_known else logging.WARNING
                log.log(level, "cannot %s; training continues: %s", label, error, extra=self._log_fields)

    def _next(self) -> SnapshotJob | None:
        """Return the next job; until there is one, follow other ranks' new plans."""
        while True:
            self._attempt(self._replan_with_others, "make a new plan with the other ranks")
            with self._changed:
                if self._queued is None and not self._closing:
                    planned = self._plans.current
                    self._changed.wait(COPIER_POLL_S if planned is not None and planned.is_small else ROUND_CHECK_S)
                if self._queued is not None or self._closing:
                    job, self._queued = self._queued, None
                    return job

    def _replan_with_others(self) -> None:
        """Plan anew together with other ranks, for steps that have not begun."""
        if self._plans.is_superseded() and self._scan is not None:
            self._plan(self._scan, self._plans.blob_bytes, self._begun_step + 1)

    def _end(self, job: SnapshotJob) -> None:
        job.phase = SnapshotPhase.OVER
        job.copied.set()
        job.done.set()

    def _advance(self, job: SnapshotJob, before: SnapshotPhase, after: SnapshotPhase) -> bool:
        """Move a job to the next phase, unless it was given up meanwhile."""
        with self._changed:
            if job.phase is not before:
                return False
            job.phase = after
            return True

    def _plan(self, scan: TensorScan, blob_bytes: int, since: int) -> ActivePlan:
        try:
            planned = self._plans.make_plan(scan, blob_bytes, since)
        except Exception:
            self._retry_at = self._clock.monotonic() + RETRY_S
            raise
        self._retry_at = float("-inf")
        self._hold_lock(planned)
        self._mark_finished()
        return planned

    def _snapshot(self, job: SnapshotJob) -> None:
        if job.phase is SnapshotPhase.QUEUED:
            step = job.version.step
            planned = self._plan(job.scan, job.blob.max_bytes, step)
            # the step may have just become the candidate
            lean = self._plans.candidates_only and not self._retention.is_candidate(step)
            if step >= planned.since_step and not lean:
                self._fill(job, planned)
        if job.filled is not None:
            self._seal(job, job.filled)

    def _fill(self, job: SnapshotJob, planned: ActivePlan) -> None:
        view, manifest = planned.segment.view, planned.manifest
        slot = self._slot(planned)
        payload = view.begin(slot, self._member.rank, job.version, planned.manifest_bytes, manifest.payload_bytes)
        if not self._advance(job, SnapshotPhase.QUEUED, SnapshotPhase.COPYING):
            return
        job.is_candidate = self._retention.is_candidate(job.version.step)
        began = self._clock.monotonic()
        if not job.sources.is_on_gpu:
            write_blob(payload, manifest, job.blob.data())  # first, since it may be hashed together with the tensors
        targets, audit = planned.slot_targets(slot), self._copy_audit if job.is_candidate else None
        if audit is not None and not audit.begin(job.version.step, is_on_gpu=job.sources.is_on_gpu):
            audit = None
        sources, share = job.sources, planned.share
        copied = sources.copy(share, targets, digest=self._digest_due(job), audit=audit is not None)
        job.was_copied = True
        if not self._advance(job, SnapshotPhase.COPYING, SnapshotPhase.COPIED):
            return
        if not job.blocks_training and job.sources.is_on_gpu:
            job.copied.set()  # the next step is ordered behind the copy
        job.sources.mover.finish()
        if torn := job.torn_parameters(share, copied, targets):
            self._mutation_guard.discard(job, torn)
        if self._mutation_guard.changed_before_allowed(job):
            return
        if audit is not None and not audit.is_right(job.version, copied, targets, partial(sources.digest, share)):
            view.discard(slot)
            return
        if job.sources.is_on_gpu:
            write_blob(payload, manifest, job.blob.data())
        if self._moments.is_due(planned.round_number) and (job.blocks_training or not sources.is_on_gpu):
            job.moment_digests = moment_digests(job.scan.tensors)
            job.needs_comparison = not self._moments.are_known_equal(job.scan.tensors)
        if job.is_candidate and self._parameters.is_due and (job.blocks_training or not sources.is_on_gpu):
            job.parameter_digests = sources.parameter_digests(share)
        if not job.needs_comparison:  # else the vault would seal it if this rank died now
            view.mark_copied(slot)
        slot_digests = planned.slot_digests(copied.chunks)
        job.filled = FilledSlot(planned, slot, copied.digests, slot_digests, self._clock.monotonic() - began)
        job.copied.set()

    def _seal(self, job: SnapshotJob, filled: FilledSlot) -> None:
        view = filled.planned.segment.view
        if not job.sources.is_on_gpu and filled.slot_digests is None:
            self._wanted.wait(min(MAX_HASH_DELAY_S, filled.copy_s))
        # by an operation that began before the copy and was counted when it ended
        if self._mutation_guard.changed_before_allowed(job):
            view.discard(filled.slot)
            return
        if job.moment_digests is not None:
            number = filled.planned.round_number
            own = self._moments.differing(number, job.version.step, job.moment_digests)
            if own:
                self._state.store_per_rank(own)
            if own or (own is None and job.needs_comparison):
                view.discard(filled.slot)
                return
        view.seal(filled.slot, filled.slot_digests)
        if job.is_candidate:
            self._retention.keep_candidate(job.version)
        needed: Iterable[Version] = ()
        if filled.planned.manifest.exclusive_bytes:
            needed = self._retention.needed_in_copies(view.headers(), self._pace.is_due)
        differing = ""
        if job.parameter_digests is not None:
            differing = self._parameters.differing(job.version.step, job.parameter_digests)
        self._reports.replicate_and_report(job, filled, needed, differing)

    def _store_late(self, job: SnapshotJob, planned: ActivePlan) -> None:
        """Store this rank's share of the last finished step, if no copy of it was made."""
        view, blob = planned.segment.view, job.blob.data()
        if not job.was_copied and planned.fits(len(blob)) and not is_stored(view, self._member.rank, job.version):
            slot = self._slot_for_rescue(view.headers())
            store_live(view, slot, self._member.rank, planned.manifest, blob, planned.share, job)

    def _rescue_others(self, job: SnapshotJob, planned: ActivePlan, wait_s: float) -> None:
        """Store the last finished step for ranks of this node that cannot, beginning with the next one."""
        if planned.other_shares is None or self._locks is None:
            return
        ranks = sorted(planned.other_shares.shares, key=lambda rank: (rank < self._member.rank, rank))
        folder = Path(planned.segment.path).parent
        rescue = LiveRescue(folder, self._locks, job, planned.other_shares, self._slot_for_rescue, self._log_fields)
        rescue.run([self._spec.roster[rank] for rank in ranks], self._clock, wait_s)

    def _slot_for_rescue(self, headers: list[SlotHeader | None]) -> int:
        return self._retention.slot_for_rescue(headers, self._pace.is_due)

    def _hold_lock(self, planned: ActivePlan) -> None:
        """Tell the node's other ranks that this process may store its share, until the generation ends. Once: a file
        that took the place of a held one would look free to a rank that had opened it before."""
        if self._locks is not None:
            return
        locks = StoringLocks(Path(planned.segment.path).parent, self._spec.number)
        try:
            locks.hold(self._member.local_rank)
        except OSError as error:  # no rank then stores for this one, nor this one for others
            log.warning("cannot lock a file beside the slots: %s", error, extra=self._log_fields)
            return
        self._locks = locks

    def _release_lock(self) -> None:
        if self._locks is not None:
            self._attempt(partial(self._locks.end, self._member.local_rank), "release the lock", at_end=True)

    def _digest_due(self, job: SnapshotJob) -> bool:
        interval = self._spec.spec.digest_interval
        return interval > 0 and (job.is_candidate or job.version.step % interval == 0)

    def _slot(self, planned: ActivePlan) -> int:
        self._reports.await_copies()
        return self._retention.slot_to_fill(planned.segment.view.headers(), self._pace.is_due)
