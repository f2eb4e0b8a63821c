"""A maintenance window begins at its time and not before; in it the node is out, and nothing is held against it."""

from __future__ import annotations

import math

from everstep_controller.core.effects import Audit, DeleteNode, PutGeneration, PutNode, PutVerdict
from everstep_controller.core.events import DatabaseAvailabilityChanged, OperatorCommand, Tick

from everstep.vocabulary import Decision, JobState, NodeState
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.stored import Stored
from tests.sim.checkers.window_book import BEGUN, WindowBook
from tests.sim.facts import Violation

LATE_S = 3.0
"""Seconds that a window may begin late, where somebody leads and the database is there."""
AGAINST = (Decision.EVICT, Decision.QUARANTINE, Decision.REPAIR)
OUT = (NodeState.QUARANTINED, NodeState.REPAIR, NodeState.LOST)


class Windows(Checker):
    """Compares what is decided with the windows that people ordered. An operator's word of a node is above them."""

    name = "windows"

    def __init__(self) -> None:
        self._book = WindowBook()
        self._able_since = math.inf
        self._store_away = False
        self._states: dict[str, NodeState] = {}
        self._stored = Stored()

    def watches(self) -> Watches:
        return {facts.Decided: self._handled, facts.Durable: self._durable, facts.TookOver: self._took_over}

    def complaint(self) -> str:
        """Nobody is still in a window when all of them are over."""
        leader = self.world.leader()
        if leader is None:
            return "nobody leads"
        still = [node for node, record in leader.state.nodes.items() if record.scheduling.maintenance_until]
        return f"{', '.join(still)} are still in maintenance" if still else ""

    def _durable(self, fact: facts.Durable) -> None:
        self._book.durable(fact)
        self._stored.note(fact.batch)

    def _took_over(self, _fact: facts.TookOver) -> None:
        self._able_since, self._store_away = math.inf, False
        self._book.took_over()
        self._states = {node: record.state for node, record in self._stored.nodes().items()}

    def _handled(self, fact: facts.Decided) -> None:
        if isinstance(fact.event, DatabaseAvailabilityChanged):
            self._store_away = fact.event.is_unavailable
            self._able_since = math.inf
        if not self._store_away:
            self._able_since = min(self._able_since, fact.at)
        before = self._begun()
        self._book.order(fact)
        for effect in fact.effects:
            self._book.follow(effect, fact.at)
            if isinstance(effect, Audit) and effect.entry.kind == BEGUN:
                self._begins(effect, fact.at)
            elif isinstance(effect, PutGeneration):
                self._seats(effect, fact.at)
            elif isinstance(effect, PutVerdict) and not isinstance(fact.event, OperatorCommand):
                self._judged(effect, fact.at)
        for effect in fact.effects:  # documents stand before what was said in the event, and are as they were after it
            if isinstance(effect, PutNode):
                self._put(fact, effect)
            elif isinstance(effect, DeleteNode):
                self._states.pop(effect.node, None)
        if self._begun() > before:
            self._jobs_leave(fact)
        if isinstance(fact.event, Tick):  # else it may have been stopped, and has not looked yet
            self._nobody_waits(fact.at)

    # --- the beginning -----------------------------------------------------------------------------------------------

    def _begins(self, effect: Audit, now: float) -> None:
        subject = effect.entry.node or effect.entry.sentence.removeprefix("maintenance of ").partition(" begins")[0]
        if not any(one.subject == subject and one.starts_at <= now < one.until for one in self._book.windows):
            raise Violation(self.name, f"{effect.entry.sentence}, at {now:.2f}: there is no such window")

    def _begun(self) -> int:
        return sum(one.begun for one in self._book.windows)

    def _jobs_leave(self, fact: facts.Decided) -> None:
        """A window has begun: no job goes on with whom it means, but to its next boundary."""
        for name, job in self.world.controller(fact.controller).state.jobs.items():
            seats = job.generation.seats if job.generation is not None and job.status.state is JobState.RUNNING else ()
            for node in seats:
                if (window := self._book.active(self.world, node, fact.at)) is not None:
                    raise Violation(self.name, f"{name} goes on with {node}, in {window}")

    def _nobody_waits(self, now: float) -> None:
        for window in self._book.windows:
            waited_s = now - max(window.starts_at, self._able_since)
            if not window.begun and waited_s > LATE_S and now < window.until:
                raise Violation(self.name, f"{window} has not begun {waited_s:.1f} s later")

    # --- inside ------------------------------------------------------------------------------------------------------

    def _seats(self, effect: PutGeneration, now: float) -> None:
        for node in effect.spec.seats:
            if (window := self._book.active(self.world, node, now)) is not None:
                what = f"{effect.spec.job} generation {effect.spec.number}"
                raise Violation(self.name, f"{what} has a seat on {node}, in {window}")

    def _judged(self, effect: PutVerdict, now: float) -> None:
        verdict = effect.verdict
        window = self._book.active(self.world, verdict.node, now)
        if window is not None and verdict.decision in AGAINST:
            raise Violation(self.name, f"{verdict.decision} of {verdict.node} in {window}: {verdict.sentence}")

    def _put(self, fact: facts.Decided, effect: PutNode) -> None:
        record, now = effect.doc, fact.at
        before, self._states[effect.node] = self._states.get(effect.node), record.state
        if now < record.scheduling.maintenance_until:
            meant = [one for one in self._book.of(self.world, effect.node) if one.starts_at <= now]
            named = ", ".join(map(str, meant)) or "it is in no window"
            if all(one.until != record.scheduling.maintenance_until for one in meant):
                raise Violation(
                    self.name,
                    f"{effect.node} is in maintenance until {record.scheduling.maintenance_until:.2f}: {named}",
                )
        window = self._book.active(self.world, effect.node, now)
        if window is None:
            return
        if record.scheduling.maintenance_until < window.until:
            raise Violation(self.name, f"{effect.node} is not in maintenance, in {window}")
        if record.state in OUT and before not in (*OUT, None) and not isinstance(fact.event, OperatorCommand):
            raise Violation(self.name, f"{effect.node} is {record.state} in {window}: {record.sentence}")
