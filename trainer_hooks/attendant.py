"""What the link's thread does for a rank: hears directives, looks after its progress, tells of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from everstep.clock import Clock
from everstep.vocabulary import GenerationReason
from everstep.wire.v1.directives import NewGeneration, StopJob, VersionNotice
from everstep.wire.v1.local import FromAgent, LauncherLost, Tick, ToAgent
from everstep.wire.v1.training import GenerationSpec, Member, RankStalled
from trainer_hooks.config import HookSettings
from trainer_hooks.orders import Orders
from trainer_hooks.presence import Presence, Where
from trainer_hooks.progress import Progress
from trainer_hooks.watchdog import Stall, Watchdog, all_stacks, main_stack

logger = logging.getLogger(__name__)


class VersionListener(Protocol):
    def note_versions(self, notice: VersionNotice) -> None:
        """What is committed, and what may be next."""


class Attendant:
    """The link's listener. ``enter`` and ``leave`` are the main thread's, the rest is called from the link's."""

    def __init__(
        self,
        orders: Orders,
        presence: Presence,
        progress: Progress,
        send: Callable[[ToAgent], None],
        settings: HookSettings,
        clock: Clock,
    ) -> None:
        self._orders = orders
        self._presence = presence
        self._progress = progress
        self._send = send
        self._settings = settings
        self._clock = clock
        self._watchdog = Watchdog(settings, clock)
        self._spec: GenerationSpec | None = None
        self._member: Member | None = None
        self.keeper: VersionListener | None = None

    def enter(self, spec: GenerationSpec, member: Member) -> None:
        """The main thread takes part in ``spec`` from here on, beginning with its rendezvous."""
        self._watchdog.enter(spec.spec.hang_threshold_s)
        self._spec, self._member = spec, member

    def leave(self) -> None:
        """It takes part in nothing."""
        self._spec = self._member = self.keeper = None

    # --- the link's thread

    def hear(self, message: FromAgent) -> None:
        if isinstance(message, NewGeneration):
            stood = self._stack_in_a_hang(message.spec)
            if self._orders.hear_generation(message.spec):
                self._presence.press()
                if stood:
                    self._log_hang(message.spec, stood)
        elif isinstance(message, StopJob):
            self._orders.hear_stop(message)
            self._presence.press()
        elif isinstance(message, VersionNotice):
            if (keeper := self.keeper) is not None:
                keeper.note_versions(message)
        elif isinstance(message, LauncherLost):
            logger.warning("the launcher is gone, this rank will not be replaced: %s", message.detail)

    def pressing(self) -> bool:
        return self._presence.pressing

    def pulse(self) -> Tick | None:
        self._presence.press()
        spec, member, progress = self._spec, self._member, self._progress
        if spec is None or member is None:
            return None
        if self._presence.where is Where.INSIDE and (stall := self._watchdog.check(progress)) is not None:
            self._tell(stall, spec, member)
        return Tick(
            generation=spec.number,
            rank=member.rank,
            step=progress.step,
            step_s=progress.step_s,
            collectives=progress.collectives,
            loss=progress.loss.value(),
            busy_s=progress.busy_s,
            snapshot_every=progress.snapshot_every,
            begun=self._begun(spec),
        )

    def _begun(self, spec: GenerationSpec) -> int:
        """The last step begun in ``spec``: the main thread may still count those of the generation before."""
        return self._progress.begun if self._progress.generation == spec.number else 0

    def _stack_in_a_hang(self, following: GenerationSpec) -> str:
        """Where the main thread waits when a hang ends its generation; taken before anything is aborted."""
        hung = following.reason is GenerationReason.RANK_HUNG and self._presence.where is Where.INSIDE
        return main_stack(self._settings.stacks_bytes) if hung else ""

    def _log_hang(self, spec: GenerationSpec, stood: str) -> None:
        """The agent may name a stopped rank long before anybody's watchdog looks: so every rank says where it stood."""
        logger.warning(
            "%s; until then this rank stood after step %d, in the last of %d collectives, at\n%s",
            spec.sentence,
            self._progress.step,
            self._progress.collectives,
            stood,
            extra={"job": spec.job, "generation": spec.number, "trace": spec.trace},
        )

    def _tell(self, stall: Stall, spec: GenerationSpec, member: Member) -> None:
        step, collectives = self._progress.step, self._progress.collectives
        logger.warning(
            "no step finished for %.1f s (threshold %.1f s) after step %d: taken for a hang. Who evaluates or "
            "saves there for so long says how long by --hang-threshold-s",
            stall.stalled_s,
            stall.threshold_s,
            step,
            extra={"node": member.node, "job": spec.job, "generation": spec.number, "trace": spec.trace},
        )
        self._send(
            RankStalled(
                job=spec.job,
                at=self._clock.wall(),
                generation=spec.number,
                rank=member.rank,
                step=step,
                collectives=collectives,
                stalled_s=stall.stalled_s,
                threshold_s=stall.threshold_s,
                begun=self._begun(spec),
                stacks=all_stacks(self._settings.stacks_bytes),
            )
        )
