"""Check that the requested number of copies is on different nodes.

Copies share no rack, switch or power unit if the roster allows that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from everstep.wire.v1.training import GenerationSpec
from everstep_controller.core.effects import PutGeneration
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import LeaderDecided


class ReplicaPlacement(Checker):
    """Compare the chosen places with the best ones, for every node of each roster.

    The best places are found by trial, one after the other. Nodes that copies did not reach may be skipped.
    """

    name = "replica_placement"

    def handlers(self) -> Handlers:
        return {LeaderDecided: self._on_decision}

    def _on_decision(self, decision: LeaderDecided) -> None:
        for effect in decision.effects:
            if isinstance(effect, PutGeneration):
                self._check(effect.spec, self._skipped_nodes(decision, effect.spec.job))

    def _skipped_nodes(self, decision: LeaderDecided, job: str) -> set[str]:
        runtime = self.world.controller(decision.controller).state.job_runtime[job]
        return {node for node, until in runtime.commits.skipped_replica_nodes.items() if until > decision.at}

    def _check(self, spec: GenerationSpec, skipped: set[str]) -> None:
        copies = min(spec.spec.replicas, len(spec.seats)) - 1
        candidates = [node for node in spec.seats if node not in skipped]
        if len(candidates) <= copies:
            candidates = list(spec.seats)
        for node in spec.seats:
            chosen = spec.replica_nodes[node]
            title = f"{spec.job} generation {spec.number}: copies of {node} are on {chosen}"
            if len(chosen) != copies or len({node, *chosen}) != copies + 1 or not set(chosen) <= set(spec.seats):
                raise Violation(self.name, f"{title}, and should be on {copies} others")
            if not set(chosen) <= set(candidates):
                raise Violation(self.name, f"{title}, although {sorted(set(chosen) - set(candidates))} are skipped")
            cost, allowed = self._total_cost((node, *chosen)), self._worst_greedy_cost((node,), candidates, copies)
            if cost > allowed:
                raise Violation(self.name, f"{title}, which share {cost} domains, {allowed} are possible")

    def _worst_greedy_cost(self, holders: tuple[str, ...], candidates: Sequence[str], copies: int) -> int:
        """Return the highest cost of choosing the best node each time, over all ways to break ties."""
        if not copies:
            return self._total_cost(holders)
        costs_by_node = {other: self._shared_domains(other, holders) for other in candidates if other not in holders}
        least = min(costs_by_node.values())
        best = (other for other, cost in costs_by_node.items() if cost == least)
        return max(self._worst_greedy_cost((*holders, other), candidates, copies - 1) for other in best)

    def _total_cost(self, holders: Sequence[str]) -> int:
        return sum(self._shared_domains(node, holders[:index]) for index, node in enumerate(holders))

    def _shared_domains(self, node: str, others: Collection[str]) -> int:
        """Return the number of failure domains that the node shares with the others, summed over them."""
        domain = self.world.machines[node].domain
        other_domains = [self.world.machines[other].domain for other in others]
        return sum(
            bool(name) and name == getattr(other, kind)
            for other in other_domains
            for kind, name in (("rack", domain.rack), ("switch", domain.switch), ("power", domain.power))
        )
