"""Nobody leads for long whom no node reaches, while nodes reach another controller."""

from __future__ import annotations

from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.controller_process import ControllerProcess
from tests.sim.facts import Violation

WITHIN_S = 25.0
"""Agents notice the silence, and come to the other one twice; its count is written down; the leader bears it for five
seconds; and all of that with frames that are lost, or late."""
LOOK_S = 0.5

_Unreached = tuple[str, tuple[tuple[str, int, tuple[str, ...]], ...]]
"""A leader, and the others: the name of each, its life, and the nodes that reach it."""


class Reached(Checker):
    """Looks from the first cut on; what changes in who reaches whom begins the time anew."""

    name = "reached"

    def __init__(self) -> None:
        self._looks = False
        self._key: _Unreached | None = None
        self._since = 0.0

    def watches(self) -> Watches:
        return {facts.FaultBegan: self._began}

    def _began(self, fact: facts.FaultBegan) -> None:
        if fact.kind in ("cut_leader", "cut_controller") and not self._looks:
            self._looks = True
            self.world.timeline.after(LOOK_S, self._look)

    def _look(self) -> None:
        now, key = self.world.timeline.now, self._unreached()
        if key is None or key != self._key:
            self._key, self._since = key, now
        patience_s = WITHIN_S * 2 ** self.world.database.told().resignations
        if key is not None and now - self._since > patience_s:
            leader, others = key
            reached = ", ".join(f"{name} ({len(nodes)} nodes)" for name, _, nodes in others)
            raise Violation(self.name, f"{leader} has led for {patience_s:g} s, and no node reaches it, but {reached}")
        self.world.timeline.after(LOOK_S, self._look)

    def _unreached(self) -> _Unreached | None:
        """The leader that no node reaches, and who reaches which other one; None where all is well, or nothing can be
        done."""
        leader, world = self.world.leader(), self.world
        if leader is None or world.database.away or self._reach(leader):
            return None
        others = tuple(
            (one.name, one.life, nodes)
            for one in world.controllers
            if one is not leader and one.alive and not one.paused and (nodes := self._reach(one))
        )
        return (leader.name, others) if others else None

    def _reach(self, controller: ControllerProcess) -> tuple[str, ...]:
        machines = self.world.machines.values()
        up = (machine.name for machine in machines if machine.agent is not None and not machine.frozen)
        return tuple(name for name in up if self.world.wires.connected(name, controller.name))
