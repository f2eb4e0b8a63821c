"""One rank's process: the real orders, presence, attendant and watchdog; its main thread is a few states.

What is modelled and not real is what needs torch or sockets: the process group (``tests.sim.collective``), the copy
into a slot, and the link to the agent.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.activity import MainThreadState
from everstep_trainer.runtime.directives import DirectiveListener, GenerationMembership, ReceivedDirectives

from everstep.ids import Version
from everstep.process_activity import ProcessSample
from everstep.vocabulary import RankActivity
from everstep.wire.framing import SUPPORTED_VERSIONS
from everstep.wire.v1.directives import StopJob, VersionNotice
from everstep.wire.v1.local import ConnectionRole, Goodbye, Hello
from everstep.wire.v1.training import CollectiveFailed, GenerationSpec, Member, RankFinished, Resumed, UserError
from tests.sim import facts
from tests.sim.rank_memory import RankMemory
from tests.sim.training_state import TrainingState

if TYPE_CHECKING:
    from tests.sim.collective import Collective
    from tests.sim.machine import Launcher

TICK_S = 1.0
LOCAL_S = 0.0005
"""Of a frame between two processes of one machine."""
SETTINGS = HookSettings(max_stack_bytes=64, first_step_allowance_s=20.0, stall_report_s=4.0)


class Progress:
    """``everstep_trainer.runtime.progress.StepProgress`` by virtual time."""

    class _Loss:
        @staticmethod
        def value() -> float | None:
            return None

    def __init__(self) -> None:
        self.generation = self.rank = self.finished_step = self.begun_step = self.finished_steps_here = 0
        self.collective_count, self.snapshot_every, self.median_step_s = 0, 1, 0.0
        self.until_step = 0
        self.median_busy_s: float | None = None
        self.loss = self._Loss()

    def enter(self, generation: int, rank: int) -> None:
        self.generation, self.rank, self.finished_steps_here = generation, rank, 0

    def finish(self, step: int, step_s: float, busy_s: float) -> None:
        self.finished_step, self.median_step_s, self.median_busy_s = step, step_s, busy_s
        self.finished_steps_here += 1
        self.collective_count += 1


class CollectiveObserver:
    """What the main thread does, which is always inside a step's collective."""

    longest_still_s = 0.0

    def observe(self) -> MainThreadState:
        return MainThreadState(activity=RankActivity.COLLECTIVE, operation="all_reduce", waits_for_all=True)

    def reset(self) -> None:
        return


