"""Run a whole world from its plan: machines, network, database, controllers, trainers, and checkers."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from everstep.errors import OutOfSlotMemory
from everstep.ids import Version
from everstep.layout.slots import SLOTS_PER_RANK
from everstep.wire.v1.training import GenerationSpec, Member
from everstep_controller.core.state import FleetState
from tests.sim.checkers.checker import Checker, Violation
from tests.sim.cluster.database import Database, DuplicateRow
from tests.sim.cluster.machine import Machine
from tests.sim.cluster.network import Network
from tests.sim.cluster.observations import (
    BatchWritten,
    DirectiveDelivered,
    EventHandled,
    FaultInjected,
    GenerationEntered,
    LeaderDecided,
    LeaderStarted,
    Observation,
    RemediationReadBack,
    ReportsAcknowledged,
    StateRestored,
    StepFinished,
)
from tests.sim.cluster.operators import Operators
from tests.sim.cluster.scheduler import Scheduler
from tests.sim.cluster.storage import Storage
from tests.sim.cluster.timeline import MachineClock, Timeline
from tests.sim.faults.injector import FaultInjector
from tests.sim.faults.kinds import FAULTS_END_S
from tests.sim.faults.plan import MachinePlan, Plan
from tests.sim.processes.controller import ControllerProcess
from tests.sim.processes.process_group import ProcessGroup
from tests.sim.processes.rank_snapshots import RankSnapshots
from tests.sim.processes.vault_memory import Slot
from tests.support.fleet import invariants

FAULT_FREE_FROM_S = FAULTS_END_S + 25.0
"""Seconds from which no fault is active: none begins, and all earlier ones have ended."""
RECOVERY_TIMEOUT_S = 120.0
"""Seconds after the last fault within which everything must recover."""
RECOVERY_CHECK_S = 3.0
"""Seconds between two checks for problems that remain after the last fault."""


class World:
    """A world that runs once.

    Args:
        plan: The fleet, its jobs, and the faults to inject.
        checkers: The checkers that get every observation.
        spool_dir: The directory of the agents' spools.
        on_trace: Gets each line of the trace as (time, source, message).
    """

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
        self.network = Network(self.timeline, self.rng)
        self.network.delay_s, self.network.loss = plan.delay_s, plan.loss
        self.jobs = {job.name: job for job in plan.jobs}
        self.finished_jobs: set[str] = set()
        self.logged_kinds: set[str] = set()
        self._on_trace = on_trace
        self._checkers = checkers
        self._handlers: dict[type, list[Callable[[Any], None]]] = defaultdict(list)
        for checker in checkers:
            for kind, handler in checker.handlers().items():
                self._handlers[kind].append(handler)
        self._traces = self._pids = self._epoch = 0
        self._process_groups: dict[tuple[str, int], ProcessGroup] = {}
        self._last_copy_at: dict[tuple[str, int, str], float] = {}
        self.storage_rng = random.Random(plan.seed ^ 0x570)
        self.maintenance_rng = random.Random(plan.seed ^ 0x0BEE)
        self.storage = Storage(lambda: self.timeline.now, self.storage_rng)
        self.database = Database(self.timeline, self.rng, self._on_written)
        self.controllers = [ControllerProcess(self, p.name, self._clock(p)) for p in plan.controllers]
        self.machines = {p.name: Machine(self, p.name, p.domain, self._clock(p), spool_dir) for p in plan.machines}
        for job in plan.jobs:
            for node in job.nodes:
                self.machines[node].assigned_jobs[job.name] = job
        self.operators = Operators(self)
        self.scheduler = Scheduler(self)

    def _clock(self, plan: MachinePlan) -> MachineClock:
        return MachineClock(self.timeline, plan.clock_rate, plan.clock_offset_s)

    def run(self) -> None:
        """Run the plan to its end.

        Raises:
            Violation: A promise was broken.
        """
        injector = FaultInjector(self)
        for controller in self.controllers:
            self.timeline.after(self.rng.random(), controller.start)
        for machine in self.machines.values():
            self.timeline.after(1.0 + 2.0 * self.rng.random(), machine.boot)
        for _, fault in self.plan.faults:
            self.timeline.at(fault.at, lambda f=fault: injector.inject(f))  # type: ignore[misc]
        try:
            self._run()
        except DuplicateRow as error:
            raise Violation("uniqueness", str(error)) from error

    def _run(self) -> None:
        self.timeline.run(self._faults_end_at())
        self.operators.repair_everything()
        until = self.timeline.now + RECOVERY_TIMEOUT_S
        while self.timeline.now < until:
            self.timeline.run(self.timeline.now + RECOVERY_CHECK_S)
            if not any(checker.remaining_problem() for checker in self._checkers):
                return
        for checker in self._checkers:
            if problem := checker.remaining_problem():
                raise Violation(checker.name, f"{RECOVERY_TIMEOUT_S:g} s after the last fault: {problem}")

    def _faults_end_at(self) -> float:
        """Return the time from which no fault is active, which is earlier if the plan has few faults."""
        ends = [fault.at + fault.seconds for _, fault in self.plan.faults]
        return min(FAULT_FREE_FROM_S, max(ends, default=15.0) + 5.0)

    def close(self) -> None:
        """Close files and end tasks."""
        for controller in self.controllers:
            controller.crash(restart=False)
        for machine in self.machines.values():
            if machine.agent is not None:
                machine.agent.spool.close()

    def subscribe(self, kind: type, handler: Callable[[Any], None]) -> None:
        """Call ``handler`` with every observation of that class."""
        self._handlers[kind].append(handler)

    def observe(self, observation: Observation) -> None:
        """Pass an observation to the handlers of its class."""
        if self._on_trace is not None:
            self._trace_observation(observation)
        for handler in self._handlers[type(observation)]:
            handler(observation)
        if isinstance(observation, LeaderStarted):
            self._epoch = observation.epoch
        elif isinstance(observation, EventHandled) and observation.epoch == self._epoch:
            decision = LeaderDecided(
                observation.controller, observation.epoch, observation.event, observation.effects, observation.at
            )
            for handler in self._handlers[LeaderDecided]:
                handler(decision)

    def check_invariants(self, state: FleetState) -> None:
        """Check the core's own invariants. Controllers call this after every event."""
        try:
            invariants.check(state)
        except AssertionError as error:
            raise Violation("core", str(error)) from error

    def _on_written(self, epoch: int, batch: Any) -> None:
        self.logged_kinds.update(row.kind for row in batch.event_log)
        for row in batch.event_log:
            if row.kind == "job.finished" or row.sentence.startswith("stopped by"):
                self.finished_jobs.add(row.job)
            elif row.kind == "job.created":  # by a launcher that began before its machine received the end of the job
                self.finished_jobs.discard(row.job)
        self.observe(BatchWritten(epoch, batch))

    def trace(self, source: str, message: str) -> None:
        """Add a line to the trace."""
        if self._on_trace is not None:
            self._on_trace(self.timeline.now, source, message)

    def _trace_observation(self, observation: Observation) -> None:
        match observation:
            case EventHandled(controller=controller, event=event, effects=effects):
                self.trace(controller, f"{type(event).__name__} {_subject(event)}")
                for effect in effects:
                    if (entry := getattr(effect, "entry", None)) is not None:
                        self.trace(controller, f"  {entry.kind}: {entry.sentence}")
            case StepFinished(node=node, job=job, rank=rank, generation=generation, step=step):
                self.trace(node, f"{job} rank {rank} finished step {generation}:{step}")
            case StateRestored(spec=spec):
                start = observation.storage or observation.version
                self.trace(spec.job, f"generation {spec.number} starts from {start}")
            case DirectiveDelivered(node=node, body=body):
                self.trace(node, f"receives {type(body).__name__}")
            case BatchWritten() | ReportsAcknowledged() | FaultInjected() | RemediationReadBack():
                return
            case GenerationEntered(node=node, spec=spec, rank=rank):
                self.trace(node, f"{spec.job} rank {rank} enters generation {spec.number}")
            case LeaderStarted(controller=controller, epoch=epoch):
                self.trace(controller, f"takes over as epoch {epoch}")
            case _:
                self.trace("world", str(observation))

    def trace_id(self, source: str) -> str:
        """Return a trace ID that is unique in the world."""
        self._traces += 1
        return f"{source}-{self._traces}"

    def next_pid(self) -> int:
        """Return a process ID that is unique in the world."""
        self._pids += 1
        return self._pids

    def controller(self, name: str) -> ControllerProcess:
        """Return the controller of that name."""
        return next(c for c in self.controllers if c.name == name)

    def leader(self) -> ControllerProcess | None:
        """Return the running controller that leads in the database's epoch."""
        leaders = [c for c in self.controllers if c.is_leading and c.epoch == self.database.epoch and not c.is_paused]
        return leaders[0] if leaders else None

    def process_group(self, spec: GenerationSpec) -> ProcessGroup:
        """Return the process group of a generation."""
        key = (spec.job, spec.number)
        if key not in self._process_groups:
            self._process_groups = {k: group for k, group in self._process_groups.items() if group.members}
            self._process_groups[key] = ProcessGroup(self, spec)
        return self._process_groups[key]

    def replicate(
        self,
        snapshots: RankSnapshots,
        slot: Slot,
        spec: GenerationSpec,
        member: Member,
        is_candidate: bool,
        targets: tuple[str, ...],
        needed: set[Version],
    ) -> None:
        """Copy a rank's slot to other vaults, and notify ``snapshots`` when all have answered.

        Args:
            snapshots: The slots of the rank, which get the nodes that hold a copy.
            slot: The sealed slot.
            spec: The generation in which the slot was filled.
            member: The rank's place in the generation.
            is_candidate: Whether the version is the next one to commit.
            targets: The nodes that should hold a copy.
            needed: The versions that a target must not overwrite.
        """
        holders: list[str] = []
        unanswered = set(targets)

        def answered(node: str, ok: bool) -> None:
            unanswered.discard(node)
            holders.extend([node] if ok else [])
            if not unanswered:
                snapshots.handle_copies(slot, spec, member, is_candidate, tuple(holders))

        for node in targets:
            delay_s = 0.02 + self.network.transit_s(member.node, node)
            route = spec.job, member.rank, node  # copies between two vaults keep their order
            self._last_copy_at[route] = max(self.timeline.now + delay_s, self._last_copy_at.get(route, 0.0))
            self.timeline.at(
                self._last_copy_at[route],
                lambda n=node: answered(n, self._copy(slot, spec, member, n, needed)),  # type: ignore[misc]
            )

    def _copy(self, slot: Slot, spec: GenerationSpec, member: Member, node: str, needed: set[Version]) -> bool:
        """Copy a slot to ``node``, and return whether it holds the copy. It refuses a finished generation."""
        source, target = self.machines[member.node], self.machines[node]
        is_reachable = self.network.connected(member.node, node)
        if not source.has_power or not target.has_power or target.is_frozen or not is_reachable:
            return False
        is_over = target.vault_memory.generations.get(spec.job, 0) > spec.number
        if is_over or target.vault_memory.is_full or not slot.sealed or slot.corrupt:
            return False
        slots = SLOTS_PER_RANK + spec.spec.pinned_slots
        segment = target.vault_memory.segment(spec.job, member.node, member.rank, replica=True, slots=slots)
        try:
            segment.begin(Slot(slot.version, slot.layout, slot.state, sealed=True), needed)
        except OutOfSlotMemory:
            return False
        return True


def _subject(event: Any) -> str:
    """Return the names in an event: its node, its message, its command and its job."""
    body = getattr(event, "body", None)
    names = [getattr(event, "node", "") or "", type(body).__name__ if body is not None else ""]
    if (register := getattr(event, "register", None)) is not None:
        names.append(register.node)
    if (kind := getattr(event, "kind", None)) is not None:
        names += [str(kind), getattr(event, "job", "") or ""]
    return " ".join(name for name in names if name)
