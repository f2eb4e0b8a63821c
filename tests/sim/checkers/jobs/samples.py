"""Check that no sample is skipped or repeated in the sequence of committed steps."""

from __future__ import annotations

from everstep.ids import Version
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.cluster.observations import BatchWritten, StepFinished
from tests.sim.cluster.training_state import TrainingState, samples_of_all


class Samples(Checker):
    """Follow each committed state back to its beginning. Each step must have exactly its own samples."""

    name = "samples"

    def __init__(self) -> None:
        self._states: dict[tuple[str, Version], dict[int, TrainingState]] = {}
        self._checked: set[str] = set()

    def handlers(self) -> Handlers:
        return {StepFinished: self._on_step, BatchWritten: self._on_write}

    def _on_step(self, finished: StepFinished) -> None:
        key = (finished.job, Version(finished.generation, finished.step))
        self._states.setdefault(key, {})[finished.rank] = finished.state

    def _on_write(self, write: BatchWritten) -> None:
        for row in write.batch.versions.values():
            version = Version(row.generation, row.step)
            states = self._states.get((row.job, version), {})
            for state in {state.digest: state for state in states.values()}.values():
                self._check_history(row.job, version, state)

    def _check_history(self, job: str, version: Version, state: TrainingState) -> None:
        if state.step != version.step:
            raise Violation(self.name, f"{job}: {version} holds the state after step {state.step}")
        chain = []
        current: TrainingState | None = state
        while current is not None and current.digest not in self._checked:
            chain.append(current)
            if current.parent is not None:
                if current.parent.step != current.step - 1:
                    raise Violation(self.name, f"{job}: step {current.step} was made from step {current.parent.step}")
                if current.samples != samples_of_all(current.step, 1):
                    raise Violation(self.name, f"{job}: step {current.step} used other samples than its own")
            elif current.step != 0:
                raise Violation(self.name, f"{job}: step {current.step} has no step before it")
            current = current.parent
        self._checked.update(state.digest for state in chain)
