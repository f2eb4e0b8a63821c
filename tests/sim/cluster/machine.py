"""Simulate one machine: its power, its clock, its sensors' findings, and the processes on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.vocabulary import Finding, ProbeKind
from everstep.wire.v1.agent import Domain, Gpu
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import FindingCleared, FindingRaised, ProbeFinished
from everstep_agent.uplink.heartbeat import NodeDescription
from tests.sim.cluster.observations import MemoryLost, ProbeCompleted
from tests.sim.cluster.timeline import MachineClock
from tests.sim.processes.agent import AgentProcess
from tests.sim.processes.launcher import Launcher
from tests.sim.processes.vault import VaultProcess
from tests.sim.processes.vault_memory import VaultMemory

if TYPE_CHECKING:
    from tests.sim.cluster.world import World
    from tests.sim.faults.plan import JobPlan

SYNTHETIC_WORK_DETECTION_SHARE = 0.4
"""Share of probes with synthetic work that detect a GPU that computes wrongly (SDCHunter, OSDI 2026)."""


class Machine:
    """A simulated machine.

    Attributes:
        slowness: The factor by which its steps take longer.
        computes_wrongly: Whether its GPUs compute wrongly without an error.
        audits_wrongly: Whether its GPUs compute wrongly only in audits of other ranks.
        probes_fail: Whether its pair probes fail.
        assigned_jobs: The jobs whose launchers it starts after a boot, by name.
    """

    def __init__(self, world: World, name: str, domain: Domain, clock: MachineClock, spool_dir: Path) -> None:
        self.world = world
        self.name = name
        self.domain = domain
        self.clock = clock
        self.has_power = False
        self.is_frozen = False
        self.slowness = 1.0
        self.computes_wrongly = self.audits_wrongly = False
        self.probes_fail = False
        self.vault_memory = VaultMemory()
        self.vault_process = VaultProcess(self)
        self.agent: AgentProcess | None = None
        self.launchers: dict[str, Launcher] = {}
        self.assigned_jobs: dict[str, JobPlan] = {}
        self._spool_file = spool_dir / f"{name}.spool"
        self._incarnation = 0
        self._boot = 0
        self._gpu_series = 0
        self._findings: dict[str, Finding] = {}
        self._postponed: list[Callable[[], None]] = []

    def boot(self) -> None:
        """Turn the power on. Agent and launchers start within seconds."""
        if self.has_power:
            return
        self.has_power, self.is_frozen = True, False
        self._boot += 1
        rng, timeline = self.world.rng, self.world.timeline
        timeline.after(0.2 + rng.random(), self.start_agent)
        for job in self.assigned_jobs.values():
            timeline.after(0.5 + 2.0 * rng.random(), lambda j=job: self.start_launcher(j))  # type: ignore[misc]

    def lose_power(self) -> None:
        """Lose all processes and memory at once. Peers do not see their connections close."""
        if not self.has_power:
            return
        self.has_power = self.is_frozen = False
        self.vault_memory.clear()
        self.vault_process.lose_power()
        self.world.observe(MemoryLost(self.name))
        self.world.network.drop_unsent_frames(self.name)
        agent, self.agent = self.agent, None
        if agent is not None:
            agent.die(with_machine=True)
        for launcher in list(self.launchers.values()):
            launcher.die(with_machine=True)
        self.launchers.clear()
        self._postponed.clear()
        self._spool_file.unlink(missing_ok=True)

    def reboot(self) -> None:
        """Reboot in order: the agent's connections close before the power goes off."""
        if not self.has_power:
            self.boot()
            return
        self.kill_agent(restart=False)
        self.lose_power()
        self.world.timeline.after(3.0 + 4.0 * self.world.rng.random(), self.boot)

    def freeze(self) -> None:
        """Hang the kernel: no process runs, and no connection closes."""
        if self.has_power:
            self.is_frozen = True

    def unfreeze(self) -> None:
        """End the hang, and make the postponed calls."""
        if not self.is_frozen:
            return
        self.is_frozen = False
        calls, self._postponed = self._postponed, []
        for call in calls:
            call()
        for launcher in list(self.launchers.values()):
            for rank in list(launcher.ranks.values()):
                if not rank.is_stopped:
                    rank.resume()

    def call_when_unfrozen(self, call: Callable[[], None]) -> None:
        """Postpone a call until the hang ends."""
        self._postponed.append(call)

    def start_agent(self) -> None:
        """Start the agent if it does not run."""
        if self.is_frozen:
            self.call_when_unfrozen(self.start_agent)
            return
        if not self.has_power or self.agent is not None:
            return
        self._incarnation = max(int(self.clock.wall() * 1000), self._incarnation + 1)
        self.agent = AgentProcess(self, self._incarnation, self._spool_file)
        for launcher in self.launchers.values():
            launcher.connect_soon()

    def kill_agent(self, *, restart: bool = True) -> None:
        """Kill the agent by SIGKILL. With ``restart`` its supervisor starts it again."""
        agent, self.agent = self.agent, None
        if agent is None:
            return
        agent.die()
        for launcher in self.launchers.values():
            launcher.handle_agent_death()
        if restart:
            self.world.timeline.after(0.2 + 1.3 * self.world.rng.random(), self.start_agent)

    def start_launcher(self, job: JobPlan) -> None:
        """Start the job's launcher if it does not run and the job has not ended."""
        if self.is_frozen:
            self.call_when_unfrozen(lambda: self.start_launcher(job))
            return
        if self.has_power and job.name not in self.launchers and job.name not in self.world.finished_jobs:
            self.launchers[job.name] = Launcher(self, job)

    def describe_node(self) -> NodeDescription:
        """Return the description that the agent registers."""
        gpu = Gpu(index=0, uuid=f"GPU-{self.name}-{self._gpu_series}", name="sim", pci_bus_id="0", memory_bytes=1 << 30)
        return NodeDescription(
            vault=f"{self.name}:7000",
            boot_id=f"{self.name}-boot-{self._boot}",
            driver_version="570.1",
            domain=self.domain,
            gpus=(gpu,),
        )

    def findings(self) -> tuple[Finding, ...]:
        """Return the findings of the machine's sensors."""
        return tuple(self._findings.values())

    def raise_finding(self, finding: Finding) -> None:
        """Raise a sensor's finding: an urgent report now, and part of every heartbeat's findings from now on."""
        self._findings[finding.key] = finding
        if self.agent is not None and not self.is_frozen:
            self.agent.report(FindingRaised(finding=finding))
            self.agent.send_heartbeat_now()

    def clear_findings(self) -> None:
        """Clear all findings of the machine's sensors."""
        cleared, self._findings = self._findings, {}
        for key in cleared:
            if self.agent is not None:
                self.agent.report(FindingCleared(key=key))
        if cleared and self.agent is not None:
            self.agent.send_heartbeat_now()

    def replace_gpus(self) -> None:
        """Replace the GPUs by good ones, as a repair does."""
        self._gpu_series += 1
        self.computes_wrongly = self.audits_wrongly = self.probes_fail = False
        self._findings.clear()

    def run_probe(self, body: RunProbe, on_result: Callable[[ProbeFinished], None]) -> None:
        """Run a probe, and call ``on_result`` at its end. A machine without power never answers."""

        def finish() -> None:
            if self.has_power and not self.is_frozen:
                result = self._all_reduce(body) if body.kind is ProbeKind.ALL_REDUCE else self._synthetic_work(body)
                self.world.observe(ProbeCompleted(self.name, body.probe, result.ok))
                on_result(result)

        self.world.timeline.after(0.1 + 0.4 * self.world.rng.random(), finish)

    def _all_reduce(self, body: RunProbe) -> ProbeFinished:
        """Return success if all members run, reach one another and have good links."""
        members = [self.world.machines[node] for node in body.nodes]
        ok = all(m.has_power and not m.is_frozen and not m.probes_fail for m in members) and all(
            self.world.network.connected(self.name, m.name) for m in members
        )
        detail = "" if ok else "no connection"
        return ProbeFinished(probe=body.probe, ok=ok, detail=detail, rows=((8, 1e-4, 1e9),), started=True)

    def _synthetic_work(self, body: RunProbe) -> ProbeFinished:
        """Run synthetic work, which detects a GPU that computes wrongly in a part of the cases."""
        wrong = self.computes_wrongly and self.world.rng.random() < SYNTHETIC_WORK_DETECTION_SHARE
        detail = "wrong result" if wrong else ""
        return ProbeFinished(probe=body.probe, ok=not wrong, detail=detail, wrong_result=wrong, started=True)
