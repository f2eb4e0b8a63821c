"""A refuted suspicion leaves no trace in a roster: nobody comes in on doubt, and nobody goes out on silence alone."""

from __future__ import annotations

from everstep_controller.core.effects import Audit, PutGeneration, PutNode
from everstep_controller.core.events import ReportArrived

from everstep.vocabulary import GenerationReason, NodeState
from everstep.wire.v1.training import CollectiveFailed, GenerationSpec
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.stored import Stored
from tests.sim.facts import Violation


class Suspicion(Checker):
    """Newcomers to a roster are healthy when it is decided; a failed collective leaves out whom it may be about."""

    name = "suspicion"

    def __init__(self) -> None:
        self._states: dict[str, NodeState] = {}
        self._stored = Stored()
        self._seats: dict[str, set[str]] = {}
        self._numbers: dict[str, int] = {}
        self._witnessed: dict[str, int] = {}

    def watches(self) -> Watches:
        return {facts.Decided: self._handled, facts.Durable: self._durable, facts.TookOver: self._took_over}

    def _durable(self, fact: facts.Durable) -> None:
        self._stored.note(fact.batch)

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._states = {node: record.state for node, record in self._stored.nodes().items()}
        self._numbers, self._witnessed = {}, {}
        self._seats = {name: set(record.seats) for name, record in self._stored.jobs().items()}

    def _handled(self, fact: facts.Decided) -> None:
        event = fact.event
        if isinstance(event, ReportArrived) and isinstance(event.body, CollectiveFailed):
            self._witnessed[event.body.job] = event.body.generation
        for effect in fact.effects:
            if isinstance(effect, Audit):
                self._told(effect.entry.kind, effect.entry.node or "", effect.entry.job or "")
        for effect in fact.effects:
            if isinstance(effect, PutNode):
                self._states[effect.node] = effect.doc.state
        opened = {effect.spec.job: effect.spec for effect in fact.effects if isinstance(effect, PutGeneration)}
        for spec in opened.values():  # of several in one turn, the last
            self._opened(spec)

    def _told(self, kind: str, node: str, job: str) -> None:
        if kind in ("job.paused", "job.failed", "job.stopped", "job.finished"):
            self._numbers.pop(job, None)
        if kind != "node.lost" or self._states.get(node) is not NodeState.SUSPECT:
            return
        for name, number in self._numbers.items():
            if node in self._seats.get(name, ()) and self._witnessed.get(name) == number:
                raise Violation(self.name, f"{name} {number} waited until {node} was lost, with a witness against it")

    def _opened(self, spec: GenerationSpec) -> None:
        seats = {member.node for member in spec.roster}
        doubted = [node for node in seats if self._states.get(node) is NodeState.SUSPECT]
        if spec.reason is GenerationReason.COLLECTIVE_FAILED and doubted:
            raise Violation(self.name, f"{spec.job} generation {spec.number} keeps {doubted}, against its witnesses")
        for node in seats - self._seats.get(spec.job, set()):
            state = self._states.get(node)
            if state is not NodeState.HEALTHY:
                raise Violation(self.name, f"{spec.job} generation {spec.number} takes {node} in, which is {state}")
        self._seats[spec.job] = seats
        if spec.after_step is None:
            self._numbers[spec.job] = spec.number
        else:
            self._numbers.pop(spec.job, None)
