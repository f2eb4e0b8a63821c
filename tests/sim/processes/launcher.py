"""Simulate a job's launcher, which offers its node to the job and starts and replaces ranks."""

from __future__ import annotations

from signal import SIGTERM
from typing import TYPE_CHECKING, Any

from everstep.host.process_activity import ProcessSample
from everstep.wire.framing import SUPPORTED_VERSIONS
from everstep.wire.v1.directives import KillRank, StopJob
from everstep.wire.v1.local import ConnectionRole, Goodbye, Hello, RankExited
from everstep.wire.v1.training import LauncherJoined
from everstep_agent.jobs.local_processes import ProcessEnd
from tests.sim.processes.rank import LOCAL_S, RankProcess

if TYPE_CHECKING:
    from tests.sim.cluster.machine import Machine
    from tests.sim.faults.plan import JobPlan

SAVE_S = 0.5
"""Seconds in which a rank that has to leave saves its state."""


class Launcher:
    """A job's launcher on a machine. The agent sees it as a local connection."""

    def __init__(self, machine: Machine, job: JobPlan) -> None:
        self.machine = machine
        self.world = machine.world
        self.job = job
        self.is_alive = True
        self.is_connected = False
        self.incarnation = int(machine.clock.wall() * 1000)
        self.ranks: dict[int, RankProcess] = {}
        self._is_job_over = False
        for local_rank in range(job.spec.nproc_per_node):
            self.ranks[local_rank] = RankProcess(self, local_rank)
        self.connect_soon()

    def die(self, *, with_machine: bool = False, restart: bool = False) -> None:
        """End the launcher with all its ranks.

        Args:
            with_machine: The machine lost power, so the agent gets no end of file.
            restart: A supervisor starts the launcher again.
        """
        if not self.is_alive:
            return
        self.is_alive = False
        self.machine.launchers.pop(self.job.name, None)
        for rank in list(self.ranks.values()):
            rank.die(with_parent=with_machine)
        if not with_machine:
            self.world.timeline.after(LOCAL_S, self._close_connection)
        if restart:
            restart_s = 0.5 + 2.5 * self.world.rng.random()
            self.world.timeline.after(restart_s, lambda: self.machine.start_launcher(self.job))

    def _close_connection(self) -> None:
        if self.machine.is_frozen:
            self.machine.call_when_unfrozen(self._close_connection)
            return
        if self.machine.agent is not None and self.is_connected:
            self.machine.agent.jobs.handle_disconnect(self, "end of file")
        self.is_connected = False

    def handle_rank_exit(self, process: RankProcess, signal: int) -> None:
        """Report the exit to the agent, and replace the rank by the warm standby."""
        if self.machine.is_frozen:
            self.machine.call_when_unfrozen(lambda: self.handle_rank_exit(process, signal))
            return
        if not self.is_alive or self.ranks.get(process.local_rank) is not process:
            return
        is_over = self._is_job_over or signal == 0
        exited = RankExited(
            local_rank=process.local_rank,
            pid=process.pid,
            exit_code=None if signal else 0,
            signal=signal or None,
            has_replacement=not is_over,
        )
        self._send_to_agent(exited)
        if not is_over:
            self.world.timeline.after(0.03 + 0.05 * self.world.rng.random(), lambda: self._replace(process.local_rank))

    def _replace(self, local_rank: int) -> None:
        if self.is_alive and not self._is_job_over and not self.ranks[local_rank].is_alive:
            self.ranks[local_rank] = RankProcess(self, local_rank)

    def connect_soon(self) -> None:
        """Connect to the agent after a short time, if an agent runs then."""
        self.world.timeline.after(0.02 + 0.1 * self.world.rng.random(), self._connect)

    def handle_agent_death(self) -> None:
        """Note that the agent's end of the connection, and those of the ranks, are closed."""
        self.is_connected = False
        for rank in self.ranks.values():
            rank.handle_agent_death()

    def _connect(self) -> None:
        agent = self.machine.agent
        if not self.is_alive or self.is_connected or agent is None or self._is_job_over:
            return
        self.is_connected = True
        agent.jobs.handle_hello(
            self,
            Hello(protocols=SUPPORTED_VERSIONS, role=ConnectionRole.LAUNCHER, job=self.job.name, pid=self.incarnation),
        )
        agent.jobs.handle_message(
            self,
            LauncherJoined(
                job=self.job.name,
                at=self.machine.clock.wall(),
                spec=self.job.spec,
                launcher=self.incarnation,
                store=f"{self.machine.name}:8000",
            ),
        )

    def _send_to_agent(self, message: Any) -> None:
        if self.machine.agent is not None and self.is_connected:
            self.machine.agent.jobs.handle_message(self, message)

    def send(self, message: Any) -> None:
        """Receive a message from the agent."""
        if isinstance(message, StopJob):
            self.world.timeline.after(LOCAL_S, self._stop)
        elif isinstance(message, KillRank) and message.has_grace:  # without grace the agent kills the rank
            self._end_soon(message.local_rank)

    def _end_soon(self, local_rank: int) -> None:
        """End a rank that has to leave: it gets SIGTERM, saves and exits."""
        rank = self.ranks[local_rank]
        self.world.timeline.after(SAVE_S, lambda: rank.die(SIGTERM))

    def _stop(self) -> None:
        """Wait for the ranks at the job's end, then exit. A supervisor runs a job that failed once more."""
        if self._is_job_over or not self.is_alive:
            return
        self._is_job_over = True

        def leave() -> None:
            self._send_to_agent(Goodbye(detail="over"))
            self.die(restart=self.job.name not in self.world.finished_jobs)

        self.world.timeline.after(0.05, leave)

    def kill(self) -> None:
        self.die()

    def close(self) -> None:
        self.is_connected = False
        if self.is_alive:
            self.connect_soon()

    def handle_death(self, end: ProcessEnd) -> None:
        """Do nothing: the connection of a simulated process ends with it."""

    def process_state(self) -> str:
        return "S"

    def sample(self, at: float) -> ProcessSample | None:
        return ProcessSample(at=at, state="S") if self.is_alive else None
