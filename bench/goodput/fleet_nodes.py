"""Nodes that register, offer themselves to one job, and are remediated, probed, repaired and readmitted."""

from __future__ import annotations

from dataclasses import dataclass

from bench.goodput.fleet_time import FleetInTime, Node, Observer
from everstep.errors import EverstepError
from everstep.vocabulary import NodeState
from everstep.wire.v1.agent import Domain, Gpu, Register
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import JobSpec, LauncherJoined, ProbeFinished
from everstep_controller.core import events as ev
from everstep_controller.core.effects import RemediationKind
from everstep_controller.core.policy import CorePolicy

JOB = "run"
REBOOT_S = 300.0


@dataclass(frozen=True)
class FleetPlan:
    """The fleet and its operators.

    ``nodes``: nodes of the job. ``spares``: nodes beside them. ``reset_s``: seconds after which an operator resets a
    latched breaker. ``transients_per_node_day``: short harmless absences.
    """

    nodes: int
    spares: int
    hours: float
    per_rack: int = 16
    least_share: float = 0.9
    reset_s: float = 900.0
    transients_per_node_day: float = 0.05


class FleetOfNodes(FleetInTime):
    """Nodes as they behave without faults and after repairs."""

    def __init__(
        self, plan: FleetPlan, policy: CorePolicy, *, eager: bool = False, observe: Observer | None = None
    ) -> None:
        super().__init__(policy, plan.nodes + plan.spares, plan.hours, eager=eager, observe=observe)
        self.plan = plan

    def _register(self, node: Node) -> None:
        node.life += 1
        self._numbers[node.name] = 0
        index = int(node.name[1:])
        gpu = Gpu(index=0, uuid=f"{node.name}-{node.gpus}", name="H100", pci_bus_id="0", memory_bytes=80 << 30)
        rack = f"r{index // self.plan.per_rack}"
        register = Register(
            protocols=(1,),
            node=node.name,
            incarnation=node.life,
            agent_version="1",
            vault=f"{node.name}:7000",
            boot_id=f"{node.name}-{node.boots}",
            domain=Domain(rack=rack, switch=rack),
            gpus=(gpu,),
            findings=node.findings,
        )
        node.sleeps = False
        self._handle(ev.AgentRegistered(register=register, trace=self._trace()))
        self._beat_until_well(node, node.life)

    def _join(self, node: Node) -> None:
        plan = self.plan
        spec = JobSpec(job=JOB, min_nodes=int(plan.least_share * plan.nodes), max_nodes=plan.nodes, digest_interval=10)
        joined = LauncherJoined(
            job=JOB, at=self.now, spec=spec, launcher=node.boots + 1, store=f"{node.name}:8000", generation=0
        )
        self._report(node, joined)

    def _back(self, node: Node) -> None:
        """Let the node return: its agent registers, and its launcher joins."""
        if node.away_until is None or node.away_until > self.now + 1e-6:
            return
        node.away_until = None
        self._register(node)
        self._join(node)

    def _repaired(self, node: Node, cause: str) -> None:
        """Repair the node. An operator readmits it if its state requires that."""
        if node.ill != cause or node.ill_until > self.now + 1e-6:
            return
        node.ill, node.findings, node.lies = "", (), False
        node.gpus += 1
        node.boots += 1
        if node.away_until is None:
            self._register(node)
            self._join(node)
        else:
            node.away_until = self.now
            self._back(node)
        record = self.state.nodes[node.name]
        if record.quarantine.needs_operator or record.state in (NodeState.REPAIR, NodeState.HELD):
            self._command(ev.OperatorAction.READMIT, node.name)
            self._beat_until_well(node, node.life)
        job = self.state.jobs[JOB]
        if node.name in job.membership.excluded_nodes or not job.membership.launchers[node.name].usable:
            self._command(ev.OperatorAction.READMIT, node.name)

    def _remedy(self, remedy: str, name: str, kind: RemediationKind) -> None:
        """Carry out a remediation. It does not mend the fault, which lasts until the repair."""
        wait_s = REBOOT_S if kind in (RemediationKind.REBOOT, RemediationKind.RESET_GPU) else 1.0
        event = ev.RemediationFinished(remediation_id=remedy, node=name, succeeded=True, trace=self._trace())
        self._after(wait_s, lambda: self._handle(event))

    def _probe(self, name: str, body: RunProbe) -> None:
        well = all(self.by_name[n].away_until is None and not self.by_name[n].ill for n in body.nodes)
        rows = ((8, 1e-5, 1e11),) if well else ()
        detail = "" if well else "failed"
        answer = ProbeFinished(probe=body.probe, ok=well, detail=detail, rows=rows, started=True)
        self._report(self.by_name[name], answer)

    def _command(self, kind: ev.OperatorAction, node: str | None = None) -> None:
        command = ev.OperatorCommand(action=kind, actor="on call", reason="mended", node=node, trace=self._trace())
        try:
            self._handle(command)
        except EverstepError:
            pass  # the node is already in the requested state

    def _able(self, name: str) -> bool:
        node = self.by_name[name]
        return node.away_until is None and not node.findings

    def _fit(self, node: Node, states: tuple[NodeState, ...]) -> bool:
        record = self.state.nodes.get(node.name)
        return record is not None and record.state in states and node.away_until is None and not node.ill