class RankProcess:
    """The process behind one local rank, until it dies. To the agent it is a ``Peer``."""

    def __init__(self, launcher: Launcher, local_rank: int) -> None:
        self.launcher = launcher
        self.machine = launcher.machine
        self.world = self.machine.world
        self.job = launcher.job
        self.local_rank = local_rank
        self.life = self.world.next_life()
        self.alive = True
        self.stopped = False
        self.connected = False
        self.orders = ReceivedDirectives()
        self.progress = Progress()
        self.presence = GenerationMembership(
            self.orders,
            self.progress,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self._asked_to_leave,
            _nothing,
            _nothing,
            SETTINGS,
        )
        self.attendant = DirectiveListener(
            self.orders,
            self.presence,
            self.progress,  # type: ignore[arg-type]
            self.tell,
            SETTINGS,
            self.machine.clock,
            CollectiveObserver(),
        )
        self.group: Collective | None = None
        self.state: TrainingState | None = None
        self._number = 0
        self._leaving = False
        self._unsent: deque[Any] = deque(maxlen=1024)
        self._standing: Any = None
        self._spec: GenerationSpec | None = None
        self._member: Member | None = None
        self._restored: Version | None = None
        self._memory = RankMemory(self)
        self._asleep: list[Any] = []
        self._connect()
        self.world.timeline.after(TICK_S * self.world.rng.random(), self._tick)

    # --- life --------------------------------------------------------------------------------------------------------

    @property
    def responsive(self) -> bool:
        return self.alive and not self.stopped and not self.machine.frozen

    def die(self, signal: int = 9, *, quiet: bool = False) -> None:
        """``quiet``: together with its machine or launcher, of which nobody is told by this process."""
        if not self.alive:
            return
        self.alive = False
        group, self.group = self.group, None
        if group is not None:
            group.lost(self)
        if not quiet:
            self.world.timeline.after(LOCAL_S, self._end_of_file)
            self.world.timeline.after(2 * LOCAL_S, lambda: self.launcher.rank_exited(self, signal))

    def _end_of_file(self) -> None:
        if self.machine.frozen:
            self.machine.when_thawed(self._end_of_file)
            return
        agent = self.machine.agent
        if agent is not None and self.connected:
            agent.jobs.handle_disconnect(self, "end of file")
        self.connected = False

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = True

    def resume(self) -> None:
        """SIGCONT, or the machine thaws: what came meanwhile is done now."""
        self.stopped = False
        asleep, self._asleep = self._asleep, []
        for call in asleep:
            self.do(call)

    def do(self, call: Any) -> None:
        """Runs ``call`` in this process: now, or when it runs again, or never."""
        if self.responsive:
            call()
        elif self.alive:
            self._asleep.append(call)

    # --- Peer --------------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        """A frame of the agent's."""
        self.world.timeline.after(LOCAL_S, lambda: self.do(lambda: self._hear(message)))

    def kill(self) -> None:
        self.die(9)

    def close(self) -> None:
        self.connected = False
        if self.alive:
            self.world.timeline.after(0.02, self._connect)

    def process_state(self) -> str:
        return "T" if self.stopped else "S"

    def sample(self, at: float) -> ProcessSample | None:
        return ProcessSample(at=at, state=self.process_state()) if self.alive else None

    # --- the link ----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if not self.alive or self.connected:
            return
        agent = self.machine.agent
        if agent is None or not self.responsive:
            self.world.timeline.after(0.3, self._connect)
            return
        self.connected = True
        agent.jobs.handle_hello(
            self,
            Hello(
                protocols=SUPPORTED_VERSIONS,
                role=ConnectionRole.RANK,
                job=self.job.name,
                pid=self.life,
                local_rank=self.local_rank,
            ),
        )
        if (tick := self.attendant.make_tick()) is not None:
            agent.jobs.handle_message(self, tick)
        if self._standing is not None:
            agent.jobs.handle_message(self, self._standing)
        unsent, self._unsent = self._unsent, deque(maxlen=1024)
        for message in unsent:
            self.tell(message)

    def agent_died(self) -> None:
        self.connected = False
        self.world.timeline.after(0.05, self._connect)

    def tell(self, message: Any) -> None:
        """Says something to the agent, or keeps it until there is one."""

        def arrive() -> None:
            agent = self.machine.agent
            if agent is not None and self.connected and self.alive:
                agent.jobs.handle_message(self, message)
            elif self.alive:
                self._unsent.append(message)

        self.world.timeline.after(LOCAL_S, arrive)

    def _stand(self, message: Any) -> None:
        self._standing = message
        if message is not None:
            self.tell(message)

    def _tick(self) -> None:
        if not self.alive:
            return
        if self.responsive:
            tick = self.attendant.make_tick()
            agent = self.machine.agent
            if tick is not None and agent is not None and self.connected:
                agent.jobs.handle_message(self, tick)
        self.world.timeline.after(TICK_S, self._tick)

    def _hear(self, message: Any) -> None:
        if isinstance(message, VersionNotice):
            if self.group is not None:
                self._memory.note(message)
            return
        self.attendant.handle_message(message)
        if self.group is None and not self._leaving:
            self._next_order()

    # --- the main thread: in -----------------------------------------------------------------------------------------

    def _next_order(self) -> None:
        """Takes part in what follows the newest generation known, if anything does."""
        while self.alive and self.group is None:
            order = self.orders.wait_next(self._number, 0.0)
            if order is None:
                return
            if isinstance(order, StopJob):
                self._exit()
                return
            self._number = order.number
            member = order.member_at(self.machine.name, self.local_rank)
            if member is not None:
                self._join(order, member)

    def _exit(self) -> None:
        self.tell(Goodbye(detail="over"))
        self.world.timeline.after(3 * LOCAL_S, lambda: self.die(0))

    def _join(self, spec: GenerationSpec, member: Member) -> None:
        self._spec, self._member, self._standing = spec, member, None
        self.attendant.enter(spec, member)
        self.presence.join(spec.number)
        self.group = self.world.collective(spec)
        self.world.see(facts.Entered(self.life, self.machine.name, spec, member.rank))
        self.group.join(self, member.rank)

    def formed(self, state: TrainingState, version: Version | None) -> None:
        """The group is there, and what it starts from restored."""
        assert self._spec is not None
        assert self._member is not None
        self.progress.enter(self._spec.number, self._member.rank)
        self.progress.finished_step = state.step
        self.progress.begun_step = self._next_step(state.step)
        self.state, self._restored = state, version
        self._memory.enter(self._spec, self._member, version)
        self.presence.enter()

    # --- the main thread: out ----------------------------------------------------------------------------------------

    def _asked_to_leave(self) -> None:
        """``Presence`` ends the collectives of a generation that is over."""
        if self.group is not None and not self._leaving:
            self._leaving = True
            pause_s = 0.005 + 0.03 * self.world.rng.random()
            self.world.timeline.after(pause_s, lambda: self.do(self._leave))

    def request_regroup(self) -> None:
        """``Interrupter.request_regroup``: the main thread of the simulation always comes by."""

    def interrupt(self) -> bool:
        return False

    def _leave(self) -> None:
        """Out of the generation: a copy that was begun is completed first."""
        group, self.group = self.group, None
        self._leaving = False
        self._memory.seal_now()
        self.presence.leave()
        self.attendant.leave()
        self._standing = None
        if group is not None:
            group.left(self)
        self._next_order()

    def collective_failed(self, group: Collective, detail: str) -> None:
        """A peer is gone, and this rank's operation says so. It waits outside for what follows."""
        if self.group is not group or self._spec is None or self._member is None or self._leaving:
            return
        news = not self.orders.is_superseded(self._spec.number)
        spec, member, step = self._spec, self._member, self.progress.finished_step
        self._leave()
        if news and self.group is None:
            at, number = self.machine.clock.wall(), spec.number
            self._witness(
                CollectiveFailed(job=spec.job, at=at, generation=number, rank=member.rank, step=step, detail=detail)
            )

    def _witness(self, word: CollectiveFailed) -> None:
        """Said again until somebody answers: who took over has never heard of it."""
        self._stand(word)

        def again() -> None:
            if self._standing is word and not self.orders.is_superseded(word.generation):
                self._witness(word)

        self.world.timeline.after(SETTINGS.regroup_wait_s, lambda: self.do(again))

    def cannot_restore(self, group: Collective, sentence: str) -> None:
        """``NotRestorable`` from ``run.track``: an error of the training function, if nothing newer explains it."""

        def tell() -> None:
            if self.group is group and self._spec is not None and self._member is not None:
                self.tell(self._user_error(sentence))

        self.world.timeline.after(0.25, lambda: self.do(tell))

    def _user_error(self, sentence: str) -> UserError:
        assert self._spec is not None
        assert self._member is not None
        return UserError(
            job=self._spec.job,
            at=self.machine.clock.wall(),
            generation=self._spec.number,
            rank=self._member.rank,
            step=self.progress.finished_step,
            error=sentence[:4000],
            traceback="",
        )

    # --- the main thread: a step -------------------------------------------------------------------------------------

    def _next_step(self, step: int) -> int:
        """The step that the loop begins after ``step``: the same one where the job is at its end."""
        return step if self.job.until is not None and step >= self.job.until else step + 1

    def finish_step(self, group: Collective, step: int, step_s: float) -> None:
        """The step's reduction is done: fence, update, fence again."""
        if self.group is not group or self._leaving or self._spec is None or self._member is None:
            return
        if self.orders.is_generation_over(self._spec.number, self.progress.finished_step):
            self._leave()
            return
        self._memory.seal_now()  # the optimizer waits for the copy
        self.state = group.next_state(self)
        self.progress.finish(step, step_s, self.job.step_s * self.machine.slowness)
        self.progress.begun_step = self._next_step(step)
        self.world.see(
            facts.Stepped(
                self.life, self.machine.name, self.job.name, self._spec.number, self._member.rank, step, self.state
            )
        )
        self._memory.snapshot(step, self.state)
        if self.progress.finished_steps_here == 1:
            self._acknowledge(step)
        if self.orders.is_generation_over(self._spec.number, step):
            self._leave()
        elif self.job.until is not None and step >= self.job.until:
            self._stand(
                RankFinished(
                    job=self.job.name,
                    at=self.machine.clock.wall(),
                    generation=self._spec.number,
                    rank=self._member.rank,
                    step=step,
                )
            )
        group.finished(self, step)

    def _acknowledge(self, step: int) -> None:
        assert self._spec is not None
        assert self._member is not None
        self.tell(
            Resumed(
                job=self._spec.job,
                at=self.machine.clock.wall(),
                trace=self._spec.trace,
                generation=self._spec.number,
                rank=self._member.rank,
                step=step,
                restored=self._restored,
                phases_s={"rendezvous": 0.05, "first_step": 0.1},
            )
        )


def _nothing() -> None:
    return
