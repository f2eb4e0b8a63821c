"""Maintenance that is planned ahead: windows over a node or its rack, and what happens before, in and around them."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from everstep_controller.core.events import OperatorAction, OperatorCommand

from everstep.vocabulary import Action, Finding, FindingKind, Severity
from tests.sim.faults import FAULTS_BEGIN_S, FAULTS_END_S, Fault

if TYPE_CHECKING:
    from tests.sim.machine import Machine
    from tests.sim.mischief import Mischief
    from tests.sim.plan import Plan

UPKEEP_SHARE = 0.2
"""Of worlds in which maintenance is planned ahead."""
CASES = (
    "nothing",
    "reboot",
    "dies inside",
    "dies before",
    "sick inside",
    "sick before",
    "cancelled",
    "readmitted",
    "leader dies",
    "database away",
    "another follows",
    "leader stops",
)


def of_upkeep(rng: random.Random, plan: Plan) -> list[Fault]:
    """``value``: how long before; ``seconds``: from the order to the end of the window."""
    found = []
    for _ in range(rng.randint(1, 3)):
        job = rng.choice(plan.jobs)
        ahead_s, lasts_s = rng.uniform(2.0, 15.0), rng.uniform(4.0, 20.0)
        whole = rng.choice(("node", "node", "rack"))
        found.append(
            Fault(
                rng.uniform(FAULTS_BEGIN_S, FAULTS_END_S),
                "plan_window",
                rng.choice(job.nodes),
                ahead_s + lasts_s,
                f"{whole}: {rng.choice(CASES)}",
                ahead_s,
            )
        )
    return found


class Upkeep:
    """One window from its order to its end, and its case."""

    def __init__(self, mischief: Mischief, fault: Fault) -> None:
        self._mischief, self._fault = mischief, fault
        self._world = mischief.world
        self._machine = self._world.machines[fault.target]
        self._whole, _, self._case = fault.detail.partition(": ")
        self._inside_s = 0.5 * (fault.value + fault.seconds)

    def begin(self) -> None:
        """Orders the window, and asks for what its case brings."""
        self._plan(self._fault.value, self._fault.seconds)
        case = getattr(self, f"_{self._case.replace(' ', '_')}")
        case()

    def _plan(self, ahead_s: float, end_s: float) -> None:
        if (leader := self._world.leader()) is not None:
            now = leader.now()
            self._order(OperatorAction.MAINTENANCE, starts_at=now + ahead_s, until=now + end_s)

    def _order(self, kind: OperatorAction, **more: Any) -> None:
        subject = {"rack": self._machine.domain.rack} if self._whole == "rack" else {"node": self._machine.name}
        self._mischief.give(OperatorCommand(action=kind, actor="crew", reason="firmware", **subject, **more))

    def _meant(self) -> list[Machine]:
        rack = self._machine.domain.rack
        others = self._world.machines.values() if self._whole == "rack" else ()
        return [machine for machine in others if machine.domain.rack == rack] or [self._machine]

    def _after(self, seconds: float, call: Any) -> None:
        self._world.timeline.after(seconds, call)

    # --- cases -------------------------------------------------------------------------------------------------------

    def _nothing(self) -> None:
        """Nobody touches it."""

    def _reboot(self) -> None:
        for machine in self._meant():
            self._after(self._inside_s, machine.reboot)

    def _dies_inside(self) -> None:
        """And comes back in the window, or a while after its end."""
        back_s = self._fault.seconds + self._world.upkeep_rng.uniform(-4.0, 8.0)
        self._after(self._inside_s, self._machine.lose_power)
        self._after(max(back_s, self._inside_s + 1.0), self._machine.boot)

    def _dies_before(self) -> None:
        self._after(max(0.0, self._fault.value - 1.0), self._machine.lose_power)
        self._after(self._inside_s, self._machine.boot)

    def _sick_inside(self) -> None:
        """Shows what would evict it, for a while: within the window, or beyond its end."""
        self._after(self._inside_s, lambda: self._sicken(self._world.upkeep_rng.uniform(1.0, 15.0)))

    def _sick_before(self) -> None:
        self._after(max(0.0, self._fault.value - 0.5), lambda: self._sicken(self._inside_s))

    def _sicken(self, seconds: float) -> None:
        kind, clock = FindingKind.GPU_XID, self._machine.clock
        words = {"subject": "GPU-0", "severity": Severity.CRITICAL, "message": f"{kind} on GPU-0"}
        if self._machine.power:
            self._machine.raise_finding(Finding(kind=kind, since=clock.wall(), action=Action.RESET_GPU, **words))
            self._after(seconds, self._machine.clear_findings)

    def _cancelled(self) -> None:
        """In time, or too late."""
        when_s = self._fault.value * self._world.upkeep_rng.uniform(0.3, 1.1)
        self._after(when_s, lambda: self._order(OperatorAction.CANCEL_MAINTENANCE))

    def _readmitted(self) -> None:
        """One node is given back early; the others of its rack are not."""
        back = OperatorCommand(action=OperatorAction.READMIT, actor="crew", reason="done", node=self._machine.name)
        self._after(self._inside_s, lambda: self._mischief.give(back))

    def _leader_dies(self) -> None:
        """In the moment in which the window begins, or ends."""
        moment_s = self._world.upkeep_rng.choice((self._fault.value, self._fault.seconds))
        self._after(max(0.0, moment_s + self._world.upkeep_rng.uniform(-0.5, 0.2)), self._crash)

    def _crash(self) -> None:
        if (leader := self._world.leader()) is not None:
            leader.crash()

    def _leader_stops(self) -> None:
        """It wakes with the window begun by another, or over."""
        self._after(max(0.0, self._fault.value - 0.3), self._pause)

    def _pause(self) -> None:
        if (leader := self._world.leader()) is not None:
            leader.pause()
            self._after(self._world.upkeep_rng.uniform(1.0, 12.0), leader.resume)

    def _database_away(self) -> None:
        away = Fault(0.0, "database_away", seconds=self._world.upkeep_rng.uniform(1.0, 12.0))
        self._after(max(0.0, self._fault.value - 1.0), lambda: self._mischief.database_away(away))

    def _another_follows(self) -> None:
        """As the first one ends, or just before."""
        early_s = self._world.upkeep_rng.choice((0.0, 1.0))
        self._plan(self._fault.seconds - early_s, self._fault.seconds + 5.0)
