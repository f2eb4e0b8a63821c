"""Slow is who takes longer than the others of its job: nobody else is named, nobody too soon, and nobody is missed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from everstep_controller.core.effects import PutGeneration, PutVerdict, RecordFindingCleared, RecordFindingRaised

from everstep.vocabulary import Decision, FindingKind, GenerationReason, Mode
from everstep.wire.v1.training import GenerationSpec
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation

STALE_S = 20.0
"""For so long a controller may go on with what a node said last, of which it hears nothing."""
UNTOLD_S = 5.0
"""In which a step that was slow is heard of, by ticks and beats, and a window ends after it."""
AFTERMATH_S = 12.0
"""In which things are as before after another fault."""


class Paces(Checker):
    """Knows how slow each machine really is. What counts is what its ranks have finished: the first slow step of theirs
    is where a controller can begin to see it."""

    name = "paces"

    def __init__(self) -> None:
        self._specs: dict[tuple[str, int], GenerationSpec] = {}
        self._newest: dict[str, GenerationSpec] = {}
        self._slow_at: dict[str, list[float]] = defaultdict(list)
        self._since: dict[tuple[str, int, str], float] = {}
        self._named: set[str] = set()
        self._began_at = 0.0

    def watches(self) -> Watches:
        return {facts.Decided: self._handled, facts.Stepped: self._stepped, facts.TookOver: self._took_over}

    def _now(self) -> float:
        return self.world.timeline.now

    def _took_over(self, fact: facts.TookOver) -> None:
        self._began_at = self._now()

    # --- the world ---------------------------------------------------------------------------------------------------

    def _stepped(self, fact: facts.Stepped) -> None:
        spec, whose = self._specs.get((fact.job, fact.generation)), (fact.job, fact.generation, fact.node)
        if spec is None or fact.node not in self._slow_ones(spec):
            self._since.pop(whose, None)
            return
        now = self._now()
        self._slow_at[fact.node].append(now)
        if self._newest[fact.job] is not spec:
            self._since.pop(whose, None)  # its job leaves this generation at a boundary, and judges nobody meanwhile
            return
        since = self._since.setdefault(whose, now)
        if now > self._due(since) and fact.node not in self._named and self._calm(since):
            raise Violation(self.name, f"{fact.node} has been slow for {now - since:.1f} s, and is not named")

    def _slow_ones(self, spec: GenerationSpec) -> set[str]:
        """Nodes that are slow beside their job's others, where somebody can tell."""
        policy = self.world.plan.policy
        slowness = {node: self.world.machines[node].slowness for node in spec.seats}
        median = sorted(slowness.values())[(len(slowness) - 1) // 2]
        slow = {node for node, times in slowness.items() if times > policy.straggler_factor * median}
        alone = len(slow) <= max(1.0, policy.straggler_share * len(slowness))
        return slow if alone and spec.world_size >= 3 else set()

    def _due(self, since: float) -> float:
        """When who has been slow since then is named at the latest, while nothing else happens."""
        policy = self.world.plan.policy
        return max(since, self._began_at) + policy.straggler_count * policy.straggler_window_s + UNTOLD_S

    def _calm(self, since: float) -> bool:
        """Whether nothing was broken lately but somebody's pace."""
        others = [fault for _, fault in self.world.plan.faults if fault.kind != "slow_down"]
        return not any(fault.at <= self._now() and fault.at + fault.seconds + AFTERMATH_S >= since for fault in others)

    # --- the controller ----------------------------------------------------------------------------------------------

    def _handled(self, fact: facts.Decided) -> None:
        judged = {effect.verdict.node: effect.verdict for effect in fact.effects if isinstance(effect, PutVerdict)}
        for effect in fact.effects:
            if isinstance(effect, RecordFindingCleared) and effect.key.startswith(FindingKind.RANK_STRAGGLER):
                self._named.discard(effect.node)
            elif isinstance(effect, RecordFindingRaised) and effect.finding.kind is FindingKind.RANK_STRAGGLER:
                self._named.add(effect.node)
                self._check_named(effect.node)
                verdict = judged.get(effect.node)
                self._check_verdict(effect.node, verdict.decision if verdict is not None else None)
        self._follow(effect.spec for effect in fact.effects if isinstance(effect, PutGeneration))

    def _follow(self, opened: Iterable[GenerationSpec]) -> None:
        for spec in opened:
            before = self._newest.get(spec.job)
            if spec.reason is GenerationReason.STRAGGLER and before is not None:
                for node in before.seated_nodes - spec.seated_nodes:
                    self._check_named(node)
            self._specs[spec.job, spec.number] = self._newest[spec.job] = spec

    def _check_named(self, node: str) -> None:
        """It was slow in as many windows as it takes: so long ago, at least, it finished a step late."""
        policy, now = self.world.plan.policy, self._now()
        window_s = policy.straggler_window_s
        first = [at for at in self._slow_at[node] if at >= now - policy.straggler_windows * window_s - STALE_S]
        if not first:
            raise Violation(self.name, f"{node} is named as slow, and is not, or not by itself")
        if now - first[0] < 0.99 * (policy.straggler_count - 1) * window_s:
            raise Violation(self.name, f"{node} is named as slow {now - first[0]:.1f} s after its first slow step")

    def _check_verdict(self, node: str, decision: Decision | None) -> None:
        """What follows is what the rule allows: out, or held by a budget, where it is to be enforced."""
        mode = self.world.plan.policy.rules.default_rule(FindingKind.RANK_STRAGGLER).mode
        if mode is not Mode.ENFORCE and decision is Decision.EVICT:
            raise Violation(self.name, f"{node} is evicted as slow, which is only recommended")
        calm = self._calm(self._now() - AFTERMATH_S)
        if mode is Mode.ENFORCE and calm and decision not in (Decision.EVICT, Decision.DEFER_EVICTION):
            raise Violation(self.name, f"{node} is slow, and the answer is {decision}")
