"""No sample is skipped or repeated in the sequence of committed steps."""

from __future__ import annotations

from everstep.ids import Version
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation
from tests.sim.training_state import TrainingState, seen_by_all


class Samples(Checker):
    """Follows each committed state back to its beginning: step by step, each with exactly its own samples."""

    name = "samples"

    def __init__(self) -> None:
        self._states: dict[tuple[str, Version], dict[int, TrainingState]] = {}
        self._good: set[str] = set()

    def watches(self) -> Watches:
        return {facts.Stepped: self._step, facts.Durable: self._durable}

    def _step(self, fact: facts.Stepped) -> None:
        key = (fact.job, Version(fact.generation, fact.step))
        self._states.setdefault(key, {})[fact.rank] = fact.state

    def _durable(self, fact: facts.Durable) -> None:
        for row in fact.batch.versions.values():
            version = Version(row.generation, row.step)
            states = self._states.get((row.job, version), {})
            for state in {state.digest: state for state in states.values()}.values():
                self._follow(row.job, version, state)

    def _follow(self, job: str, version: Version, state: TrainingState) -> None:
        if state.step != version.step:
            raise Violation(self.name, f"{job}: {version} holds the state after step {state.step}")
        way = []
        at: TrainingState | None = state
        while at is not None and at.digest not in self._good:
            way.append(at)
            if at.parent is not None:
                if at.parent.step != at.step - 1:
                    raise Violation(self.name, f"{job}: step {at.step} was made from step {at.parent.step}")
                if at.seen != seen_by_all(at.step, 1):
                    raise Violation(self.name, f"{job}: step {at.step} saw other samples than its own")
            elif at.step != 0:
                raise Violation(self.name, f"{job}: step {at.step} was made from nothing")
            at = at.parent
        self._good.update(one.digest for one in way)
