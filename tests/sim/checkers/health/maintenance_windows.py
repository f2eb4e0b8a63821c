"""Check that a maintenance window begins at its time, keeps the node out of service, and causes no verdict."""

from __future__ import annotations

import math

from everstep.vocabulary import Decision, JobState, NodeState
from everstep_controller.core.effects import AppendToEventLog, DeleteNode, PutGeneration, PutNode, PutVerdict
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorCommand, Tick
from tests.sim.checkers.checker import Checker, Handlers, Violation
from tests.sim.checkers.stored_records import StoredRecords
from tests.sim.checkers.window_tracker import WINDOW_STARTED, WindowTracker, window_subject
from tests.sim.cluster.observations import BatchWritten, LeaderDecided, LeaderStarted

MAX_DELAY_S = 3.0
"""Seconds that a window may begin late while a controller leads and the database answers."""
EXCLUDING = (Decision.EVICT, Decision.QUARANTINE, Decision.REPAIR)
"""Decisions that take a node out of service."""
OUT_OF_SERVICE = (NodeState.QUARANTINED, NodeState.REPAIR, NodeState.LOST)
"""States of nodes that were taken out of service for a failure."""


class MaintenanceWindows(Checker):
    """Compare decisions with the windows that operators ordered. An operator's command for a node overrides them."""

    name = "windows"

    def __init__(self) -> None:
        self._tracker = WindowTracker()
        self._serving_since = math.inf
        self._is_database_unavailable = False
        self._states: dict[str, NodeState] = {}
        self._records = StoredRecords()

    def handlers(self) -> Handlers:
        return {
            LeaderDecided: self._on_decision,
            BatchWritten: self._on_write,
            LeaderStarted: self._on_leader,
        }

    def remaining_problem(self) -> str:
        """Return the nodes that are still in maintenance after the end of all windows."""
        leader = self.world.leader()
        if leader is None:
            return "no controller leads"
        remaining = [node for node, record in leader.state.nodes.items() if record.scheduling.maintenance_until]
        return f"{', '.join(remaining)} are still in maintenance" if remaining else ""

    def _on_write(self, write: BatchWritten) -> None:
        self._tracker.note_write(write)
        self._records.note(write.batch)

    def _on_leader(self, _start: LeaderStarted) -> None:
        self._serving_since, self._is_database_unavailable = math.inf, False
        self._tracker.start_leader()
        self._states = {node: record.state for node, record in self._records.nodes().items()}

    def _on_decision(self, decision: LeaderDecided) -> None:
        if isinstance(decision.event, DatabaseAvailabilityChanged):
            self._is_database_unavailable = decision.event.is_unavailable
            self._serving_since = math.inf
        if not self._is_database_unavailable:
            self._serving_since = min(self._serving_since, decision.at)
        before = self._count_begun()
        self._tracker.note_command(decision)
        for effect in decision.effects:
            self._tracker.note_effect(effect, decision.at)
            if isinstance(effect, AppendToEventLog) and effect.entry.kind == WINDOW_STARTED:
                self._check_beginning(effect, decision.at)
            elif isinstance(effect, PutGeneration):
                self._check_seats(effect, decision.at)
            elif isinstance(effect, PutVerdict) and not isinstance(decision.event, OperatorCommand):
                self._check_verdict(effect, decision.at)
        # A node's record holds the state after the event, and precedes the event's log entries.
        for effect in decision.effects:
            if isinstance(effect, PutNode):
                self._check_record(decision, effect)
            elif isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)
        if self._count_begun() > before:
            self._check_jobs_leave(decision)
        if isinstance(decision.event, Tick):  # a controller that was paused checks its windows at the next tick
            self._check_punctual(decision.at)

    def _check_beginning(self, effect: AppendToEventLog, now: float) -> None:
        subject = window_subject(effect.entry)
        matching = (window for window in self._tracker.windows if window.subject == subject)
        if not any(window.starts_at <= now < window.until for window in matching):
            raise Violation(self.name, f"{effect.entry.sentence}, at {now:.2f}: there is no such window")

    def _count_begun(self) -> int:
        return sum(window.has_begun for window in self._tracker.windows)

    def _check_jobs_leave(self, decision: LeaderDecided) -> None:
        """Check after the beginning of a window that each job leaves its nodes at the next boundary."""
        for name, job in self.world.controller(decision.controller).state.jobs.items():
            seats = job.generation.seats if job.generation is not None and job.status.state is JobState.RUNNING else ()
            for node in seats:
                if (window := self._tracker.active(self.world, node, decision.at)) is not None:
                    raise Violation(self.name, f"{name} continues on {node}, in {window}")

    def _check_punctual(self, now: float) -> None:
        for window in self._tracker.windows:
            waited_s = now - max(window.starts_at, self._serving_since)
            if not window.has_begun and waited_s > MAX_DELAY_S and now < window.until:
                raise Violation(self.name, f"{window} has not begun {waited_s:.1f} s after its time")

    def _check_seats(self, effect: PutGeneration, now: float) -> None:
        for node in effect.spec.seats:
            if (window := self._tracker.active(self.world, node, now)) is not None:
                title = f"{effect.spec.job} generation {effect.spec.number}"
                raise Violation(self.name, f"{title} has a seat on {node}, in {window}")

    def _check_verdict(self, effect: PutVerdict, now: float) -> None:
        verdict = effect.verdict
        window = self._tracker.active(self.world, verdict.node, now)
        if window is not None and verdict.decision in EXCLUDING:
            raise Violation(self.name, f"{verdict.decision} of {verdict.node} in {window}: {verdict.sentence}")

    def _check_record(self, decision: LeaderDecided, effect: PutNode) -> None:
        record, now = effect.doc, decision.at
        before, self._states[effect.node] = self._states.get(effect.node), record.state
        if now < record.scheduling.maintenance_until:
            begun = [window for window in self._tracker.windows_of(self.world, effect.node) if window.starts_at <= now]
            windows = ", ".join(map(str, begun)) or "it is in no window"
            if all(window.until != record.scheduling.maintenance_until for window in begun):
                raise Violation(
                    self.name,
                    f"{effect.node} is in maintenance until {record.scheduling.maintenance_until:.2f}: {windows}",
                )
        window = self._tracker.active(self.world, effect.node, now)
        if window is None:
            return
        if record.scheduling.maintenance_until < window.until:
            raise Violation(self.name, f"{effect.node} is not in maintenance, in {window}")
        if (
            record.state in OUT_OF_SERVICE
            and before not in (*OUT_OF_SERVICE, None)
            and not isinstance(decision.event, OperatorCommand)
        ):
            raise Violation(self.name, f"{effect.node} is {record.state} in {window}: {record.sentence}")
