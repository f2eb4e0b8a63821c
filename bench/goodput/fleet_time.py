"""The decision core in virtual time: events, deadlines, and heartbeats that need not be played.

Time jumps from one event to the next. Heartbeats without consequences are not played: a healthy node sends one each
second, and the changes that they make to its runtime record are known without playing them, until the node falls
silent. ``eager`` plays every heartbeat; a test checks that both ways decide alike.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from bench.goodput.accounts import HOUR_S
from everstep.vocabulary import Finding, NodeState
from everstep.wire.v1.training import AnyReport, RankProgress
from everstep_controller.core import engine
from everstep_controller.core import events as ev
from everstep_controller.core.effects import Effect
from everstep_controller.core.liveness.suspicion import PAUSE_DECAY_S
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.startup import restore_state

START = 1_700_000_000.0
ENTROPY = "5e" * 32
BEAT_S = 1.0
TICKS_APART_S = 0.01
"""Seconds between two ticks, as in ``everstep_controller.runtime.loop``."""

Observer = Callable[[ev.Event, list[Effect], float], None]


@dataclass(slots=True, eq=False)
class Node:
    """A node of the fleet.

    ``away_until``: end of its silence (None: it is reachable). ``ill`` and ``ill_until``: its fault, and the end of it.
    ``sleeps``: its heartbeats are not played.
    """

    name: str
    life: int = 0
    boots: int = 0
    gpus: int = 0
    away_until: float | None = None
    ill: str = ""
    ill_until: float = 0.0
    lies: bool = False
    findings: tuple[Finding, ...] = ()
    sleeps: bool = False
    slept_at: float = 0.0


class FleetInTime:
    """The core, its clock, and nodes that send heartbeats. Subclasses carry out the core's decisions.

    Args:
        hours: Hours until the end. Sleeping nodes count as heard until then.
        eager: Play every heartbeat.
        observe: Called with every event, its effects and the time.
    """

    def __init__(self, policy: CorePolicy, nodes: int, hours: float, *, eager: bool, observe: Observer | None) -> None:
        self.state = restore_state(policy)
        self.now = START
        self.nodes = [Node(f"n{index:05d}") for index in range(nodes)]
        self.by_name = {node.name: node for node in self.nodes}
        self._beyond = START + 2 * hours * HOUR_S
        self._eager = eager
        self._observe = observe
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._numbers: Counter[str] = Counter()
        self._traces = 0
        self._ticked_at = 0.0
        self._beat_at = START + BEAT_S

    def _carry_out(self, effects: list[Effect]) -> None:
        """Carry out the core's decisions."""
        raise NotImplementedError

    def _progress(self, node: Node) -> tuple[RankProgress, ...]:
        """Return the progress of ranks in the node's next heartbeat."""
        raise NotImplementedError

    def _spokesman(self) -> Node | None:
        """Return the node whose heartbeats report the job's step; None while the job does not step."""
        raise NotImplementedError

    # --- time --------------------------------------------------------------------------------------------------------

    def _at(self, due: float, call: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._heap, (due, self._order, call))

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._at(self.now + seconds, call)

    def _next(self, end: float) -> None:
        """Play the next event of the world or of the core."""
        due = engine.next_deadline(self.state)
        due = None if due is None else max(due, self._ticked_at + TICKS_APART_S)
        if self._heap and (due is None or self._heap[0][0] <= due):
            at, _, call = heapq.heappop(self._heap)
            self._pass(min(max(at, self.now), end))
            if at < end:
                call()
        elif due is None or due >= end:
            self._pass(end)
        else:
            self._pass(max(due, self.now))
            if (spokesman := self._spokesman()) is not None:
                self._beat(spokesman)
            self._ticked_at = self.now
            self._handle(ev.Tick(trace=self._trace()))

    def _pass(self, now: float) -> None:
        """Let time pass, with heartbeats of all reachable nodes if every one is played."""
        while self._eager and self._beat_at <= now:
            self.now, self._beat_at = self._beat_at, self._beat_at + BEAT_S
            self._beat_all()
        self.now = now
        self._hear_lazily()

    def _trace(self) -> str:
        self._traces += 1
        return f"{self._traces:x}"

    # --- beats -------------------------------------------------------------------------------------------------------

    def _hear_lazily(self) -> None:
        """Record that a message was received within the last second, as from the heartbeats that are not played."""
        if not self._eager:
            self.state.observer.last_received_at = self.now - BEAT_S / 2

    def _sleep(self, node: Node) -> None:
        """Stop playing the node's heartbeats. Its last message gets a time after the end, so that no silence begins."""
        if self._eager:
            return
        if not node.sleeps:
            node.sleeps, node.slept_at = True, self.now
        pulse = self.state.node_runtime[node.name].heartbeats
        pulse.last_seen_at = self._beyond
        pulse.longest_pause_s = max(pulse.longest_pause_s, BEAT_S)

    def _wake(self, node: Node) -> None:
        """Play the node's heartbeats again, beginning with the last one that was not played."""
        if node.sleeps:
            node.sleeps = False
            live = self.state.node_runtime[node.name]
            beats = int((self.now - node.slept_at) / BEAT_S)
            faded_s = live.heartbeats.longest_pause_s * (1.0 - BEAT_S / PAUSE_DECAY_S) ** beats
            live.heartbeats.last_seen_at, live.heartbeats.longest_pause_s = self.now - BEAT_S, max(BEAT_S, faded_s)
            live.has_silence_deadline = False
            self._handle(ev.NodeSeen(node=node.name, incarnation=node.life, trace=self._trace()))

    def _beat_all(self) -> None:
        for node in self.nodes:
            if node.away_until is None and node.life:
                self._beat(node)

    def _beat(self, node: Node) -> None:
        heard = engine.apply_heartbeat(self.state, node.name, node.life, self.now, self._progress(node))
        if heard is engine.HeartbeatResult.NEEDS_EVENT:
            self._handle(
                ev.HeartbeatChanged(
                    node=node.name, incarnation=node.life, ranks=self._progress(node), trace=self._trace()
                )
            )
        if node.sleeps:
            self._sleep(node)

    def _beat_until_well(self, node: Node, life: int) -> None:
        """Play every heartbeat while the node is on probation."""
        if node.life != life or node.away_until is not None or self._eager:
            return
        record = self.state.nodes[node.name]
        if record.state is NodeState.PROBATION:
            self._beat(node)
            self._after(BEAT_S, lambda: self._beat_until_well(node, life))
        else:
            self._sleep(node)

    # --- the core ----------------------------------------------------------------------------------------------------

    def _handle(self, event: ev.Event) -> None:
        effects = engine.handle(self.state, event, self.now)
        if self._observe is not None:
            self._observe(event, effects, self.now)
        self._carry_out(effects)

    def _report(self, node: Node, body: AnyReport) -> None:
        """Handle a node's report, if the node is reachable."""
        if node.away_until is not None or not node.life:
            return
        self._numbers[node.name] += 1
        event = ev.ReportArrived(
            node=node.name,
            incarnation=node.life,
            number=self._numbers[node.name],
            body=body,
            entropy=ENTROPY,
            trace=self._trace(),
        )
        self._handle(event)
        if node.sleeps:
            self._sleep(node)  # a report counts as a message too, and sets the time of the last one
