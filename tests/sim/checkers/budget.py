"""Evictions never exceed the budget in any window, and never take a job below its minimum without an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controller.core.effects import Audit, PutVerdict
from controller.core.events import OperatorCommand
from everstep.vocabulary import Decision
from tests.sim import facts
from tests.sim.facts import Violation

if TYPE_CHECKING:
    from tests.sim.world import World


class Budget:
    """Counts automatic evictions as they are written, in the time of whoever decided them."""

    name = "budget"

    def __init__(self) -> None:
        self.world: World | None = None
        self._ordered: set[str] = set()
        self._nodes: set[str] = set()
        self._window: list[float] = []
        self._latched = False

    def watches(self) -> dict[type, Callable[[Any], None]]:
        return {facts.Handled: self._handled, facts.Durable: self._durable}

    def complaint(self) -> str:
        return ""

    def _handled(self, fact: facts.Handled) -> None:
        ordered = isinstance(fact.event, OperatorCommand)
        evicted = {
            effect.verdict.id: effect.verdict.node
            for effect in fact.effects
            if isinstance(effect, PutVerdict) and effect.verdict.decision is Decision.EVICT
        }
        if ordered:
            self._ordered |= evicted.keys()
        elif evicted:
            self._spared(fact, set(evicted.values()))

    def _spared(self, fact: facts.Handled, evicted: set[str]) -> None:
        """No job is paused by what follows from an automatic eviction."""
        begun = False
        for effect in fact.effects:
            begun = begun or (isinstance(effect, PutVerdict) and effect.verdict.decision is Decision.EVICT)
            if begun and isinstance(effect, Audit) and effect.entry.kind == "job.paused":
                raise Violation(self.name, f"the eviction of {sorted(evicted)} pauses: {effect.entry.sentence}")

    def _durable(self, fact: facts.Durable) -> None:
        assert self.world is not None
        self._nodes |= fact.batch.nodes.keys()
        for row in sorted((*fact.batch.verdicts, *fact.batch.audit), key=lambda row: row.at):
            if getattr(row, "kind", "") == "operator.reset_breaker":
                self._window, self._latched = [], False
            elif getattr(row, "kind", "") == "fleet.breaker":
                self._latched = True
            elif getattr(row, "decision", "") == Decision.EVICT and row.id not in self._ordered:
                self._evicted(row.node, row.at)

    def _evicted(self, node: str, at: float) -> None:
        assert self.world is not None
        policy = self.world.plan.policy
        if self._latched:
            raise Violation(self.name, f"{node} is evicted while the breaker is latched")
        self._window = [*(t for t in self._window if t > at - policy.eviction_window_s), at]
        allowed = max(1, min(policy.eviction_count, int(policy.eviction_share * len(self._nodes))))
        if len(self._window) > allowed:
            raise Violation(
                self.name, f"{len(self._window)} evictions within {policy.eviction_window_s:g} s, allowed are {allowed}"
            )
