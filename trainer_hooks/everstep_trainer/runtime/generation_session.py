"""What happens around a training function's steps: nothing without Everstep, snapshots and fences with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Protocol

import torch

from everstep.clock import Clock
from everstep.ids import Version
from everstep.vocabulary import Finding, FindingKind, Mode, Severity
from everstep.wire.v1.directives import VersionNotice
from everstep.wire.v1.local import ToAgent
from everstep.wire.v1.training import FindingRaised, GenerationSpec, Resumed
from everstep_trainer.importers.source_agreement import Attempt, StoredChoice
from everstep_trainer.memory_tier.vault_client import VaultClient
from everstep_trainer.restore import Restoration
from everstep_trainer.restore.restorer import found_while_restoring
from everstep_trainer.runtime.directives import Orders
from everstep_trainer.runtime.interrupt import Interrupter, Regroup
from everstep_trainer.runtime.progress import Progress, compiled_s, compiled_since
from everstep_trainer.runtime.regroup import Group
from everstep_trainer.snapshot.slot_negotiation import Choices
from everstep_trainer.snapshot.snapshotter import Snapshotter
from everstep_trainer.state.tracked_state import TrackedState

# ---- timeline
# Where the time of a regrouping went.


class Timeline:
    """Seconds by phase, one phase after the other without gaps; they sum up to the time from start to finish."""

    def __init__(self, began: float | None = None) -> None:
        self._last = perf_counter() if began is None else began
        self.phases_s: dict[str, float] = {}

    def end(self, phase: str) -> None:
        """The time since the last call (or the start) belongs to ``phase``; more of the same phase adds up."""
        now = perf_counter()
        self.phases_s[phase] = self.phases_s.get(phase, 0.0) + now - self._last
        self._last = now

    def set_apart(self, phase: str, of: str, seconds: float) -> None:
        """So much of the phase ``of``, which has ended, was ``phase``; nothing where there was none of it."""
        seconds = min(seconds, self.phases_s[of])
        if seconds > 0.0:
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds
            self.phases_s[of] -= seconds


class Keeper(Protocol):
    """What ``Run`` tells, from the main thread."""

    def track(self, objects: Mapping[str, object], choices: Choices) -> int:
        """Restores the objects to the version agreed upon; returns the step it is of (0: from scratch)."""

    def before_update(self) -> None:
        """An optimizer is about to change tracked state. May raise Regroup."""

    def step_begun(self, step: int) -> None:
        """A step begins."""

    def hold_back(self) -> None:
        """A step is about to count as finished. Raises Regroup, or the error of a collective, where training code has
        caught that."""

    def step_finished(self, step: int) -> None:
        """A step is finished, and the tracked state stands. May raise Regroup."""

    def report(self, loss: torch.Tensor | float) -> None:
        """The loss of the running step."""

    def loss_refused(self, data_step: int, message: str) -> None:
        """The guard of the training refused an update, on all ranks; said once."""

    def waited(self, seconds: float) -> None:
        """So long of the running step went by in a collective, where this rank waits for others."""

    def atomic(self) -> AbstractContextManager[None]:
        """A section in which no Regroup is raised from outside."""


class IdleKeeper:
    """Keeps nothing: a script that runs without ``everstep-launch``."""

    def track(self, objects: Mapping[str, object], choices: Choices) -> int:
        return 0

    def before_update(self) -> None:
        return

    def step_begun(self, step: int) -> None:
        return

    def hold_back(self) -> None:
        return

    def step_finished(self, step: int) -> None:
        return

    def report(self, loss: torch.Tensor | float) -> None:
        return

    def loss_refused(self, data_step: int, message: str) -> None:
        return

    def waited(self, seconds: float) -> None:
        return

    def atomic(self) -> AbstractContextManager[None]:
        return nullcontext()


class GenerationKeeper:
    """Keeps one rank's state through one generation.

    Args:
        vault: makes the connection to the node's vault; called when state is tracked, or is sure to be.
        send: to the agent; never blocks.
        timeline: of the regrouping that led here; it ends with the first finished step.
        start_from: a checkpoint on storage for when nothing in memory can be restored, and the job has not stored one
            of its own; empty for none.
        stepped: called once, after the first finished step was reported.
    """

    def __init__(
        self,
        group: Group,
        *,
        orders: Orders,
        progress: Progress,
        interrupter: Interrupter,
        vault: Callable[[], VaultClient],
        send: Callable[[ToAgent], None],
        timeline: Timeline,
        clock: Clock,
        start_from: str = "",
        stepped: Callable[[], object] = bool,
    ) -> None:
        self._group = group
        self._orders = orders
        self._progress = progress
        self._interrupter = interrupter
        self._vault = vault
        self._send = send
        self._timeline: Timeline | None = timeline
        self._compiled_before_s = compiled_s()
        self._clock = clock
        self._start_from = start_from
        self._stepped = stepped
        self._snapshotter: Snapshotter | None = None
        self._restored: Version | None = None
        self._restoration: Restoration | None = None
        if group.spec.restore.floor is not None:  # what was committed is restored for certain
            self._restoration = self._new_restoration()
            self._restoration.begin()

    @property
    def _spec(self) -> GenerationSpec:
        return self._group.spec

    def track(self, objects: Mapping[str, object], choices: Choices) -> int:
        """See Keeper. Raises ValueError when called twice: one call names all that belongs together."""
        if self._snapshotter is not None:
            raise ValueError("run.track was called before in this generation: name everything in one call")
        self._phase_ends("build")
        group, vault, state = self._group, self._vault(), TrackedState(objects, choices.exclude)
        restoration = self._restoration = self._restoration or self._new_restoration()
        result = restoration.fill(state)
        self._restored, step = result.version, result.step
        if result.version is None:
            step = self._start_from_storage(objects, state)
        self._phase_ends("restore")
        self._snapshotter = Snapshotter(
            vault,
            state,
            group.spec,
            group.member,
            group.store,
            self._send,
            restored=result.version,
            choices=choices,
            clock=self._clock,
            is_over=lambda: self._orders.is_over(self._spec.number, self._progress.step),
        )
        self._progress.resume_from(step)
        self._snapshotter.first_plan.wait()
        self._phase_ends("plan")
        return step

    def _start_from_storage(self, objects: Mapping[str, object], state: TrackedState) -> int:
        """From what the job stored, or was told to begin with; returns the step, 0 where there is neither."""
        group, rule = self._group, self._spec.restore
        rank, world = group.member.rank, group.spec.world_size

        def read(url: str) -> Attempt:
            from everstep_trainer.importers.importer import (
                read_checkpoint,  # what it imports takes longer than a regrouping
            )

            return read_checkpoint(url, objects, state, rank, world)

        places = (rule.storage, *rule.storage_before) if rule.storage else (self._start_from,)
        choice = StoredChoice(group.store, rank, world, self._clock, self._stored_unusable)
        return choice.load([place for place in places if place], read)

    def _stored_unusable(self, url: str, reason: str) -> None:
        self._send(
            found_while_restoring(
                self._spec,
                self._clock,
                FindingKind.STORED_CORRUPT,
                url,
                reason,
                instead="the checkpoint before it is used where there is one",
                source="digests and checksums of what is read from storage",
                evidence={"rank": str(self._group.member.rank)},
            )
        )

    def _new_restoration(self) -> Restoration:
        group = self._group
        return Restoration(
            self._vault(), group.spec, group.member, group.store, on_finding=self._send, clock=self._clock
        )

    def before_update(self) -> None:
        self._fence()  # first, while the state still stands
        if self._snapshotter is not None:
            with self._interrupter.atomic():  # shares a condition with the copier's thread
                self._snapshotter.wait()
        self._fence()

    def step_begun(self, step: int) -> None:
        self._progress.begin(step)

    def hold_back(self) -> None:
        self._interrupter.hold_back()

    def step_finished(self, step: int) -> None:
        with self._interrupter.atomic():
            self._progress.finish(step)
            if self._snapshotter is not None:
                self._snapshotter.begin(step)
                self._progress.snapshot_every = self._snapshotter.every(step)
            if self._timeline is not None:
                self._acknowledge(step)
        self._fence()

    def report(self, loss: torch.Tensor | float) -> None:
        self._progress.loss.offer(loss)

    def loss_refused(self, data_step: int, message: str) -> None:
        spec = self._spec
        if self._group.member.rank == 0:
            finding = Finding(
                kind=FindingKind.RANK_LOSS,
                subject=f"{spec.job}/g{spec.number}/step{self._progress.step + 1}",
                severity=Severity.INFO,
                message=f"job {spec.job}: {message}",
                mode=Mode.OBSERVE,
                source="run.guard",
                since=self._clock.wall(),
                evidence={"data_step": str(data_step)},
            )
            self._send(FindingRaised(finding=finding, job=spec.job))

    def waited(self, seconds: float) -> None:
        self._progress.waited(seconds)

    def atomic(self) -> AbstractContextManager[None]:
        return self._interrupter.atomic()

    def note_versions(self, notice: VersionNotice) -> None:
        """From the signal thread: what is committed, and which step's version may be next."""
        snapshotter = self._snapshotter  # ``close`` lets go of it
        if snapshotter is not None and notice.generation == self._spec.number:
            snapshotter.note(notice.committed, notice.candidate, notice.pinned)

    def close(self) -> None:
        """Ends the snapshots of this generation.

        A copy that has begun is completed: the optimizer waits for it before it changes anything, so while one runs
        the live state is that of the last finished step, whatever else was interrupted.

        Lets go of all that was tracked: DistributedDataParallel's hook is in C++, where no cycle is found, and it tells
        this of its waits. Models and optimizers of every generation would stay in memory.
        """
        restoration, self._restoration = self._restoration, None
        if restoration is not None:
            restoration.close()
        snapshotter, self._snapshotter = self._snapshotter, None
        if snapshotter is not None:
            snapshotter.close(finish=True)

    def _fence(self) -> None:
        if self._orders.is_over(self._spec.number, self._progress.step):
            over = Regroup()
            self._interrupter.note(over)
            raise over

    def _phase_ends(self, phase: str) -> None:
        if self._timeline is not None:
            self._timeline.end(phase)

    def _acknowledge(self, step: int) -> None:
        """The first finished step ends the failure's way."""
        self._phase_ends("first_step")
        assert self._timeline is not None
        self._timeline.set_apart("compile", "first_step", compiled_since(self._compiled_before_s))
        phases, self._timeline = self._timeline.phases_s, None
        self._restoration = None  # only now: to unmap the slots takes a millisecond
        self._send(
            Resumed(
                job=self._spec.job,
                at=self._clock.wall(),
                trace=self._spec.trace,
                generation=self._spec.number,
                rank=self._group.member.rank,
                step=step,
                restored=self._restored,
                phases_s=phases,
            )
        )
        self._stepped()
