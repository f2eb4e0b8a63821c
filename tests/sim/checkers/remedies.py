"""What is done to machines: written before it is asked for, done once, for a reason, within caps, and to nobody whom
somebody's word keeps out."""

from __future__ import annotations

from collections import defaultdict

import msgspec
from everstep_controller.core.effects import DeleteNode, PutNode, Remediation, RemediationKind, RequestRemediation
from everstep_controller.core.events import OperatorAction, OperatorCommand, SchedulerStateChanged
from everstep_controller.core.records import NodeScheduling
from everstep_controller.store.rows import RemediationRow, RemediationState

from everstep.vocabulary import Decision, NodeState
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.checkers.stored import Stored
from tests.sim.checkers.window_book import WindowBook
from tests.sim.facts import Violation

CURES = (RemediationKind.RESET_GPU, RemediationKind.REBOOT)
ENDED = (RemediationState.CONFIRMED, RemediationState.FAILED, RemediationState.SUPERSEDED)
CONVICTED = (Decision.EVICT, Decision.QUARANTINE, Decision.REPAIR)
SERVING = (NodeState.HEALTHY, NodeState.PROBATION)


class Remedies(Checker):
    """Follows every remedy from its decision to what was really done."""

    name = "remedies"

    def __init__(self) -> None:
        self._rows: dict[str, RemediationRow] = {}
        self._begun_in: dict[str, int] = {}
        self._verdicts: dict[str, tuple[str, str]] = {}
        self._cures: dict[str, list[float]] = defaultdict(list)
        self._asked: set[tuple[int, str]] = set()
        self._looked: set[tuple[int, str]] = set()
        self._done: set[str] = set()
        self._stored = Stored()
        self._kept_out: dict[str, dict[str, float]] = defaultdict(dict)
        self._book = WindowBook()

    def watches(self) -> Watches:
        return {
            facts.Decided: self._handled,
            facts.Durable: self._durable,
            facts.TookOver: self._took_over,
            facts.RemedyAsked: self._ask,
            facts.RemedyLookedAt: self._look,
            facts.RemedyCarriedOut: self._carried_out,
        }

    def complaint(self) -> str:
        """Whatever Everstep took from the scheduler is given back, and nothing is left half done."""
        leader = self.world.leader()
        if leader is None:
            return "nobody leads"
        cordoned = self.world.outside.cordoned()
        for name, record in leader.state.nodes.items():
            if record.state is NodeState.HEALTHY and name in cordoned:
                return f"{name} is healthy, and cordoned by {cordoned[name]}"
        still = [row.id for row in self._rows.values() if row.state not in ENDED]
        return f"{', '.join(still)} did not end" if still else ""

    # --- what is decided ---------------------------------------------------------------------------------------------

    def _took_over(self, _fact: facts.TookOver) -> None:
        """Of what the last one was told, whoever follows knows what was written."""
        self._kept_out = defaultdict(
            dict, {node: _orders(record.scheduling) for node, record in self._stored.nodes().items()}
        )
        self._book.took_over()

    def _handled(self, fact: facts.Decided) -> None:
        self._note_words(fact)
        self._book.order(fact)
        ordered = isinstance(fact.event, OperatorCommand)
        for effect in fact.effects:
            self._book.follow(effect, fact.at)
        for effect in fact.effects:
            if isinstance(effect, RequestRemediation) and not ordered:
                self._requested(effect.remediation, fact.at)
            elif isinstance(effect, PutNode):
                self._put(effect, fact.at)
            elif isinstance(effect, DeleteNode):
                self._kept_out.pop(effect.node, None)

    def _note_words(self, fact: facts.Decided) -> None:
        """Whose word keeps which node out, until when."""
        event = fact.event
        if isinstance(event, SchedulerStateChanged):
            self._kept_out[event.node].pop("a cordon", None)
            if event.cordoned_by:
                self._kept_out[event.node]["a cordon"] = float("inf")
        elif isinstance(event, OperatorCommand) and event.node is not None:
            words = self._kept_out[event.node]
            if event.action in (OperatorAction.HOLD, OperatorAction.DRAIN):
                words["a person"] = float("inf")
            elif event.action in (OperatorAction.RELEASE, OperatorAction.READMIT):
                words.pop("a person", None)

    def _who_keeps_out(self, node: str, now: float) -> str:
        window = self._book.active(self.world, node, now)
        return next((who for who, until in self._kept_out[node].items() if now < until), str(window or ""))

    def _requested(self, remedy: Remediation, now: float) -> None:
        who = self._who_keeps_out(remedy.node, now)
        if who and (
            remedy.kind in (*CURES, RemediationKind.REPAIR)
            or (who == "a cordon" and remedy.kind is RemediationKind.CORDON)
        ):
            raise Violation(self.name, f"{remedy.kind} of {remedy.node} is asked for, although {who} keeps it out")

    def _put(self, effect: PutNode, now: float) -> None:
        who = self._who_keeps_out(effect.node, now)
        if who and effect.doc.state in SERVING:
            raise Violation(self.name, f"{effect.node} is {effect.doc.state}, although {who} keeps it out")

    # --- what is written ---------------------------------------------------------------------------------------------

    def _durable(self, fact: facts.Durable) -> None:
        self._book.durable(fact)
        self._stored.note(fact.batch)
        for verdict in fact.batch.verdicts:
            self._verdicts[verdict.id] = (verdict.node, verdict.decision)
        for row in sorted(fact.batch.remediations.values(), key=lambda row: row.requested_at):
            before = self._rows.get(row.id)
            if before is not None and before.state in ENDED:
                raise Violation(self.name, f"{row.id} is {row.state} after it was {before.state}")
            if before is None:
                self._wanted(row)
            if row.state is RemediationState.STARTED:
                self._begun_in.setdefault(row.id, fact.epoch)
            self._rows[row.id] = row

    def _wanted(self, row: RemediationRow) -> None:
        if row.kind in (*CURES, RemediationKind.REPAIR):
            verdict = msgspec.json.decode(row.doc, type=Remediation).verdict_id
            node, decision = self._verdicts.get(verdict, ("", ""))
            if node != row.node or decision not in CONVICTED:
                raise Violation(self.name, f"{row.id} ({row.kind} of {row.node}) follows from {decision or 'nothing'}")
        if row.kind in CURES:
            self._count(row)

    def _count(self, row: RemediationRow) -> None:
        policy, at = self.world.plan.policy, row.requested_at
        caps = (
            (row.node, policy.remediations_per_node, policy.remediation_node_window_s),
            ("the fleet", policy.remediations_per_fleet, policy.remediation_fleet_window_s),
        )
        for whose, most, window_s in caps:
            self._cures[whose] = [*(t for t in self._cures[whose] if t > at - window_s), at]
            if len(self._cures[whose]) > most:
                raise Violation(
                    self.name, f"{len(self._cures[whose])} cures of {whose} within {window_s:g} s, allowed are {most}"
                )

    # --- what is asked for, and done ---------------------------------------------------------------------------------

    def _look(self, fact: facts.RemedyLookedAt) -> None:
        self._looked.add((fact.epoch, fact.remedy))

    def _ask(self, fact: facts.RemedyAsked) -> None:
        what = f"{fact.remedy} ({fact.kind} of {fact.node})"
        row = self._rows.get(fact.remedy)
        if row is None or row.state is RemediationState.REQUESTED:
            raise Violation(self.name, f"{what} is asked for before it is written that it begins")
        if row.state in ENDED:
            raise Violation(self.name, f"{fact.controller} asks for {what}, which is {row.state}")
        place = (fact.epoch, fact.remedy)
        inherited = self._begun_in[fact.remedy] != fact.epoch
        if inherited and place not in self._asked and place not in self._looked:
            raise Violation(self.name, f"{what} was begun before {fact.controller} led, and it asks without a look")
        self._asked.add(place)

    def _carried_out(self, fact: facts.RemedyCarriedOut) -> None:
        if fact.remedy in self._done:
            raise Violation(self.name, f"{fact.remedy} ({fact.kind} of {fact.node}) is done twice")
        self._done.add(fact.remedy)
        record = self._stored.node(fact.node)
        if fact.kind in CURES and record is not None and record.state is NodeState.HEALTHY:
            raise Violation(self.name, f"{fact.remedy}: {fact.kind} of {fact.node}, which is in service")


def _orders(scheduling: NodeScheduling) -> dict[str, float]:
    """Who keeps a node out, until when, by its record; as in ``Remedies._kept_out``."""
    ordered = {"a person": scheduling.hold_reason, "a cordon": scheduling.external_cordon_by}
    return {who: float("inf") for who, words in ordered.items() if words}
