"""What was acknowledged survives the loss of any controller; nothing is taken twice or too late, nor told unwritten."""

from __future__ import annotations

from collections import defaultdict

import msgspec
from everstep_controller.core.events import AgentRegistered, Event, HeartbeatChanged, ReportArrived
from everstep_controller.core.jobs.generations import NUMBERS_PER_EPOCH
from everstep_controller.core.records import NodeIdentity

from everstep.wire.v1.directives import AnyDirective, KillRank, NewGeneration, RunProbe, StopJob, VersionNotice
from tests.sim import facts
from tests.sim.checkers.checker import Checker, Watches
from tests.sim.facts import Violation


class Durability(Checker):
    """Reports by their numbers, directives by theirs.

    While the database is away generations are told that are not written, under numbers that no other controller gives.
    """

    name = "durability"

    def __init__(self) -> None:
        self._marks: dict[tuple[str, int], int] = {}
        self._lives: dict[str, int] = {}
        self._epoch = 0
        self._registered: dict[str, int] = {}
        self._taken: dict[tuple[str, int], int] = {}
        self._left_out: dict[tuple[str, int], set[int]] = defaultdict(set)
        self._recorded: dict[str, int] = {}
        self._told: dict[str, set[int]] = defaultdict(set)
        self._written: dict[str, dict[int, tuple[str, int]]] = defaultdict(dict)
        self._heard: dict[str, set[str]] = defaultdict(set)
        self._forgot: dict[tuple[str, str], int] = {}
        self._generations: set[tuple[str, int]] = set()
        self._run_again: set[str] = set()

    def watches(self) -> Watches:
        return {
            facts.Durable: self._durable,
            facts.Acknowledged: self._acknowledged,
            facts.LeftOut: self._leaves_out,
            facts.TookOver: self._took_over,
            facts.Handled: self._handled,
            facts.Delivered: self._delivered,
        }

    def complaint(self) -> str:
        """Directives whose rows went although the lives of their nodes that they were for never had them."""
        for (node, name), seq in self._forgot.items():
            if not self._is_moot(name):
                return f"directive {seq} for {node} ({name}) is forgotten, and {node} never had it"
        return ""

    def _is_moot(self, name: str) -> bool:
        """A generation that is over, a rank of one, or the end of a run after which the job was run once more."""
        what, job, number = name.split("/")
        if what == "stop":
            return job in self._run_again
        return what in ("generation", "kill") and any(j == job and n > int(number) for j, n in self._generations)

    # --- reports -----------------------------------------------------------------------------------------------------

    def _acknowledged(self, fact: facts.Acknowledged) -> None:
        written = self._marks.get((fact.node, fact.life), 0)
        if fact.through > written:
            raise Violation(
                self.name, f"reports of {fact.node} are acknowledged through {fact.through}, written are {written}"
            )

    def _leaves_out(self, fact: facts.LeftOut) -> None:
        self._left_out[fact.node, fact.life] |= fact.numbers

    def _took_over(self, fact: facts.TookOver) -> None:
        self._epoch, self._registered, self._taken = fact.epoch, {}, {}
        for (node, life), through in self._marks.items():
            if life == self._lives.get(node) and fact.marks.get((node, life), 0) < through:
                raise Violation(self.name, f"{fact.controller} does not know reports of {node} through {through}")

    def _handled(self, fact: facts.Handled) -> None:
        event = fact.event
        if fact.epoch == self._epoch:
            self._check_life(event)
        if isinstance(event, ReportArrived):
            written = self._marks.get((event.node, event.incarnation), 0)
            if event.number <= written:
                raise Violation(self.name, f"report {event.number} of {event.node} is taken twice")
            if fact.epoch == self._epoch:
                self._check_gap(event, written)
        elif isinstance(event, AgentRegistered):
            node, life = event.register.node, event.register.incarnation
            if life != self._lives.get(node):
                self._forgot = {key: seq for key, seq in self._forgot.items() if key[0] != node}
            self._lives[node] = life

    def _check_gap(self, event: ReportArrived, written: int) -> None:
        """Reports of a life follow one another: what its agent keeps no more was taken, here or by who led before."""
        key = (event.node, event.incarnation)
        before = max(written, self._taken.get(key, 0))
        missing = set(range(before + 1, event.number)) - self._left_out[key]
        if before and missing:
            raise Violation(
                self.name, f"of {event.node} report {event.number} follows {before}: those between them are lost"
            )
        self._taken[key] = event.number

    def _check_life(self, event: Event) -> None:
        """What an earlier life of a node said, on a connection that was given up since, is not taken."""
        if isinstance(event, AgentRegistered):
            node, life = event.register.node, event.register.incarnation
        elif isinstance(event, ReportArrived | HeartbeatChanged):
            node, life = event.node, event.incarnation
        else:
            return
        if life < self._registered.get(node, 0):
            raise Violation(self.name, f"a {type(event).__name__} of an earlier life of {node} is taken")
        self._registered[node] = life

    # --- directives --------------------------------------------------------------------------------------------------

    def _durable(self, fact: facts.Durable) -> None:
        for node in fact.batch.forgotten_nodes:
            self._marks = {place: through for place, through in self._marks.items() if place[0] != node}
            self._written.pop(node, None)
        for (node, life), through in fact.batch.acknowledged_reports.items():
            self._marks[node, life] = max(through, self._marks.get((node, life), 0))
        for row in fact.batch.generations:
            self._generations.add((row.job, row.number))
        self._run_again.update(row.job for row in fact.batch.audit if "once more" in row.sentence)
        for node, doc in fact.batch.nodes.items():
            self._recorded[node] = msgspec.json.decode(doc, type=_Life).identity.incarnation
        for row in fact.batch.outbox:
            self._written[row.node][row.seq] = row.body, self._recorded.get(row.node, 0)
        for node, through in fact.batch.acknowledged.items():
            self._forgotten(node, through)

    def _forgotten(self, node: str, through: int) -> None:
        """A directive's row goes when its node has it, under this number or another one, or has begun another life
        than the one that it was written for: the one on record, since who leads anew may not know the newest yet."""
        for seq in [seq for seq in self._written[node] if seq <= through]:
            body, life = self._written[node].pop(seq)
            this_life = life == self._recorded.get(node, 0)
            if seq not in self._told[node] and this_life and _name(body) not in self._heard[node]:
                self._forgot[node, _name(body)] = seq

    def _delivered(self, fact: facts.Delivered) -> None:
        self._told[fact.node].add(fact.seq)
        body = fact.body
        self._heard[fact.node].add(_name_of(body))
        self._forgot.pop((fact.node, _name_of(body)), None)
        if isinstance(body, VersionNotice):
            return
        written = not isinstance(body, NewGeneration) or (body.spec.job, body.spec.number) in self._generations
        if not written and body.spec.number < NUMBERS_PER_EPOCH:
            raise Violation(self.name, f"{fact.node} hears of generation {body.spec.number}, which is not written")


class _Life(msgspec.Struct):
    """The part of a node's record that the checker reads."""

    identity: NodeIdentity


def _name(stored: str) -> str:
    """What a directive is about, by what is stored of it."""
    if stored.startswith("@"):
        return f"generation/{stored[1:]}"
    body: AnyDirective = msgspec.json.decode(stored, type=AnyDirective)
    return _name_of(body)


def _name_of(body: AnyDirective) -> str:
    match body:
        case NewGeneration(spec=spec):
            return f"generation/{spec.job}/{spec.number}"
        case KillRank():
            return f"kill/{body.job}/{body.generation}"
        case StopJob():
            return f"stop/{body.job}/0"
        case RunProbe():
            return f"probe/{body.probe}/0"
        case _:
            return "versions//0"
