"""Check that a leader that no node reaches is soon replaced if nodes reach another controller."""

from __future__ import annotations

from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import FaultInjected
from tests.sim.processes.controller import ControllerProcess

REPLACEMENT_S = 25.0
"""Seconds within which the leader is replaced.

Agents notice the silence and contact the standby twice. The standby stores their number, and the leader waits five more
seconds. Frames may be lost or late meanwhile.
"""
CHECK_S = 0.5
"""Seconds between two checks."""

_UnreachedLeader = tuple[str, tuple[tuple[str, int, tuple[str, ...]], ...]]
"""The leader's name, and for each other controller its name, its incarnation, and the nodes that reach it."""


class LeaderReplacement(Checker):
    """Check regularly from the first cut on. Each change of the nodes that reach a controller restarts the time."""

    name = "leader_replacement"

    def __init__(self) -> None:
        self._is_checking = False
        self._key: _UnreachedLeader | None = None
        self._since = 0.0

    def handlers(self) -> Handlers:
        return {FaultInjected: self._on_fault}

    def _on_fault(self, fault: FaultInjected) -> None:
        if fault.kind in ("cut_leader", "cut_controller") and not self._is_checking:
            self._is_checking = True
            self.world.timeline.after(CHECK_S, self._check)

    def _check(self) -> None:
        now, key = self.world.timeline.now, self._find_unreached_leader()
        if key is None or key != self._key:
            self._key, self._since = key, now
        limit_s = REPLACEMENT_S * 2 ** self.world.database.standby_report().resignations
        if key is not None and now - self._since > limit_s:
            leader, others = key
            reached = ", ".join(f"{name} ({len(nodes)} nodes)" for name, _, nodes in others)
            raise Violation(self.name, f"no node has reached {leader} for {limit_s:g} s, but nodes reach {reached}")
        self.world.timeline.after(CHECK_S, self._check)

    def _find_unreached_leader(self) -> _UnreachedLeader | None:
        """Return the leader that no node reaches, with the controllers that nodes reach.

        Return None if nodes reach the leader, the database is unavailable, or nodes reach no other controller.
        """
        leader, world = self.world.leader(), self.world
        if leader is None or world.database.is_unavailable or self._reaching_nodes(leader):
            return None
        others = tuple(
            (other.name, other.incarnation, nodes)
            for other in world.controllers
            if other is not leader and other.is_alive and not other.is_paused and (nodes := self._reaching_nodes(other))
        )
        return (leader.name, others) if others else None

    def _reaching_nodes(self, controller: ControllerProcess) -> tuple[str, ...]:
        machines = self.world.machines.values()
        running = (machine.name for machine in machines if machine.agent is not None and not machine.is_frozen)
        return tuple(name for name in running if self.world.network.connected(name, controller.name))
