"""Simulate a rank: the real directives, generation membership and directive listener, with a simple main thread.

Parts that need torch or sockets are modelled: the process group, the copy into a slot, and the connection to the agent.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from everstep.host.process_activity import ProcessSample
from everstep.ids import Version
from everstep.vocabulary import RankActivity
from everstep.wire.framing import SUPPORTED_VERSIONS
from everstep.wire.v1.directives import StopJob, VersionNotice
from everstep.wire.v1.local import ConnectionRole, Goodbye, Hello
from everstep.wire.v1.training import CollectiveFailed, GenerationSpec, Member, RankFinished, Resumed, UserError
from everstep_agent.jobs.local_processes import ProcessEnd
from everstep_trainer.config import HookSettings
from everstep_trainer.runtime.activity import MainThreadState
from everstep_trainer.runtime.directives import DirectiveListener, GenerationMembership, ReceivedDirectives
from tests.sim.cluster.observations import GenerationEntered, StepFinished
from tests.sim.cluster.training_state import TrainingState
from tests.sim.processes.rank_snapshots import RankSnapshots

if TYPE_CHECKING:
    from tests.sim.faults.plan import JobPlan
    from tests.sim.processes.launcher import Launcher
    from tests.sim.processes.process_group import ProcessGroup

HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of a rank."""
LOCAL_S = 0.0005
"""Seconds that a frame takes between two processes of one machine."""
MAX_UNSENT = 1024
"""Messages that a rank keeps while it has no agent. The oldest is dropped first."""
MAX_ERROR_CHARS = 4000
"""Characters of an error that are reported."""
SETTINGS = HookSettings(max_stack_bytes=64, first_step_allowance_s=20.0, stall_report_s=4.0)
"""Settings of every simulated rank, in seconds and bytes."""


class VirtualProgress:
    """Stand in for ``everstep_trainer.base.progress.StepProgress`` in virtual time."""

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
    """Stand in for the observer of the main thread, which is always in a step's collective."""

    longest_still_s = 0.0

    def observe(self) -> MainThreadState:
        return MainThreadState(activity=RankActivity.COLLECTIVE, operation="all_reduce", waits_for_all=True)

    def reset(self) -> None:
        return


