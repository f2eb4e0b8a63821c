"""Check that no suspected node enters a roster, and that a failed collective shortens the wait for a silent node."""

from __future__ import annotations

from everstep.vocabulary import GenerationReason, NodeState
from everstep.wire.v1.training import CollectiveFailed, GenerationSpec
from everstep_controller.core.effects import AppendToEventLog, PutGeneration, PutNode
from everstep_controller.core.events import ReportArrived
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.stored_records import StoredRecords
from tests.sim.cluster.observations import BatchWritten, LeaderDecided, LeaderStarted


class Suspicion(Checker):
    """Check that newcomers to a roster are healthy, and that a failed collective leaves out suspected nodes."""

    name = "suspicion"

    def __init__(self) -> None:
        self._states: dict[str, NodeState] = {}
        self._records = StoredRecords()
        self._seats: dict[str, set[str]] = {}
        self._running_numbers: dict[str, int] = {}
        self._failed_collectives: dict[str, int] = {}

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            LeaderStarted: self._on_leader,
        }

    def _on_write(self, write: BatchWritten) -> None:
        self._records.note(write.batch)

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._states = {node: record.state for node, record in self._records.nodes().items()}
        self._running_numbers, self._failed_collectives = {}, {}
        self._seats = {name: set(record.seats) for name, record in self._records.jobs().items()}

    def _on_decision(self, decision: LeaderDecided) -> None:
        event = decision.event
        if isinstance(event, ReportArrived) and isinstance(event.body, CollectiveFailed):
            self._failed_collectives[event.body.job] = event.body.generation
        for effect in decision.effects:
            if isinstance(effect, AppendToEventLog):
                self._note_log(effect.entry.kind, effect.entry.node or "", effect.entry.job or "")
        for effect in decision.effects:
            if isinstance(effect, PutNode):
                self._states[effect.node] = effect.doc.state
        generations = {effect.spec.job: effect.spec for effect in decision.effects if isinstance(effect, PutGeneration)}
        for spec in generations.values():  # the newest generation of each job
            self._check_roster(spec)

    def _note_log(self, kind: str, node: str, job: str) -> None:
        if kind in ("job.paused", "job.failed", "job.stopped", "job.finished"):
            self._running_numbers.pop(job, None)
        if kind != "node.lost" or self._states.get(node) is not NodeState.SUSPECT:
            return
        for name, number in self._running_numbers.items():
            if node in self._seats.get(name, ()) and self._failed_collectives.get(name) == number:
                raise Violation(
                    self.name, f"{name} {number} waited until {node} was lost, although a collective failed"
                )

    def _check_roster(self, spec: GenerationSpec) -> None:
        seats = {member.node for member in spec.roster}
        suspected = [node for node in seats if self._states.get(node) is NodeState.SUSPECT]
        if spec.reason is GenerationReason.COLLECTIVE_FAILED and suspected:
            raise Violation(
                self.name, f"{spec.job} generation {spec.number} keeps {suspected}, although a collective failed"
            )
        for node in seats - self._seats.get(spec.job, set()):
            state = self._states.get(node)
            if state is not NodeState.HEALTHY:
                raise Violation(self.name, f"{spec.job} generation {spec.number} adds {node}, which is {state}")
        self._seats[spec.job] = seats
        if spec.after_step is None:
            self._running_numbers[spec.job] = spec.number
        else:
            self._running_numbers.pop(spec.job, None)
