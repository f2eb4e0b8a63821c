"""One machine: its power, its clock, what its sensors would show, and the processes on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everstep_agent.uplink.heartbeat import NodeDescription

from everstep.process_activity import ProcessSample
from everstep.vocabulary import Finding, ProbeKind
from everstep.wire.framing import SUPPORTED_VERSIONS
from everstep.wire.v1.agent import Domain, Gpu
from everstep.wire.v1.directives import KillRank, RunProbe, StopJob
from everstep.wire.v1.local import ConnectionRole, Goodbye, Hello, RankExited
from everstep.wire.v1.training import FindingCleared, FindingRaised, LauncherJoined, ProbeFinished
from tests.sim import facts
from tests.sim.agent_process import AgentProcess
from tests.sim.rank_process import LOCAL_S, RankProcess
from tests.sim.timeline import MachineClock
from tests.sim.vault_memory import VaultMemory
from tests.sim.vault_process import VaultProcess

if TYPE_CHECKING:
    from tests.sim.plan import JobPlan
    from tests.sim.world import World

SEEN_BY_SYNTHETIC_WORK = 0.4


class Machine:
    """``slowness``: how many times as long its steps take. ``lying``: its GPUs compute wrongly, unnoticed.
    ``misjudging``: they do so only when they audit others."""

    def __init__(self, world: World, name: str, domain: Domain, clock: MachineClock, spool_dir: Path) -> None:
        self.world = world
        self.name = name
        self.domain = domain
        self.clock = clock
        self.power = False
        self.frozen = False
        self.slowness = 1.0
        self.lying = self.misjudging = False
        self.probes_fail = False
        self.vault = VaultMemory()
        self.vault_process = VaultProcess(self)
        self.agent: AgentProcess | None = None
        self.launchers: dict[str, Launcher] = {}
        self.assigned: dict[str, JobPlan] = {}
        self._spool_file = spool_dir / f"{name}.spool"
        self._incarnation = 0
        self._boot = 0
        self._gpu_series = 0
        self._findings: dict[str, Finding] = {}
        self._thawing: list[Callable[[], None]] = []

    # --- power -------------------------------------------------------------------------------------------------------

    def boot(self) -> None:
        """Power on; agent and launchers follow within seconds."""
        if self.power:
            return
        self.power, self.frozen = True, False
        self._boot += 1
        rng, timeline = self.world.rng, self.world.timeline
        timeline.after(0.2 + rng.random(), self.start_agent)
        for job in self.assigned.values():
            timeline.after(0.5 + 2.0 * rng.random(), lambda j=job: self.start_launcher(j))  # type: ignore[misc]

    def lose_power(self) -> None:
        """Everything is gone at once, and nobody hears of it."""
        if not self.power:
            return
        self.power = self.frozen = False
        self.vault.clear()
        self.vault_process.lose_power()
        self.world.see(facts.MemoryLost(self.name))
        self.world.wires.lose_power(self.name)
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.die(power=True)
        for launcher in list(self.launchers.values()):
            launcher.die(quiet=True)
        self.launchers.clear()
        self._thawing.clear()
        self._spool_file.unlink(missing_ok=True)

    def reboot(self) -> None:
        """In order: connections are closed before the power goes."""
        if not self.power:
            self.boot()
            return
        self.kill_agent(restart=False)
        self.lose_power()
        self.world.timeline.after(3.0 + 4.0 * self.world.rng.random(), self.boot)

    def freeze(self) -> None:
        """The kernel hangs: nothing runs, and no connection ends."""
        if self.power:
            self.frozen = True

    def thaw(self) -> None:
        if not self.frozen:
            return
        self.frozen = False
        calls, self._thawing = self._thawing, []
        for call in calls:
            call()
        for launcher in list(self.launchers.values()):
            for rank in list(launcher.ranks.values()):
                if not rank.stopped:
                    rank.resume()

    def when_thawed(self, call: Callable[[], None]) -> None:
        self._thawing.append(call)

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_agent(self) -> None:
        if self.frozen:
            self.when_thawed(self.start_agent)
            return
        if not self.power or self.agent is not None:
            return
        self._incarnation = max(int(self.clock.wall() * 1000), self._incarnation + 1)
        self.agent = AgentProcess(self, self._incarnation, self._spool_file)
        for launcher in self.launchers.values():
            launcher.connect_soon()

    def kill_agent(self, *, restart: bool = True) -> None:
        """SIGKILL. Its supervisor starts it again."""
        agent, self.agent = self.agent, None
        if agent is None:
            return
        agent.die()
        for launcher in self.launchers.values():
            launcher.agent_died()
        if restart:
            self.world.timeline.after(0.2 + 1.3 * self.world.rng.random(), self.start_agent)

    def start_launcher(self, job: JobPlan) -> None:
        if self.frozen:
            self.when_thawed(lambda: self.start_launcher(job))
            return
        if self.power and job.name not in self.launchers and job.name not in self.world.finished:
            self.launchers[job.name] = Launcher(self, job)

    # --- what the agent asks of its machine --------------------------------------------------------------------------

    def describe_node(self) -> NodeDescription:
        gpu = Gpu(index=0, uuid=f"GPU-{self.name}-{self._gpu_series}", name="sim", pci_bus_id="0", memory_bytes=1 << 30)
        return NodeDescription(
            vault=f"{self.name}:7000",
            boot_id=f"{self.name}-boot-{self._boot}",
            driver_version="570.1",
            domain=self.domain,
            gpus=(gpu,),
        )

    def findings(self) -> tuple[Finding, ...]:
        return tuple(self._findings.values())

    def raise_finding(self, finding: Finding) -> None:
        """A sensor sees something: told urgently, and in every full picture from now on."""
        self._findings[finding.key] = finding
        if self.agent is not None and not self.frozen:
            self.agent.report(FindingRaised(finding=finding))
            self.agent.nudge()

    def clear_findings(self) -> None:
        cleared, self._findings = self._findings, {}
        for key in cleared:
            if self.agent is not None:
                self.agent.report(FindingCleared(key=key))
        if cleared and self.agent is not None:
            self.agent.nudge()

    def replace_gpus(self) -> None:
        """What a repair does: other hardware, which computes rightly."""
        self._gpu_series += 1
        self.lying = self.misjudging = self.probes_fail = False
        self._findings.clear()

    def probe(self, body: RunProbe, done: Callable[[ProbeFinished], None]) -> None:
        """Carries out a probe; the answer comes when it is over."""

        def finish() -> None:
            if self.power and not self.frozen:
                result = self._all_reduce(body) if body.kind is ProbeKind.ALL_REDUCE else self._known_work(body)
                self.world.see(facts.ProbeAnswered(self.name, body.probe, result.ok))
                done(result)

        self.world.timeline.after(0.1 + 0.4 * self.world.rng.random(), finish)

    def _all_reduce(self, body: RunProbe) -> ProbeFinished:
        """It works where all members run, reach one another and have good links."""
        members = [self.world.machines[node] for node in body.nodes]
        ok = all(m.power and not m.frozen and not m.probes_fail for m in members) and all(
            self.world.wires.connected(self.name, m.name) for m in members
        )
        detail = "" if ok else "no connection"
        return ProbeFinished(probe=body.probe, ok=ok, detail=detail, rows=((8, 1e-4, 1e9),), started=True)

    def _known_work(self, body: RunProbe) -> ProbeFinished:
        """Synthetic work shows a GPU that computes wrongly in under 40 % of cases (SDCHunter, OSDI 2026)."""
        wrong = self.lying and self.world.rng.random() < SEEN_BY_SYNTHETIC_WORK
        detail = "wrong result" if wrong else ""
        return ProbeFinished(probe=body.probe, ok=not wrong, detail=detail, wrong_result=wrong, started=True)


class Launcher:
    """A job's launcher on a machine: offers the node, starts its ranks, replaces those that die."""

    def __init__(self, machine: Machine, job: JobPlan) -> None:
        self.machine = machine
        self.world = machine.world
        self.job = job
        self.alive = True
        self.connected = False
        self.incarnation = int(machine.clock.wall() * 1000)
        self.ranks: dict[int, RankProcess] = {}
        self._over = False
        for local_rank in range(job.spec.nproc_per_node):
            self.ranks[local_rank] = RankProcess(self, local_rank)
        self.connect_soon()

    # --- life --------------------------------------------------------------------------------------------------------

    def die(self, *, quiet: bool = False, restart: bool = False) -> None:
        """Its ranks end with it. ``restart``: what started it starts it again."""
        if not self.alive:
            return
        self.alive = False
        self.machine.launchers.pop(self.job.name, None)
        for rank in list(self.ranks.values()):
            rank.die(quiet=quiet)
        if not quiet:
            self.world.timeline.after(LOCAL_S, self._end_of_file)
        if restart:
            again_s = 0.5 + 2.5 * self.world.rng.random()
            self.world.timeline.after(again_s, lambda: self.machine.start_launcher(self.job))

    def _end_of_file(self) -> None:
        if self.machine.frozen:
            self.machine.when_thawed(self._end_of_file)
            return
        if self.machine.agent is not None and self.connected:
            self.machine.agent.jobs.handle_disconnect(self, "end of file")
        self.connected = False

    def rank_exited(self, process: RankProcess, signal: int) -> None:
        """Tells the agent, and puts the warm standby in its place."""
        if self.machine.frozen:
            self.machine.when_thawed(lambda: self.rank_exited(process, signal))
            return
        if not self.alive or self.ranks.get(process.local_rank) is not process:
            return
        over = self._over or signal == 0
        word = RankExited(
            local_rank=process.local_rank,
            pid=process.life,
            exit_code=None if signal else 0,
            signal=signal or None,
            has_replacement=not over,
        )
        self._tell(word)
        if not over:
            self.world.timeline.after(0.03 + 0.05 * self.world.rng.random(), lambda: self._replace(process.local_rank))

    def _replace(self, local_rank: int) -> None:
        if self.alive and not self._over and not self.ranks[local_rank].alive:
            self.ranks[local_rank] = RankProcess(self, local_rank)

    # --- to the agent ------------------------------------------------------------------------------------------------

    def connect_soon(self) -> None:
        self.world.timeline.after(0.02 + 0.1 * self.world.rng.random(), self._connect)

    def agent_died(self) -> None:
        self.connected = False
        for rank in self.ranks.values():
            rank.agent_died()

    def _connect(self) -> None:
        agent = self.machine.agent
        if not self.alive or self.connected or agent is None or self._over:
            return
        self.connected = True
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

    def _tell(self, message: Any) -> None:
        if self.machine.agent is not None and self.connected:
            self.machine.agent.jobs.handle_message(self, message)

    # --- Peer --------------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        if isinstance(message, StopJob):
            self.world.timeline.after(LOCAL_S, self._stopped)
        elif isinstance(message, KillRank):
            return  # the agent kills

    def _stopped(self) -> None:
        """The job is over: waits for the ranks, then goes. Whoever ran a job that failed runs it once more."""
        if self._over or not self.alive:
            return
        self._over = True

        def go() -> None:
            self._tell(Goodbye(detail="over"))
            self.die(restart=self.job.name not in self.world.finished)

        self.world.timeline.after(0.05, go)

    def kill(self) -> None:
        self.die()

    def close(self) -> None:
        self.connected = False
        if self.alive:
            self.connect_soon()

    def process_state(self) -> str:
        return "S"

    def sample(self, at: float) -> ProcessSample | None:
        return ProcessSample(at=at, state="S") if self.alive else None