class RankProcess:
    """The process of one local rank. The agent sees it as a local connection."""

    def __init__(self, launcher: Launcher, local_rank: int) -> None:
        self.launcher = launcher
        self.machine = launcher.machine
        self.world = self.machine.world
        self.job: JobPlan = launcher.job
        self.local_rank = local_rank
        self.pid = self.world.next_pid()
        self.is_alive = True
        self.is_stopped = False
        self.is_connected = False
        self.directives = ReceivedDirectives()
        self.progress = VirtualProgress()
        self.membership = GenerationMembership(
            self.directives,
            self.progress,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            self._request_leave,
            _ignore,
            _ignore,
            SETTINGS,
        )
        self.listener = DirectiveListener(
            self.directives,
            self.membership,
            self.progress,  # type: ignore[arg-type]
            self.send_to_agent,
            SETTINGS,
            self.machine.clock,
            CollectiveObserver(),
        )
        self.group: ProcessGroup | None = None
        self.state: TrainingState | None = None
        self._newest_generation = 0
        self._is_leaving = False
        self._unsent_messages: deque[Any] = deque(maxlen=MAX_UNSENT)
        self._standing_report: Any = None
        self._spec: GenerationSpec | None = None
        self._member: Member | None = None
        self._restored: Version | None = None
        self._snapshots = RankSnapshots(self)
        self._postponed: list[Any] = []
        self._connect()
        self.world.timeline.after(HEARTBEAT_S * self.world.rng.random(), self._send_heartbeat)

    @property
    def is_responsive(self) -> bool:
        """Whether the process runs."""
        return self.is_alive and not self.is_stopped and not self.machine.is_frozen

    def die(self, signal: int = 9, *, with_parent: bool = False) -> None:
        """End the process.

        Args:
            signal: The signal that ends it; 0 for a normal exit.
            with_parent: The machine or the launcher ends too, so agent and launcher notice nothing.
        """
        if not self.is_alive:
            return
        self.is_alive = False
        group, self.group = self.group, None
        if group is not None:
            group.remove(self)
        if not with_parent:
            self.world.timeline.after(LOCAL_S, self._close_connection)
            self.world.timeline.after(2 * LOCAL_S, lambda: self.launcher.handle_rank_exit(self, signal))

    def _close_connection(self) -> None:
        if self.machine.is_frozen:
            self.machine.call_when_unfrozen(self._close_connection)
            return
        agent = self.machine.agent
        if agent is not None and self.is_connected:
            agent.jobs.handle_disconnect(self, "end of file")
        self.is_connected = False

    def stop(self) -> None:
        """Stop the process by SIGSTOP."""
        self.is_stopped = True

    def resume(self) -> None:
        """Continue after SIGCONT or a hang of the machine, and make the postponed calls."""
        self.is_stopped = False
        calls, self._postponed = self._postponed, []
        for call in calls:
            self.call_when_running(call)

    def call_when_running(self, call: Any) -> None:
        """Make a call in this process: now, when the process runs again, or never."""
        if self.is_responsive:
            call()
        elif self.is_alive:
            self._postponed.append(call)

    def send(self, message: Any) -> None:
        """Receive a message from the agent."""
        self.world.timeline.after(LOCAL_S, lambda: self.call_when_running(lambda: self._receive(message)))

    def kill(self) -> None:
        self.die(9)

    def close(self) -> None:
        self.is_connected = False
        if self.is_alive:
            self.world.timeline.after(0.02, self._connect)

    def handle_death(self, end: ProcessEnd) -> None:
        """Do nothing: the connection of a simulated process ends with it."""

    def process_state(self) -> str:
        return "T" if self.is_stopped else "S"

    def sample(self, at: float) -> ProcessSample | None:
        return ProcessSample(at=at, state=self.process_state()) if self.is_alive else None

    def _connect(self) -> None:
        if not self.is_alive or self.is_connected:
            return
        agent = self.machine.agent
        if agent is None or not self.is_responsive:
            self.world.timeline.after(0.3, self._connect)
            return
        self.is_connected = True
        agent.jobs.handle_hello(
            self,
            Hello(
                protocols=SUPPORTED_VERSIONS,
                role=ConnectionRole.RANK,
                job=self.job.name,
                pid=self.pid,
                local_rank=self.local_rank,
            ),
        )
        if (heartbeat := self.listener.make_tick()) is not None:
            agent.jobs.handle_message(self, heartbeat)
        if self._standing_report is not None:
            agent.jobs.handle_message(self, self._standing_report)
        unsent, self._unsent_messages = self._unsent_messages, deque(maxlen=MAX_UNSENT)
        for message in unsent:
            self.send_to_agent(message)

    def handle_agent_death(self) -> None:
        """Connect again when an agent runs."""
        self.is_connected = False
        self.world.timeline.after(0.05, self._connect)

    def send_to_agent(self, message: Any) -> None:
        """Send a message to the agent, or keep it until an agent is connected."""

        def arrive() -> None:
            agent = self.machine.agent
            if agent is not None and self.is_connected and self.is_alive:
                agent.jobs.handle_message(self, message)
            elif self.is_alive:
                self._unsent_messages.append(message)

        self.world.timeline.after(LOCAL_S, arrive)

    def _set_standing_report(self, message: Any) -> None:
        self._standing_report = message
        if message is not None:
            self.send_to_agent(message)

    def _send_heartbeat(self) -> None:
        if not self.is_alive:
            return
        if self.is_responsive:
            heartbeat = self.listener.make_tick()
            agent = self.machine.agent
            if heartbeat is not None and agent is not None and self.is_connected:
                agent.jobs.handle_message(self, heartbeat)
        self.world.timeline.after(HEARTBEAT_S, self._send_heartbeat)

    def _receive(self, message: Any) -> None:
        if isinstance(message, VersionNotice):
            if self.group is not None:
                self._snapshots.update_notice(message)
            return
        self.listener.handle_message(message)
        if self.group is None and not self._is_leaving:
            self._join_next_generation()

    def _join_next_generation(self) -> None:
        """Join the next generation after the newest known one, if there is one."""
        while self.is_alive and self.group is None:
            directive = self.directives.wait_next(self._newest_generation, 0.0)
            if directive is None:
                return
            if isinstance(directive, StopJob):
                self._exit()
                return
            self._newest_generation = directive.number
            member = directive.member_at(self.machine.name, self.local_rank)
            if member is not None:
                self._join(directive, member)

    def _exit(self) -> None:
        self.send_to_agent(Goodbye(detail="over"))
        self.world.timeline.after(3 * LOCAL_S, lambda: self.die(0))

    def _join(self, spec: GenerationSpec, member: Member) -> None:
        self._spec, self._member, self._standing_report = spec, member, None
        self.listener.enter(spec, member)
        self.membership.join(spec.number)
        self.group = self.world.process_group(spec)
        self.world.observe(GenerationEntered(self.pid, self.machine.name, spec, member.rank))
        self.group.join(self, member.rank)

    def start_training(self, state: TrainingState, version: Version | None) -> None:
        """Begin to train from the restored state, since all members of the group are there."""
        assert self._spec is not None
        assert self._member is not None
        self.progress.enter(self._spec.number, self._member.rank)
        self.progress.finished_step = state.step
        self.progress.begun_step = self._next_step(state.step)
        self.state, self._restored = state, version
        self._snapshots.enter(self._spec, self._member, version)
        self.membership.enter()

    def _request_leave(self) -> None:
        """Leave soon, since ``GenerationMembership`` aborts the collectives of a finished generation."""
        if self.group is not None and not self._is_leaving:
            self._is_leaving = True
            pause_s = 0.005 + 0.03 * self.world.rng.random()
            self.world.timeline.after(pause_s, lambda: self.call_when_running(self._leave))

    def request_regroup(self) -> None:
        """Do nothing in place of ``Interrupter.request_regroup``: the simulated main thread never blocks."""

    def interrupt(self) -> bool:
        return False

    @property
    def _has_group(self) -> bool:
        """Whether this rank is in a generation; read anew after a call that may join one."""
        return self.group is not None

    def _leave(self) -> None:
        """Leave the generation after completing a copy that has begun."""
        group, self.group = self.group, None
        self._is_leaving = False
        self._snapshots.finish_copy()
        self.membership.leave()
        self.listener.leave()
        self._standing_report = None
        if group is not None:
            group.remove(self)
        self._join_next_generation()

    def handle_collective_failure(self, group: ProcessGroup, detail: str) -> None:
        """Leave after a failed collective, report it, and wait for the next generation."""
        if self.group is not group or self._spec is None or self._member is None or self._is_leaving:
            return
        is_new = not self.directives.is_superseded(self._spec.number)
        spec, member, step = self._spec, self._member, self.progress.finished_step
        self._leave()
        if is_new and not self._has_group:
            at, number = self.machine.clock.wall(), spec.number
            self._repeat_report(
                CollectiveFailed(job=spec.job, at=at, generation=number, rank=member.rank, step=step, detail=detail)
            )

    def _repeat_report(self, report: CollectiveFailed) -> None:
        """Repeat the report until a new generation comes, since a new leader may not have received it."""
        self._set_standing_report(report)

        def repeat() -> None:
            if self._standing_report is report and not self.directives.is_superseded(report.generation):
                self._repeat_report(report)

        self.world.timeline.after(SETTINGS.regroup_wait_s, lambda: self.call_when_running(repeat))

    def handle_restore_failure(self, group: ProcessGroup, sentence: str) -> None:
        """Report ``NotRestorable`` as an error of the training function, unless a newer generation comes first."""

        def report_error() -> None:
            if self.group is group and self._spec is not None and self._member is not None:
                self.send_to_agent(self._user_error(sentence))

        self.world.timeline.after(0.25, lambda: self.call_when_running(report_error))

    def _user_error(self, sentence: str) -> UserError:
        assert self._spec is not None
        assert self._member is not None
        return UserError(
            job=self._spec.job,
            at=self.machine.clock.wall(),
            generation=self._spec.number,
            rank=self._member.rank,
            step=self.progress.finished_step,
            error=sentence[:MAX_ERROR_CHARS],
            traceback="",
        )

    def _next_step(self, step: int) -> int:
        """Return the step that the loop begins after ``step``: the same step at the job's end."""
        return step if self.job.last_step is not None and step >= self.job.last_step else step + 1

    def finish_step(self, group: ProcessGroup, step: int, step_s: float) -> None:
        """Finish a step after its reduction, unless the generation is over before or after it."""
        if self.group is not group or self._is_leaving or self._spec is None or self._member is None:
            return
        if self.directives.is_generation_over(self._spec.number, self.progress.finished_step):
            self._leave()
            return
        self._snapshots.finish_copy()  # the optimizer waits for the copy
        self.state = group.next_state(self)
        self.progress.finish(step, step_s, self.job.step_s * self.machine.slowness)
        self.progress.begun_step = self._next_step(step)
        self.world.observe(
            StepFinished(
                self.pid, self.machine.name, self.job.name, self._spec.number, self._member.rank, step, self.state
            )
        )
        self._snapshots.snapshot(step, self.state)
        if self.progress.finished_steps_here == 1:
            self._report_resumed(step)
        if self.directives.is_generation_over(self._spec.number, step):
            self._leave()
        elif self.job.last_step is not None and step >= self.job.last_step:
            self._set_standing_report(
                RankFinished(
                    job=self.job.name,
                    at=self.machine.clock.wall(),
                    generation=self._spec.number,
                    rank=self._member.rank,
                    step=step,
                )
            )
        group.note_finished_step(self, step)

    def _report_resumed(self, step: int) -> None:
        assert self._spec is not None
        assert self._member is not None
        self.send_to_agent(
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


def _ignore() -> None:
    return
