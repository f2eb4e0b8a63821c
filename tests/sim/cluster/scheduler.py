"""Simulate the cluster's scheduler: its cordons, its resets and reboots of nodes, and its repair shop.

For each node it remembers only the newest requested reset or reboot, as a reason in Slurm or an annotation in
Kubernetes does. An older request that comes again is performed again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.errors import Conflict, EverstepError, Unavailable
from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.events import OperatorAction, OperatorCommand
from everstep_controller.remediation.remediator import CORDON_OWNER, CordonStatus
from tests.sim.cluster.observations import CommandAccepted, CordonChanged, RemediationPerformed

if TYPE_CHECKING:
    from tests.sim.cluster.world import World

HOST = "scheduler"
"""The scheduler's host name in the network."""
READMISSION_RETRY_S = 1.0
"""Seconds until the repair shop asks again for a readmission if no controller leads."""
REFUSED_SHARE = 0.1
"""Share of resets and reboots that the scheduler refuses."""
CLEARING_SHARE = 0.8
"""Share of resets and reboots after which the node's findings end."""
SLOW_SHARE = 0.1
"""Share of resets and reboots that take about as long as the executor waits."""
FORGOTTEN_SHARE = 0.05
"""Share of resets and reboots that the scheduler accepts and never performs."""
BOOT_S = 8.0
"""Seconds after which a reboot counts as done."""
READMISSION_S = 8.0
"""Seconds between the reboot of a repaired node and its readmission."""
RESETS = (RemediationKind.RESET_GPU, RemediationKind.REBOOT)
"""Kinds of remediations that act on the machine at once."""


class _NodeStatus:
    """A node's status in the scheduler.

    ``reset``: ID of the newest requested reset or reboot. ``is_reset``: whether it is done. ``repair``: ID of the
    newest requested repair.
    """

    def __init__(self) -> None:
        self.cordoned_by = ""
        self.reason = ""
        self.reset = ""
        self.is_reset = True
        self.repair = ""


class Scheduler:
    """The scheduler that all controllers share.

    Attributes:
        is_unavailable: Whether no call is answered.
        extra_delay_s: Seconds added to each call and to each answer.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(world.plan.seed ^ 0x0DD)
        self.is_unavailable = False
        self.extra_delay_s = 0.0
        self._nodes = {name: _NodeStatus() for name in world.machines}

    def cordon(self, node: str, by: str, reason: str) -> None:
        """Cordon the node as another owner, which replaces an earlier owner."""
        status = self._nodes[node]
        status.cordoned_by, status.reason = by, reason
        self.world.observe(CordonChanged(node, by))

    def uncordon(self, node: str) -> None:
        """Remove the cordon of any owner."""
        self._nodes[node].cordoned_by = self._nodes[node].reason = ""
        self.world.observe(CordonChanged(node, ""))

    def cordoned(self) -> dict[str, str]:
        """Return the cordoned nodes with the owners of their cordons."""
        return {name: status.cordoned_by for name, status in self._nodes.items() if status.cordoned_by}

    def cordon_status(self, nodes: Sequence[str]) -> dict[str, CordonStatus]:
        """Return the cordons of the nodes."""
        found = {name: self._nodes[name] for name in nodes}
        return {name: CordonStatus(cordoned_by=node.cordoned_by, reason=node.reason) for name, node in found.items()}

    def is_done(self, remediation: Remediation) -> bool:
        """Return whether the remediation has taken effect."""
        status = self._nodes[remediation.node]
        match remediation.kind:
            case RemediationKind.CORDON:
                return bool(status.cordoned_by)
            case RemediationKind.UNCORDON:
                return not status.cordoned_by
            case RemediationKind.REPAIR:
                return status.repair == remediation.id
            case _:
                return status.reset == remediation.id and status.is_reset

    def apply(self, remediation: Remediation) -> None:
        """Accept a remediation. A repeated request changes nothing.

        Raises:
            Conflict: The scheduler refuses, or another owner has cordoned the node.
            Unavailable: An earlier reset or reboot of the node is not done.
        """
        status = self._nodes[remediation.node]
        if self.is_done(remediation) or status.reset == remediation.id:
            return
        if status.cordoned_by not in ("", CORDON_OWNER):
            raise Conflict(f"{remediation.node} is out of service by {status.cordoned_by}")
        if remediation.kind in RESETS and not status.is_reset:
            raise Unavailable(f"{remediation.node} is being reset for another reason")
        if remediation.kind in RESETS and self.rng.random() < REFUSED_SHARE:
            raise Conflict("not now")
        self._accept(status, remediation)

    def _accept(self, status: _NodeStatus, remediation: Remediation) -> None:
        match remediation.kind:
            case RemediationKind.CORDON:
                status.cordoned_by, status.reason = CORDON_OWNER, remediation.sentence
            case RemediationKind.UNCORDON:
                status.cordoned_by = status.reason = ""
            case RemediationKind.REPAIR:
                status.cordoned_by, status.reason, status.repair = CORDON_OWNER, remediation.sentence, remediation.id
                self.world.observe(RemediationPerformed(remediation.id, remediation.node, remediation.kind))
                self.world.timeline.after(4.0 + 6.0 * self.rng.random(), lambda: self._end_repair(remediation.node))
            case _:
                status.reset, status.is_reset = remediation.id, False
                self.world.timeline.after(self._draw_delay_s(), lambda: self._reset(status, remediation))

    def _draw_delay_s(self) -> float:
        return 8.0 + 6.0 * self.rng.random() if self.rng.random() < SLOW_SHARE else 0.5 + 3.0 * self.rng.random()

    def _reset(self, status: _NodeStatus, remediation: Remediation) -> None:
        if self.rng.random() < FORGOTTEN_SHARE:
            self.world.trace(HOST, f"{remediation.id}: {remediation.kind} of {remediation.node} is forgotten")
            status.reset, status.is_reset = "", True
            return
        machine = self.world.machines[remediation.node]
        self.world.observe(RemediationPerformed(remediation.id, remediation.node, remediation.kind))
        if self.rng.random() < CLEARING_SHARE:
            self.world.timeline.after(4.0 * self.rng.random(), machine.clear_findings)
        if remediation.kind is RemediationKind.REBOOT:
            machine.reboot()
        done_s = BOOT_S if remediation.kind is RemediationKind.REBOOT else 0.0
        self.world.timeline.after(done_s, lambda: setattr(status, "is_reset", True))

    def _end_repair(self, node: str) -> None:
        """Return the node from the repair shop with other GPUs. The shop asks for its readmission."""
        machine = self.world.machines[node]
        machine.replace_gpus()
        machine.reboot()
        action, trace = OperatorAction.READMIT, self.world.trace_id("repair-shop")
        command = OperatorCommand(action=action, actor="repair shop", reason="GPUs replaced", node=node, trace=trace)
        self.world.timeline.after(READMISSION_S, lambda: self._readmit(command))

    def _readmit(self, command: OperatorCommand) -> None:
        leader = self.world.leader()
        if leader is None:
            self.world.timeline.after(READMISSION_RETRY_S, lambda: self._readmit(command))
            return

        def answered(error: EverstepError | None) -> None:
            if error is None:
                self.world.observe(CommandAccepted(str(command.action), command.node or "", ""))

        leader.submit_command(command, answered)
