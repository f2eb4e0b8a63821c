"""What was acknowledged survives the loss of any controller; nothing is taken twice, nor told unwritten."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from controller.core.events import AgentRegistered, ReportArrived
from everstep.wire.v1.directives import NewGeneration, VersionNotice
from tests.sim import facts
from tests.sim.facts import Violation


class Durability:
    """Reports by their numbers, directives by theirs."""

    name = "durability"

    def __init__(self) -> None:
        self._marks: dict[tuple[str, int], int] = {}
        self._lives: dict[str, int] = {}
        self._told: dict[str, dict[int, int]] = defaultdict(dict)
        self._written: dict[str, set[int]] = defaultdict(set)
        self._generations: set[tuple[str, int]] = set()

    def watches(self) -> dict[type, Callable[[Any], None]]:
        return {
            facts.Durable: self._durable,
            facts.Acknowledged: self._acknowledged,
            facts.TookOver: self._took_over,
            facts.Handled: self._handled,
            facts.Delivered: self._delivered,
        }

    def complaint(self) -> str:
        return ""

    # --- reports -----------------------------------------------------------------------------------------------------

    def _acknowledged(self, fact: facts.Acknowledged) -> None:
        written = self._marks.get((fact.node, fact.life), 0)
        if fact.through > written:
            raise Violation(
                self.name, f"reports of {fact.node} are acknowledged through {fact.through}, written are {written}"
            )

    def _took_over(self, fact: facts.TookOver) -> None:
        for (node, life), through in self._marks.items():
            if life == self._lives.get(node) and fact.marks.get((node, life), 0) < through:
                raise Violation(self.name, f"{fact.controller} does not know reports of {node} through {through}")

    def _handled(self, fact: facts.Handled) -> None:
        event = fact.event
        if isinstance(event, ReportArrived):
            written = self._marks.get((event.node, event.incarnation), 0)
            if event.number <= written:
                raise Violation(self.name, f"report {event.number} of {event.node} is taken twice")
        elif isinstance(event, AgentRegistered):
            self._lives[event.register.node] = event.register.incarnation

    # --- directives --------------------------------------------------------------------------------------------------

    def _durable(self, fact: facts.Durable) -> None:
        for (node, life), through in fact.batch.marks.items():
            self._marks[node, life] = max(through, self._marks.get((node, life), 0))
        for row in fact.batch.generations:
            self._generations.add((row.job, row.number))
        for row in fact.batch.outbox:
            self._written[row.node].add(row.seq)
        for node, through in fact.batch.pruned.items():
            self._forgotten(node, through)

    def _forgotten(self, node: str, through: int) -> None:
        """A directive's row goes when its node has it, or began a new life since."""
        told = self._told[node]
        for seq in [seq for seq in self._written[node] if seq <= through]:
            self._written[node].discard(seq)
            if seq not in told and told and max(told.values()) >= self._lives.get(node, 0) and seq > min(told):
                raise Violation(self.name, f"directive {seq} for {node} is forgotten, and {node} never had it")

    def _delivered(self, fact: facts.Delivered) -> None:
        self._told[fact.node][fact.seq] = fact.life
        body = fact.body
        if isinstance(body, VersionNotice):
            return
        if isinstance(body, NewGeneration) and (body.spec.job, body.spec.number) not in self._generations:
            raise Violation(self.name, f"{fact.node} hears of generation {body.spec.number}, which is not written")
