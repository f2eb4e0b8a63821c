"""Nobody is lost by silence sooner than the policy says, nor for what was before the controller began, nor while so
many are silent that the network or the controller is suspected."""

from __future__ import annotations

from everstep_controller.core.effects import Audit
from everstep_controller.core.events import (
    AgentRegistered,
    ControllerStarted,
    HeartbeatChanged,
    NodeDisconnected,
    NodeSeen,
    ReportArrived,
    Tick,
)

from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation

DAWDLES_S = 1.0
"""In which a silence that is over its limit is looked at."""


class Silences(Checker):
    """Knows when each node was heard, since when the controller has listened, and whose connection closed."""

    name = "silences"

    def __init__(self) -> None:
        self._listens_since = 0.0
        self._lives: dict[str, int] = {}
        self._closed: dict[str, float] = {}
        self._expected: set[str] = set()

    def watches(self) -> Watches:
        return {facts.Decided: self._handled}

    def _handled(self, fact: facts.Decided) -> None:
        leader = self.world.leader()
        if leader is None:
            return
        event, policy = fact.event, self.world.plan.policy
        if isinstance(event, ControllerStarted):
            self._listens_since, self._closed = fact.at, {}
            self._expected = {node for node, record in leader.state.nodes.items() if record.liveness.reachable}
        elif isinstance(event, Tick) and event.lag_s > policy.suspect_after_s / 2:
            self._listens_since = fact.at
        elif isinstance(event, AgentRegistered):
            self._lives[event.register.node] = event.register.incarnation
            self._closed.pop(event.register.node, None)
        elif isinstance(event, NodeDisconnected) and self._lives.get(event.node, 0) <= event.incarnation:
            self._closed.setdefault(event.node, fact.at)
        elif isinstance(event, NodeSeen | ReportArrived | HeartbeatChanged):
            self._closed.pop(event.node, None)
            for node, _ in event.others if isinstance(event, NodeSeen) else ():
                self._closed.pop(node, None)
        heard = {node: live.heartbeats.last_seen_at for node, live in leader.state.node_runtime.items()}
        self._closed = {node: at for node, at in self._closed.items() if heard.get(node, fact.at) <= at}
        for effect in fact.effects:
            if isinstance(effect, Audit) and effect.entry.kind == "node.lost":
                self._lost(effect.entry.node or "", fact.at, heard)
        self._expected = {node for node, record in leader.state.nodes.items() if record.liveness.reachable}

    def _lost(self, node: str, now: float, heard: dict[str, float]) -> None:
        policy = self.world.plan.policy
        since = max(heard[node], self._listens_since)
        silent_s, closed_s = now - since, now - self._closed.get(node, now)
        if silent_s < policy.lost_after_s and closed_s < policy.disconnect_grace_s:
            words = f"{node} is lost after {silent_s:.2f} s of silence, {closed_s:.2f} s after its connection closed"
            raise Violation(self.name, words)
        if max(silent_s, closed_s) < policy.correlated_silence_max_s and self._many_are_silent(now, heard):
            words = f"{node} is lost after {silent_s:.2f} s, while so many are silent that nobody is to be"
            raise Violation(self.name, words)

    def _many_are_silent(self, now: float, heard: dict[str, float]) -> bool:
        """Beyond all doubt: of the whole fleet."""
        policy = self.world.plan.policy
        silent_at = now - policy.suspect_after_max_s - DAWDLES_S
        silent = {n for n in self._expected if max(heard[n], self._listens_since) < silent_at or n in self._closed}
        share = max(policy.correlated_silence_min_nodes, policy.correlated_silence_share * len(self._expected))
        return len(silent) >= share or (silent == self._expected and len(silent) >= 2)
