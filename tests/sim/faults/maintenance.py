"""Planned maintenance: windows of a node or its rack, and faults before, during and after them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep_controller.core.events import OperatorAction, OperatorCommand
from tests.sim.faults.kinds import FAULTS_BEGIN_S, FAULTS_END_S, Fault

if TYPE_CHECKING:
    from tests.sim.cluster.machine import Machine
    from tests.sim.faults.injector import FaultInjector
    from tests.sim.faults.plan import Plan

PLANNED_MAINTENANCE_SHARE = 0.2
"""Share of the worlds in which operators order windows that begin later."""
CASES = (
    "no event",
    "reboot",
    "power loss inside",
    "power loss before",
    "finding inside",
    "finding before",
    "cancelled",
    "readmitted early",
    "leader crash",
    "database outage",
    "next window",
    "leader pause",
)
"""What happens to a window, and to its machines. Each is a method of ``PlannedMaintenance``."""


def maintenance_faults(rng: random.Random, plan: Plan) -> list[Fault]:
    """Return maintenance windows.

    A fault's ``value`` is the seconds from its time to the start of the window, its ``seconds`` those to the end.
    """
    faults = []
    for _ in range(rng.randint(1, 3)):
        job = rng.choice(plan.jobs)
        start_s, duration_s = rng.uniform(2.0, 15.0), rng.uniform(4.0, 20.0)
        scope = rng.choice(("node", "node", "rack"))
        faults.append(
            Fault(
                rng.uniform(FAULTS_BEGIN_S, FAULTS_END_S),
                "plan_window",
                rng.choice(job.nodes),
                start_s + duration_s,
                f"{scope}: {rng.choice(CASES)}",
                start_s,
            )
        )
    return faults


class PlannedMaintenance:
    """One maintenance window, with one of ``CASES``."""

    def __init__(self, injector: FaultInjector, fault: Fault) -> None:
        self._injector, self._fault = injector, fault
        self._world = injector.world
        self._machine = self._world.machines[fault.target]
        self._scope, _, self._case = fault.detail.partition(": ")
        self._middle_s = 0.5 * (fault.value + fault.seconds)

    def begin(self) -> None:
        """Order the window, and schedule its case."""
        self._order_window(self._fault.value, self._fault.seconds)
        case = getattr(self, f"_{self._case.replace(' ', '_')}")
        case()

    def _order_window(self, start_s: float, end_s: float) -> None:
        if (leader := self._world.leader()) is not None:
            now = leader.now()
            self._send_command(OperatorAction.MAINTENANCE, starts_at=now + start_s, until=now + end_s)

    def _send_command(self, kind: OperatorAction, **fields: Any) -> None:
        subject: dict[str, Any] = (
            {"rack": self._machine.domain.rack} if self._scope == "rack" else {"node": self._machine.name}
        )
        self._injector.send_command(
            OperatorCommand(action=kind, actor="operators", reason="firmware", **subject, **fields)
        )

    def _affected_machines(self) -> list[Machine]:
        rack = self._machine.domain.rack
        others = self._world.machines.values() if self._scope == "rack" else ()
        return [machine for machine in others if machine.domain.rack == rack] or [self._machine]

    def _after(self, seconds: float, call: Any) -> None:
        self._world.timeline.after(seconds, call)

    def _no_event(self) -> None:
        """Let the window pass without any event."""

    def _reboot(self) -> None:
        for machine in self._affected_machines():
            self._after(self._middle_s, machine.reboot)

    def _power_loss_inside(self) -> None:
        """Lose power during the window, and boot before or after its end."""
        boot_s = self._fault.seconds + self._world.maintenance_rng.uniform(-4.0, 8.0)
        self._after(self._middle_s, self._machine.lose_power)
        self._after(max(boot_s, self._middle_s + 1.0), self._machine.boot)

    def _power_loss_before(self) -> None:
        self._after(max(0.0, self._fault.value - 1.0), self._machine.lose_power)
        self._after(self._middle_s, self._machine.boot)

    def _finding_inside(self) -> None:
        """Raise a finding that would evict the node, until some time before or after the window's end."""
        self._after(self._middle_s, lambda: self._raise_finding(self._world.maintenance_rng.uniform(1.0, 15.0)))

    def _finding_before(self) -> None:
        self._after(max(0.0, self._fault.value - 0.5), lambda: self._raise_finding(self._middle_s))

    def _raise_finding(self, seconds: float) -> None:
        kind, clock = FindingKind.GPU_XID, self._machine.clock
        fields: dict[str, Any] = {"subject": "GPU-0", "severity": Severity.CRITICAL, "message": f"{kind} on GPU-0"}
        if self._machine.has_power:
            self._machine.raise_finding(Finding(kind=kind, since=clock.wall(), action=Action.RESET_GPU, **fields))
            self._after(seconds, self._machine.clear_findings)

    def _cancelled(self) -> None:
        """Cancel the window before or after it begins."""
        when_s = self._fault.value * self._world.maintenance_rng.uniform(0.3, 1.1)
        self._after(when_s, lambda: self._send_command(OperatorAction.CANCEL_MAINTENANCE))

    def _readmitted_early(self) -> None:
        """Readmit one node early, but not the others of its rack."""
        command = OperatorCommand(
            action=OperatorAction.READMIT, actor="operators", reason="done", node=self._machine.name
        )
        self._after(self._middle_s, lambda: self._injector.send_command(command))

    def _leader_crash(self) -> None:
        """Kill the leader when the window begins or ends."""
        moment_s = self._world.maintenance_rng.choice((self._fault.value, self._fault.seconds))
        self._after(max(0.0, moment_s + self._world.maintenance_rng.uniform(-0.5, 0.2)), self._crash)

    def _crash(self) -> None:
        if (leader := self._world.leader()) is not None:
            leader.crash()

    def _leader_pause(self) -> None:
        """Pause the leader just before the window. It resumes within the window or after it."""
        self._after(max(0.0, self._fault.value - 0.3), self._pause)

    def _pause(self) -> None:
        if (leader := self._world.leader()) is not None:
            leader.pause()
            self._after(self._world.maintenance_rng.uniform(1.0, 12.0), leader.resume)

    def _database_outage(self) -> None:
        outage = Fault(0.0, "stop_database", seconds=self._world.maintenance_rng.uniform(1.0, 12.0))
        self._after(max(0.0, self._fault.value - 1.0), lambda: self._injector.stop_database(outage))

    def _next_window(self) -> None:
        """Order another window that starts when the first one ends, or just before."""
        early_s = self._world.maintenance_rng.choice((0.0, 1.0))
        self._order_window(self._fault.seconds - early_s, self._fault.seconds + 5.0)
