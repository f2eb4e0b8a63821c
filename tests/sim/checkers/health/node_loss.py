"""Check that no node is lost by silence earlier than the policy allows.

Silence before the controller began does not count, and no node is lost during a correlated silence.
"""

from __future__ import annotations

from everstep_controller.core.effects import AppendToEventLog
from everstep_controller.core.events import (
    AgentRegistered,
    ControllerStarted,
    HeartbeatChanged,
    NodeDisconnected,
    NodeSeen,
    ReportArrived,
    Tick,
)
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import LeaderDecided

CHECK_DELAY_S = 1.0
"""Seconds within which the controller checks a node whose silence has passed the limit."""


class NodeLoss(Checker):
    """Track when each node was last seen, when the controller began to receive, and when connections closed."""

    name = "node_loss"

    def __init__(self) -> None:
        self._receiving_since = 0.0
        self._incarnations: dict[str, int] = {}
        self._closed_at: dict[str, float] = {}
        self._expected: set[str] = set()

    def handlers(self) -> Handlers:
        return {LeaderDecided: self._on_decision}

    def _on_decision(self, decision: LeaderDecided) -> None:
        leader = self.world.leader()
        if leader is None:
            return
        event, policy = decision.event, self.world.plan.policy
        if isinstance(event, ControllerStarted):
            self._receiving_since, self._closed_at = decision.at, {}
            self._expected = {node for node, record in leader.state.nodes.items() if record.liveness.reachable}
        elif isinstance(event, Tick) and event.lag_s > policy.liveness.suspect_after_s / 2:
            self._receiving_since = decision.at
        elif isinstance(event, AgentRegistered):
            self._incarnations[event.register.node] = event.register.incarnation
            self._closed_at.pop(event.register.node, None)
        elif isinstance(event, NodeDisconnected) and self._incarnations.get(event.node, 0) <= event.incarnation:
            self._closed_at.setdefault(event.node, decision.at)
        elif isinstance(event, NodeSeen | ReportArrived | HeartbeatChanged):
            self._closed_at.pop(event.node, None)
            for node, _ in event.others if isinstance(event, NodeSeen) else ():
                self._closed_at.pop(node, None)
        last_seen = {node: runtime.heartbeats.last_seen_at for node, runtime in leader.state.node_runtime.items()}
        self._closed_at = {node: at for node, at in self._closed_at.items() if last_seen.get(node, decision.at) <= at}
        for effect in decision.effects:
            if isinstance(effect, AppendToEventLog) and effect.entry.kind == "node.lost":
                self._check_loss(effect.entry.node or "", decision.at, last_seen)
        self._expected = {node for node, record in leader.state.nodes.items() if record.liveness.reachable}

    def _check_loss(self, node: str, now: float, last_seen: dict[str, float]) -> None:
        policy = self.world.plan.policy
        since = max(last_seen[node], self._receiving_since)
        silent_s, closed_s = now - since, now - self._closed_at.get(node, now)
        if silent_s < policy.liveness.lost_after_s and closed_s < policy.liveness.disconnect_grace_s:
            detail = f"{node} is lost after {silent_s:.2f} s of silence, {closed_s:.2f} s after its connection closed"
            raise Violation(self.name, detail)
        if max(silent_s, closed_s) < policy.correlated_silence.max_s and self._is_silence_correlated(now, last_seen):
            detail = f"{node} is lost after {silent_s:.2f} s, during a correlated silence"
            raise Violation(self.name, detail)

    def _is_silence_correlated(self, now: float, last_seen: dict[str, float]) -> bool:
        """Return whether so many nodes of the fleet are silent that the silence is correlated in any case."""
        policy = self.world.plan.policy
        limit = now - policy.liveness.suspect_after_max_s - CHECK_DELAY_S
        silent = {
            node
            for node in self._expected
            if max(last_seen[node], self._receiving_since) < limit or node in self._closed_at
        }
        least = max(policy.correlated_silence.min_nodes, policy.correlated_silence.share * len(self._expected))
        return len(silent) >= least or (silent == self._expected and len(silent) >= 2)
