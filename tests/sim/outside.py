"""The world outside: a scheduler with its cordons, a machine room that resets and reboots, and a workshop.

It remembers of each node the newest cure that it was asked for, as a reason or an annotation would, and no other: who
comes with an older one has it done again.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep_controller.core.effects import Remediation, RemediationKind
from everstep_controller.core.events import OperatorAction, OperatorCommand
from everstep_controller.remediation.remediator import CORDON_OWNER, CordonStatus

from everstep.errors import Conflict, EverstepError, Unavailable
from tests.sim import facts

if TYPE_CHECKING:
    from tests.sim.world import World

NAME = "scheduler"
"""Its place in the network."""
TOLD_AGAIN_S = 1.0
REFUSED_SHARE = 0.1
CURED_SHARE = 0.8
SLOW_SHARE = 0.1
FORGOTTEN_SHARE = 0.05
BOOTED_S = 8.0
CURES = (RemediationKind.RESET_GPU, RemediationKind.REBOOT)


class _Node:
    """What it shows of a node. ``cure``: the newest that was asked for; ``cured``: it is done."""

    def __init__(self) -> None:
        self.cordoned_by = ""
        self.reason = ""
        self.cure = ""
        self.cured = True
        self.repair = ""


class Outside:
    """One for all controllers. ``away``: it answers nobody; ``slow_s``: how much longer an answer takes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(world.plan.seed ^ 0x0DD)
        self.away = False
        self.slow_s = 0.0
        self._nodes = {name: _Node() for name in world.machines}

    # --- people and other programs -----------------------------------------------------------------------------------

    def cordon(self, node: str, by: str, reason: str) -> None:
        """Somebody else takes the node out of service: whoever had done so before counts no more."""
        shown = self._nodes[node]
        shown.cordoned_by, shown.reason = by, reason
        self.world.see(facts.Cordoned(node, by))

    def uncordon(self, node: str) -> None:
        self._nodes[node].cordoned_by = self._nodes[node].reason = ""
        self.world.see(facts.Cordoned(node, ""))

    def cordoned(self) -> dict[str, str]:
        """Who keeps which node out of service."""
        return {name: node.cordoned_by for name, node in self._nodes.items() if node.cordoned_by}

    # --- what a controller asks --------------------------------------------------------------------------------------

    def cordon_status(self, nodes: Sequence[str]) -> dict[str, CordonStatus]:
        shown = {name: self._nodes[name] for name in nodes}
        return {n: CordonStatus(cordoned_by=one.cordoned_by, reason=one.reason) for n, one in shown.items()}

    def is_done(self, remedy: Remediation) -> bool:
        node = self._nodes[remedy.node]
        match remedy.kind:
            case RemediationKind.CORDON:
                return bool(node.cordoned_by)
            case RemediationKind.UNCORDON:
                return not node.cordoned_by
            case RemediationKind.REPAIR:
                return node.repair == remedy.id
            case _:
                return node.cure == remedy.id and node.cured

    def apply(self, remedy: Remediation) -> None:
        node = self._nodes[remedy.node]
        if self.is_done(remedy) or node.cure == remedy.id:
            return
        if node.cordoned_by not in ("", CORDON_OWNER):
            raise Conflict(f"{remedy.node} is out of service by {node.cordoned_by}")
        if remedy.kind in CURES and not node.cured:
            raise Unavailable(f"{remedy.node} is being treated for another reason")
        if remedy.kind in CURES and self.rng.random() < REFUSED_SHARE:
            raise Conflict("not now")
        self._take(node, remedy)

    def _take(self, node: _Node, remedy: Remediation) -> None:
        match remedy.kind:
            case RemediationKind.CORDON:
                node.cordoned_by, node.reason = CORDON_OWNER, remedy.sentence
            case RemediationKind.UNCORDON:
                node.cordoned_by = node.reason = ""
            case RemediationKind.REPAIR:
                node.cordoned_by, node.reason, node.repair = CORDON_OWNER, remedy.sentence, remedy.id
                self.world.see(facts.RemedyCarriedOut(remedy.id, remedy.node, remedy.kind))
                self.world.timeline.after(4.0 + 6.0 * self.rng.random(), lambda: self._repaired(remedy.node))
            case _:
                node.cure, node.cured = remedy.id, False
                self.world.timeline.after(self._takes_s(), lambda: self._carry_out(node, remedy))

    def _takes_s(self) -> float:
        return 8.0 + 6.0 * self.rng.random() if self.rng.random() < SLOW_SHARE else 0.5 + 3.0 * self.rng.random()

    # --- what comes of it --------------------------------------------------------------------------------------------

    def _carry_out(self, node: _Node, remedy: Remediation) -> None:
        if self.rng.random() < FORGOTTEN_SHARE:
            self.world.trace("outside", f"{remedy.id}: {remedy.kind} of {remedy.node} is forgotten")
            node.cure, node.cured = "", True
            return
        machine = self.world.machines[remedy.node]
        self.world.see(facts.RemedyCarriedOut(remedy.id, remedy.node, remedy.kind))
        if self.rng.random() < CURED_SHARE:
            self.world.timeline.after(4.0 * self.rng.random(), machine.clear_findings)
        if remedy.kind is RemediationKind.REBOOT:
            machine.reboot()
        back_s = BOOTED_S if remedy.kind is RemediationKind.REBOOT else 0.0
        self.world.timeline.after(back_s, lambda: setattr(node, "cured", True))

    def _repaired(self, node: str) -> None:
        """Back from the workshop with other GPUs; whoever mended it gives it back."""
        machine = self.world.machines[node]
        machine.replace_gpus()
        machine.reboot()
        kind, trace = OperatorAction.READMIT, self.world.trace_id("workshop")
        back = OperatorCommand(action=kind, actor="workshop", reason="GPUs replaced", node=node, trace=trace)
        self.world.timeline.after(8.0, lambda: self._give_back(back))

    def _give_back(self, command: OperatorCommand) -> None:
        leader = self.world.leader()
        if leader is None:
            self.world.timeline.after(TOLD_AGAIN_S, lambda: self._give_back(command))
            return

        def answered(error: EverstepError | None) -> None:
            if error is None:
                self.world.see(facts.Ordered(str(command.action), command.node or "", ""))

        leader.order(command, answered)
