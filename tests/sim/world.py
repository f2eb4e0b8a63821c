"""A whole world from a plan: machines, network, database, controllers, trainers; and who looks on."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from everstep_controller.core.state import FleetState

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.wire.v1.training import GenerationSpec, Member
from tests.sim import facts
from tests.sim.checkers.checker import Checker
from tests.sim.collective import Collective
from tests.sim.controller_process import ControllerProcess
from tests.sim.crew import Crew
from tests.sim.database import Database, NotUnique
from tests.sim.facts import Fact, Violation
from tests.sim.faults import FAULTS_END_S
from tests.sim.machine import Machine
from tests.sim.mischief import Mischief
from tests.sim.outside import Outside
from tests.sim.plan import MachinePlan, Plan
from tests.sim.rank_memory import RankMemory
from tests.sim.storage import Storage
from tests.sim.timeline import MachineClock, Timeline
from tests.sim.vault_memory import Slot
from tests.sim.wires import Wires
from tests.support import invariants

QUIET_FROM_S = FAULTS_END_S + 25.0
"""When everything is mended: nothing breaks any more from here on."""
PATIENCE_S = 120.0
"""Within which after that everything must be well."""
LOOK_EVERY_S = 3.0


class World:
    """Runs once. ``trace`` lines go to ``on_trace`` where one is given."""

    def __init__(
        self,
        plan: Plan,
        checkers: Sequence[Checker],
        *,
        spool_dir: Path,
        on_trace: Callable[[float, str, str], None] | None = None,
    ) -> None:
        self.plan = plan
        self.timeline = Timeline()
        self.rng = random.Random(plan.seed ^ 0x5EED)
        self.wires = Wires(self.timeline, self.rng)
        self.wires.delay_s, self.wires.loss = plan.delay_s, plan.loss
        self.jobs = {job.name: job for job in plan.jobs}
        self.finished: set[str] = set()
        self.seen: set[str] = set()
        self._on_trace = on_trace
        self._checkers = checkers
        self._watchers: dict[type, list[Callable[[Any], None]]] = defaultdict(list)
        for checker in checkers:
            for kind, watcher in checker.watches().items():
                self._watchers[kind].append(watcher)
        self._traces = self._lives = self._epoch = 0
        self._collectives: dict[tuple[str, int], Collective] = {}
        self._lanes: dict[tuple[str, int, str], float] = {}
        self.storage_rng = random.Random(plan.seed ^ 0x570)
        self.upkeep_rng = random.Random(plan.seed ^ 0x0BEE)
        self.storage = Storage(lambda: self.timeline.now, self.storage_rng)
        self.database = Database(self.timeline, self.rng, self._applied)
        self.controllers = [ControllerProcess(self, p.name, self._clock(p)) for p in plan.controllers]
        self.machines = {p.name: Machine(self, p.name, p.domain, self._clock(p), spool_dir) for p in plan.machines}
        for job in plan.jobs:
            for node in job.nodes:
                self.machines[node].assigned[job.name] = job
        self.crew = Crew(self)
        self.outside = Outside(self)

    def _clock(self, plan: MachinePlan) -> MachineClock:
        return MachineClock(self.timeline, plan.clock_rate, plan.clock_offset_s)

    def run(self) -> None:
        """Plays the plan to its end. Raises Violation."""
        mischief = Mischief(self)
        for controller in self.controllers:
            self.timeline.after(self.rng.random(), controller.start)
        for machine in self.machines.values():
            self.timeline.after(1.0 + 2.0 * self.rng.random(), machine.boot)
        for _, fault in self.plan.faults:
            self.timeline.at(fault.at, lambda f=fault: mischief.strike(f))  # type: ignore[misc]
        try:
            self._play()
        except NotUnique as error:
            raise Violation("uniqueness", str(error)) from error

    def _play(self) -> None:
        self.timeline.run(self._last_fault_at())
        self.crew.mend_everything()
        until = self.timeline.now + PATIENCE_S
        while self.timeline.now < until:
            self.timeline.run(self.timeline.now + LOOK_EVERY_S)
            if not any(checker.complaint() for checker in self._checkers):
                return
        for checker in self._checkers:
            if complaint := checker.complaint():
                raise Violation(checker.name, f"{PATIENCE_S:g} s after the last fault: {complaint}")

    def _last_fault_at(self) -> float:
        """Where few faults are played, quiet begins sooner."""
        ends = [fault.at + fault.seconds for _, fault in self.plan.faults]
        return min(QUIET_FROM_S, max(ends, default=15.0) + 5.0)

    def end(self) -> None:
        """Lets go of files and tasks."""
        for controller in self.controllers:
            controller.crash(restart=False)
        for machine in self.machines.values():
            if machine.agent is not None:
                machine.agent.spool.close()

    # --- looking on --------------------------------------------------------------------------------------------------

    def watch(self, kind: type, watcher: Callable[[Any], None]) -> None:
        """``watcher`` hears of every fact of that kind."""
        self._watchers[kind].append(watcher)

    def see(self, fact: Fact) -> None:
        """Something can be seen from outside."""
        if self._on_trace is not None:
            self._tell(fact)
        for watcher in self._watchers[type(fact)]:
            watcher(fact)
        if isinstance(fact, facts.TookOver):
            self._epoch = fact.epoch
        elif isinstance(fact, facts.Handled) and fact.epoch == self._epoch:
            decided = facts.Decided(fact.controller, fact.epoch, fact.event, fact.effects, fact.at)
            for watcher in self._watchers[facts.Decided]:
                watcher(decided)

    def check(self, state: FleetState) -> None:
        """The core's own invariants, after every event."""
        try:
            invariants.check(state)
        except AssertionError as error:
            raise Violation("core", str(error)) from error

    def _applied(self, epoch: int, batch: Any) -> None:
        self.seen.update(row.kind for row in batch.audit)
        for row in batch.audit:
            if row.kind == "job.finished" or row.sentence.startswith("stopped by"):
                self.finished.add(row.job)
            elif row.kind == "job.created":  # by a launcher that began before its machine knew of the end
                self.finished.discard(row.job)
        self.see(facts.Durable(epoch, batch))

    def trace(self, who: str, words: str) -> None:
        if self._on_trace is not None:
            self._on_trace(self.timeline.now, who, words)

    def _tell(self, fact: Fact) -> None:
        match fact:
            case facts.Handled():
                self.trace(fact.controller, f"{type(fact.event).__name__} {_subject(fact.event)}")
                for effect in fact.effects:
                    if (entry := getattr(effect, "entry", None)) is not None:
                        self.trace(fact.controller, f"  {entry.kind}: {entry.sentence}")
            case facts.Stepped():
                self.trace(fact.node, f"{fact.job} rank {fact.rank} finished step {fact.generation}:{fact.step}")
            case facts.Restored():
                start = fact.storage or fact.version
                self.trace(fact.spec.job, f"generation {fact.spec.number} starts from {start}")
            case facts.Delivered():
                self.trace(fact.node, f"hears {type(fact.body).__name__}")
            case facts.Durable() | facts.Acknowledged() | facts.FaultBegan() | facts.RemedyLookedAt():
                return
            case facts.Entered():
                self.trace(fact.node, f"{fact.spec.job} rank {fact.rank} enters generation {fact.spec.number}")
            case facts.TookOver():
                self.trace(fact.controller, f"takes over as epoch {fact.epoch}")
            case _:
                self.trace("world", str(fact))

    # --- names -------------------------------------------------------------------------------------------------------

    def trace_id(self, who: str) -> str:
        self._traces += 1
        return f"{who}-{self._traces}"

    def next_life(self) -> int:
        self._lives += 1
        return self._lives

    def controller(self, name: str) -> ControllerProcess:
        return next(c for c in self.controllers if c.name == name)

    def leader(self) -> ControllerProcess | None:
        """Whoever leads by the database's word."""
        leading = [c for c in self.controllers if c.leading and c.epoch == self.database.epoch and not c.paused]
        return leading[0] if leading else None

    # --- what several machines do together ---------------------------------------------------------------------------

    def collective(self, spec: GenerationSpec) -> Collective:
        key = (spec.job, spec.number)
        if key not in self._collectives:
            self._collectives = {k: c for k, c in self._collectives.items() if c.members}
            self._collectives[key] = Collective(self, spec)
        return self._collectives[key]

    def replicate(
        self,
        memory: RankMemory,
        slot: Slot,
        spec: GenerationSpec,
        member: Member,
        kept: bool,
        targets: tuple[str, ...],
        keep: set[Version],
    ) -> None:
        """The vaults copy what a rank alone holds; the rank's own is told when all have answered."""
        answers: list[str] = []
        open_answers = set(targets)

        def answered(node: str, ok: bool) -> None:
            open_answers.discard(node)
            answers.extend([node] if ok else [])
            if not open_answers:
                memory.replicated(slot, spec, member, kept, tuple(answers))

        for node in targets:
            delay_s = 0.02 + self.wires.transit_s(member.node, node)
            lane = spec.job, member.rank, node  # one at a time: none overtakes the one before it
            self._lanes[lane] = max(self.timeline.now + delay_s, self._lanes.get(lane, 0.0))
            self.timeline.at(
                self._lanes[lane],
                lambda n=node: answered(n, self._copy(slot, spec, member, n, keep)),  # type: ignore[misc]
            )

    def _copy(self, slot: Slot, spec: GenerationSpec, member: Member, node: str, keep: set[Version]) -> bool:
        """Whether ``node`` holds a copy now. A generation that is over is refused there."""
        source, target = self.machines[member.node], self.machines[node]
        if not source.power or not target.power or target.frozen or not self.wires.connected(member.node, node):
            return False
        over = target.vault.generations.get(spec.job, 0) > spec.number
        if over or target.vault.full or not slot.sealed or slot.rotten:
            return False
        slots = SLOTS_PER_RANK + spec.spec.pinned_slots
        segment = target.vault.segment(spec.job, member.node, member.rank, replica=True, slots=slots)
        try:
            segment.begin(Slot(slot.version, slot.layout, slot.state, sealed=True), keep)
        except OutOfSlotMemory:
            return False
        return True


def _subject(event: Any) -> str:
    body = getattr(event, "body", None)
    words = [getattr(event, "node", "") or "", type(body).__name__ if body is not None else ""]
    if (register := getattr(event, "register", None)) is not None:
        words.append(register.node)
    if (kind := getattr(event, "kind", None)) is not None:
        words += [str(kind), getattr(event, "job", "") or ""]
    return " ".join(word for word in words if word)
