"""Where the faults are played: the world, what is seen of it, and how a recovery is followed to its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from everstep.system_clock import SYSTEM_CLOCK
from everstep.vocabulary import JobState, NodeState
from everstep.wire.v1.operator import Event
from examples.demo.story import FaultRecord, Run
from examples.demo.view import View
from examples.demo.watch import Watch
from examples.demo.world import Node, World, last_row

JOB = "demo"
RANKS = 4
"""Nodes of the whole roster, with a rank each."""
PATIENCE_S = 180.0
"""Seconds until something that must happen counts as not happening, on a machine that is slow and busy as well."""
CALM_STEPS = 6
"""Steps that all ranks must finish after a recovery before the next fault."""


@dataclass
class Stage:
    """Everything a fault needs. ``command`` starts a node's launcher."""

    world: World
    watch: Watch
    view: View
    command: Callable[[Node], list[str]]
    steps: int
    faults: list[FaultRecord] = field(default_factory=list)

    def say(self, kind: str, sentence: str) -> None:
        self.view.say(SYSTEM_CLOCK.wall(), kind, sentence)

    def step(self) -> int:
        """The newest step that any rank finished."""
        rows = filter(None, map(last_row, self.world.steps.glob("*.jsonl")))
        return max((int(row["step"]) for row in rows), default=0)

    def ready(self, spares: int = 0) -> None:
        """Wait until a fault can be injected: nothing is being recovered from, and what recovers from it is there.

        Args:
            spares: nodes that must stand ready outside the roster.

        Raises:
            TimeoutError: That takes too long, or the training has ended before the last fault.
        """
        what = f"the job steps on {RANKS} nodes with {spares} spare(s)"
        self.watch.wait(lambda: self.is_over() or self.is_ready(spares), what, PATIENCE_S)
        if self.is_over():
            raise TimeoutError(f"{what}: the training ended before the last fault; give it more --steps")

    def is_over(self) -> bool:
        """Whether the job has ended."""
        return self.watch.job is not None and self.watch.job.summary.state in (JobState.FINISHED, JobState.FAILED)

    def is_ready(self, spares: int) -> bool:
        """Whether the whole roster is healthy and steps in the newest generation, and the spares are there.

        The controller's view is a moment old, and on a busy machine a rank may have been taken for hung and replaced
        since. Its word therefore counts only where the step logs agree with it.
        """
        job = self.watch.job
        if job is None or job.summary.state is not JobState.RUNNING or job.summary.spares < spares:
            return False
        generation, members = job.summary.generation, {member.node for member in job.roster}
        return (
            len(members) == RANKS
            and self.watch.settled(generation)
            and all(self.watch.state(name) is NodeState.HEALTHY for name in members)
            and all(self.world.nodes[name].rank_pid(generation) is not None for name in members)
        )

    def rank_of(self, node: Node) -> int:
        """The process that is the node's rank now. Raises RuntimeError where the node takes no part."""
        pid = node.rank_pid(self.watch.generation)
        if pid is None:
            raise RuntimeError(f"{node.name} runs no rank in generation {self.watch.generation}")
        return pid

    def node_of(self, rank: int) -> Node:
        """The node that plays ``rank`` now."""
        assert self.watch.job is not None
        member = next(member for member in self.watch.job.roster if member.rank == rank)
        return self.world.nodes[member.node]

    def node_to_evict(self, *ranks: int) -> Node:
        """The node of the first of ``ranks`` that no fault has had evicted yet: a rack's budget is one eviction in five
        minutes, and a node that came back may play any rank."""
        spent = {record.expected_eviction for record in self.faults}
        return next(node for node in map(self.node_of, ranks) if node.name not in spent)

    def begin(self, record: FaultRecord) -> None:
        """Notes the moment before a fault."""
        record.step = self.step()
        self.view.title = record.title
        self.say("done", record.title)
        self.faults.append(record)
        record.injected_at = SYSTEM_CLOCK.wall()

    def expect(self, since: float, what: str, match: Callable[[Event], bool]) -> Event:
        """The first event since the wall time ``since`` that matches."""

        def found() -> Event | None:
            return next((event for event in list(self.watch.events) if event.at >= since and match(event)), None)

        self.watch.wait(lambda: found() is not None, what, PATIENCE_S)
        event = found()
        assert event is not None
        return event

    def follow(self, record: FaultRecord, kinds: set[str], node: str) -> None:
        """Follows a fault that ends in a new generation: found, decided, first step of all.

        It is found with the first event of ``kinds`` that is about ``node``, or about no node. The record's trace is
        that of the generation: several may see a fault, and this one is answered.
        """

        def tells(event: Event) -> bool:
            return event.kind in kinds and event.node in {node, ""}

        since = record.injected_at
        found = self.expect(since, f"{record.title}: found", tells)
        record.found_at = seen_at(found)
        decided = self.expect(since, f"{record.title}: a new generation", lambda event: event.kind == "generation")
        record.decided_at, record.generation = decided.at, decided.generation or 0
        record.found_at = min(record.found_at, decided.at)  # another witness may have told first
        record.trace, record.sentence = decided.trace, decided.sentence
        self.finish(record)

    def finish(self, record: FaultRecord) -> None:
        """Waits for the first step of all in the record's generation, and for calm."""
        self.watch.wait(lambda: self._stepped(record) is not None, f"{record.title}: stepping again", PATIENCE_S)
        record.first_step_at = self._stepped(record)
        for event in list(self.watch.events):
            if event.at >= record.injected_at and event.kind == "verdict.evict":
                record.evicted_node = event.node
        self.calm()

    def _stepped(self, record: FaultRecord) -> float | None:
        """When all ranks had finished a step in the record's generation (or, without one, any step since)."""
        run = Run.read(self.world.steps)
        if record.generation:
            first = run.first_after(record.generation)
            return None if first is None else first.at
        return next((step.at for step in run.finished if step.at > record.injected_at), None)

    def calm(self) -> None:
        """Waits until the running generation has finished CALM_STEPS more steps."""
        goal = min(self.step() + CALM_STEPS, self.steps)
        self.watch.wait(lambda: self.step() >= goal, "the job steps on", PATIENCE_S)

    def comes_back(self, node: Node) -> None:
        """Boots a node anew (what still runs on it ends with the power) and starts its launcher."""
        self.say("done", f"{node.name} is back: its machine boots, its agent and its launcher start")
        node.kill()
        node.boot()
        self.watch.wait(lambda: node.booted, f"the agent of {node.name} is up", PATIENCE_S)
        node.join(self.command(node))

    def readmitted(self, node: Node) -> None:
        """Waits until the controller counts a node as healthy again."""
        state = NodeState.HEALTHY
        self.watch.wait(lambda: self.watch.state(node.name) is state, f"{node.name} is healthy again", PATIENCE_S)

    def wait_step(self, step: int) -> None:
        """Waits until some rank has finished ``step``."""
        self.watch.wait(lambda: self.step() >= step, f"step {step}", PATIENCE_S + 120)

    def wait_spares(self, nodes: int) -> None:
        """Waits until so many nodes stand ready outside the roster."""
        watch = self.watch
        watch.wait(lambda: watch.job is not None and watch.job.summary.spares >= nodes, f"{nodes} spare(s)", PATIENCE_S)

    def wait_world(self, nodes: int) -> None:
        """Waits until the roster has ``nodes`` nodes and all of them step."""
        self.watch.wait(
            lambda: len(self.watch.roster) == nodes and self.watch.settled(self.watch.generation),
            f"the job runs on {nodes} nodes",
            PATIENCE_S,
        )


def seen_at(event: Event) -> float:
    """When the node saw what the event tells; where it does not say, when the controller heard."""
    return float(event.detail.get("seen_at", event.at))


def pause(seconds: float) -> None:
    """Lets real time pass."""
    time.sleep(seconds)
