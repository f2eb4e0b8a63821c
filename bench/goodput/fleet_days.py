"""Days of a fleet's life: the real core decides about failures, nodes fail and come back, one job regroups.

To the core each node is one rank: what it decides, it decides about nodes.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from bench.failures import Failure, load
from bench.goodput.accounts import HOUR_S, Accounts
from bench.goodput.fleet_nodes import JOB, FleetOfNodes, FleetPlan
from bench.goodput.fleet_time import BEAT_S, START, Node, Observer
from bench.goodput.recovery_model import RecoveryModel
from bench.goodput.symptoms import SYMPTOMS, Sign, Symptom
from everstep.ids import Version
from everstep.vocabulary import Decision, JobState, NodeState
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import (
    CollectiveFailed,
    FindingRaised,
    GenerationSpec,
    RankLost,
    RankProgress,
    Resumed,
    VersionSealed,
)
from everstep_controller.core import events as ev
from everstep_controller.core.effects import (
    AppendToEventLog,
    Effect,
    PutGeneration,
    PutVerdict,
    RequestRemediation,
    Send,
)
from everstep_controller.core.policy import CorePolicy

PROBE_S = 10.0
TRANSIENTS_S = {"agent_restart": 2.0, "network_blip": 8.0}
"""Seconds for which a node is away in a harmless absence."""


@dataclass(frozen=True)
class Regrouped:
    """One regrouping that led back to stepping, as far as its price goes."""

    nodes: int
    newcomers: int
    at_boundary: bool


class FleetDays(FleetOfNodes):
    """One run. ``accounts`` hold the outcome; ``decisions`` are (second, words) of what was decided."""

    def __init__(
        self,
        plan: FleetPlan,
        failures: Iterable[Failure],
        policy: CorePolicy,
        model: RecoveryModel,
        seed: int,
        *,
        eager: bool = False,
        observe: Observer | None = None,
    ) -> None:
        super().__init__(plan, policy, eager=eager, observe=observe)
        self.model = model
        self.accounts = Accounts(plan.nodes)
        self.decisions: list[tuple[float, str]] = []
        self.counts: Counter[str] = Counter()
        self.false_evictions: list[str] = []
        self.least_spares = plan.spares
        self._rng = random.Random(seed)
        self._repair_h = {cause.name: cause.repair_h for cause in load()}
        self._spec: GenerationSpec | None = None
        self._resumes = 0
        self._stepping: GenerationSpec | None = None
        self._step_from = 0.0
        self._step_at = 0
        self._cause = "forming"
        self.regroups: list[Regrouped] = []
        self._price: Regrouped | None = None
        for failure in failures:
            self._expect(START + failure.at_h * HOUR_S, failure)
        for at, index, cause in self._transients():
            self._expect(at, Failure(0.0, cause, (index,)))

    def run(self, on_progress: Callable[[float], None] | None = None) -> FleetDays:
        """Plays it to its end. ``on_progress`` hears the share that is done."""
        end = START + self.plan.hours * HOUR_S
        self._handle(ev.ControllerStarted(epoch=1, trace=self._trace()))
        for node in self.nodes:
            self._register(node)
        for node in self.nodes:
            self._join(node)
        told = 0.0
        while self.now < end:
            self._next(end)
            if on_progress is not None and self.now - told > (end - START) / 200:
                told = self.now
                on_progress((self.now - START) / (end - START))
        self.accounts.close(end - START)
        return self

    # --- what was decided ---------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case PutGeneration(spec=spec):
                    self._opened(spec)
                case PutVerdict(verdict=verdict) if verdict.decision is Decision.EVICT:
                    self._evicted(verdict.node)
                case RequestRemediation(remediation=remedy):
                    self._remedy(remedy.id, remedy.node, remedy.kind)
                case Send(node=name, body=RunProbe() as body):
                    self._after(PROBE_S, lambda n=name, b=body: self._probe(n, b))  # type: ignore[misc]
                case AppendToEventLog(entry=entry):
                    self._told(entry.kind, entry.sentence)
                case _:
                    pass

    def _progress(self, node: Node) -> tuple[RankProgress, ...]:
        """One rank tells how far the job is: all are as far."""
        spec = self._stepping
        if spec is None or spec.seats[0] != node.name:
            return ()
        step = self._step_now()
        return (RankProgress(job=JOB, generation=spec.number, rank=0, step=step, step_s=self.model.step_s),)

    def _step_now(self) -> int:
        return self._step_at + int((self.now - self._step_from) / self.model.step_s)

    def _told(self, kind: str, sentence: str) -> None:
        self.counts[kind] += 1
        if kind == "fleet.breaker_tripped":
            self._after(self.plan.reset_s, self._reset)
        elif kind == "job.paused":
            self._interrupt("too few nodes")
        if kind in DECIDED:
            self.decisions.append((self.now - START, f"{kind}: {sentence}"))

    def _reset(self) -> None:
        if self.state.fleet.breaker_reason:
            self.counts["breaker resets"] += 1
            self._command(ev.OperatorAction.RESET_BREAKER)

    def _expect(self, at: float, failure: Failure) -> None:
        """The failure, and before a silence the last beat."""
        if SYMPTOMS[failure.cause].sign is Sign.SILENCE:
            last_beat = START + (at - START) // BEAT_S * BEAT_S
            for index in failure.nodes:
                self._at(last_beat, lambda i=index: self._wake(self.nodes[i]))  # type: ignore[misc]
        self._at(at, lambda: self._strike(failure))

    def _spokesman(self) -> Node | None:
        return self.by_name[self._stepping.seats[0]] if self._stepping is not None else None

    # --- nodes fail --------------------------------------------------------------------------------------------------

    def _transients(self) -> list[tuple[float, int, str]]:
        plan = self.plan
        expected = plan.transients_per_node_day * len(self.nodes) * plan.hours / 24
        count = int(self._rng.gauss(expected, expected**0.5)) if expected > 0 else 0
        names = list(TRANSIENTS_S)
        return [
            (START + self._rng.uniform(60.0, plan.hours * HOUR_S), self._rng.randrange(len(self.nodes)), name)
            for name in self._rng.choices(names, k=max(0, count))
        ]

    def _strike(self, failure: Failure) -> None:
        """A cause meets its nodes. What is broken or away already is not broken twice."""
        symptom = SYMPTOMS[failure.cause]
        struck = [node for node in (self.nodes[i] for i in failure.nodes) if not node.ill and node.away_until is None]
        for node in (self.nodes[i] for i in failure.nodes):
            if node not in struck and node.away_until is None:
                self._beat_until_well(node, node.life)  # it was woken for nothing
        if not struck:
            return
        self.counts[failure.cause] += 1
        if symptom.sign is Sign.SILENCE:
            self._fall_silent(struck, failure.cause)
        else:
            for node in struck:
                self._break(node, failure.cause, symptom)

    def _seated(self, node: Node) -> bool:
        return self._spec is not None and node.name in self._spec.seated_nodes

    def _fall_silent(self, struck: Sequence[Node], cause: str) -> None:
        transient = TRANSIENTS_S.get(cause)
        away_s = transient if transient is not None else self._repair_h[cause] * HOUR_S
        seated = [node for node in struck if self._seated(node)]
        for node in struck:
            self._wake(node)
            node.away_until = self.now + away_s
            if transient is None:
                node.ill, node.ill_until = cause, self.now + away_s
                self._after(away_s, lambda n=node, c=cause: self._repaired(n, c))  # type: ignore[misc]
            else:
                self._after(away_s, lambda n=node, c=cause: self._back_from_nothing(n, c))  # type: ignore[misc]
        if cause == "agent_restart":
            for node in struck:
                event = ev.NodeDisconnected(node=node.name, incarnation=node.life, trace=self._trace())
                self._handle(event)
        elif transient is None and seated:
            self._interrupt(cause)
            self._after(self.model.peers_notice_s, self._peers_notice)

    def _back_from_nothing(self, node: Node, cause: str) -> None:
        """An agent's restart begins a new life; after a network's blip the old one goes on."""
        if node.ill or node.away_until is None:
            return
        node.away_until = None
        if cause == "agent_restart":
            self._register(node)
            self._join(node)
        else:
            self._handle(ev.NodeSeen(node=node.name, incarnation=node.life, trace=self._trace()))
            self._beat_until_well(node, node.life)

    def _peers_notice(self) -> None:
        """Collectives with a node that is gone fail: one rank says so."""
        spec = self._spec
        if spec is None or self.accounts.stepping:
            return
        witness = next((m for m in spec.roster if self._able(m.node)), None)
        if witness is not None:
            self._report(
                self.by_name[witness.node],
                CollectiveFailed(
                    job=JOB,
                    at=self.now,
                    generation=spec.number,
                    rank=witness.rank,
                    step=self._step_at,
                    detail="time-out",
                ),
            )

    def _break(self, node: Node, cause: str, symptom: Symptom) -> None:
        if symptom.sign is Sign.PROCESS:
            self._lose_rank(node, cause)
            return
        node.ill, node.ill_until = cause, self.now + self._repair_h[cause] * HOUR_S
        self._at(node.ill_until, lambda: self._repaired(node, cause))
        if symptom.sign is Sign.LIE:
            node.lies = True
            self._after(self._rng.uniform(0, self.model.digest_interval_s), lambda: self._digests_differ(node))
            return
        node.findings = (symptom.finding(cause, self.now),)
        self._lose_rank(node, cause)
        sensed_s = self.model.sensor_s * self._rng.random()
        self._after(sensed_s, lambda: self._sense(node, cause))

    def _sense(self, node: Node, cause: str) -> None:
        if node.ill == cause and node.findings:
            self._report(node, FindingRaised(finding=node.findings[0]))

    def _lose_rank(self, node: Node, cause: str) -> None:
        """A process on the node ends; its launcher has another."""
        if not self._seated(node):
            return
        self._interrupt(cause)
        self._after(self.model.seen_s, lambda: self._rank_lost(node))

    def _rank_lost(self, node: Node) -> None:
        spec = self._spec
        member = spec.member_at(node.name, 0) if spec is not None else None
        if spec is None or member is None:
            return
        self._report(
            node,
            RankLost(job=JOB, at=self.now, generation=spec.number, rank=member.rank, local_rank=0, detail="", signal=9),
        )

    def _digests_differ(self, liar: Node) -> None:
        """The digests of this step: all agree but one. Those before the lie agreed, and say what is clean."""
        spec = self._stepping
        if not liar.lies or spec is None or liar.name not in spec.seated_nodes or not self.accounts.stepping:
            if liar.lies and liar.ill:
                self._after(self.model.digest_interval_s, lambda: self._digests_differ(liar))
            return
        step = self._step_now()
        clean = max(self._step_at + 1, step - int(self.model.digest_interval_s / self.model.step_s))
        for at, wrong in ((clean, ""), (step + 1, liar.name)):
            for member in spec.roster:
                digest = "wrong" if member.node == wrong else f"d{at}"
                self._report(
                    self.by_name[member.node],
                    VersionSealed(
                        job=JOB,
                        at=self.now,
                        generation=spec.number,
                        rank=member.rank,
                        version=Version(spec.number, at),
                        bytes=0,
                        durable=True,
                        digests={"replicated": digest},
                    ),
                )
                if self._spec is not spec:
                    return

    # --- the job -----------------------------------------------------------------------------------------------------

    def _interrupt(self, cause: str) -> None:
        """The job stands still from now on."""
        if self.accounts.stepping:
            undone_s = (self.now - self._step_from) % self.model.step_s
            self._step_at = self._step_now()
            if cause == "silent_data_corruption":
                undone_s += self.model.digest_interval_s
            self.accounts.stop(self.now - START, cause, undone_s)
            self._stepping = None
            self._cause = cause

    def _opened(self, spec: GenerationSpec) -> None:
        """A generation was decided: at once, or at the end of a step to come."""
        before, self._spec = self._spec, spec
        newcomers = len(spec.seated_nodes - before.seated_nodes) if before is not None else 0
        self.least_spares = min(self.least_spares, self._idle(spec))
        self._resumes += 1
        attempt = self._resumes
        nodes = len(spec.seats)
        if spec.after_step is not None and self._stepping is not None:
            self._price = Regrouped(nodes, newcomers, at_boundary=True)
            left_s = max(0.0, (spec.after_step - self._step_now()) * self.model.step_s)
            cause = "growth" if spec.reason == "growth" else "leaving at a boundary"
            self._after(left_s, lambda: self._leave_at_boundary(attempt, cause))
            self._after(left_s + self.model.boundary_s(nodes, newcomers), lambda: self._resume(attempt))
            return
        self._price = Regrouped(nodes, newcomers, at_boundary=False)
        if spec.reason == "corruption":
            self._interrupt("silent_data_corruption")
        self._interrupt(str(spec.reason))
        self._after(self.model.regroup_s(nodes, newcomers), lambda: self._resume(attempt))

    def _idle(self, spec: GenerationSpec) -> int:
        """Healthy nodes beside the roster."""
        healthy = (NodeState.HEALTHY, NodeState.SUSPECT)
        return sum(1 for n in self.nodes if n.name not in spec.seated_nodes and self._fit(n, healthy))

    def _leave_at_boundary(self, attempt: int, cause: str) -> None:
        if attempt == self._resumes and self.accounts.stepping:
            self._step_at = self._step_now()
            self.accounts.stop(self.now - START, cause)
            self._stepping = None

    def _resume(self, attempt: int) -> None:
        """All members would step now; one that is broken ends it again, one that is gone is missed."""
        spec = self._spec
        if attempt != self._resumes or spec is None or self.state.jobs[JOB].status.state is not JobState.RUNNING:
            return
        broken = next((m.node for m in spec.roster if self.by_name[m.node].findings), None)
        if any(self.by_name[m.node].away_until is not None for m in spec.roster):
            self._peers_notice()
            self._after(self.model.peers_notice_s, lambda: self._resume(attempt))
        elif broken is not None:
            self._rank_lost(self.by_name[broken])
        else:
            self._step(spec)

    def _step(self, spec: GenerationSpec) -> None:
        self._stepping, self._step_from = spec, self.now
        if self._price is not None:
            self.regroups.append(self._price)
        self.accounts.step(self.now - START, len(spec.seats), self._cause)
        self._step_at += 1
        for member in spec.roster:
            words = Resumed(
                job=JOB,
                at=self.now,
                generation=spec.number,
                rank=member.rank,
                step=self._step_at,
                restored=None,
                phases_s={},
            )
            self._report(self.by_name[member.node], words)
            if self._spec is not spec:
                return
        self._beat(self.by_name[spec.seats[0]])

    def _evicted(self, name: str) -> None:
        if not self.by_name[name].ill:
            self.false_evictions.append(name)


DECIDED = (
    "generation",
    "node.lost",
    "fleet.breaker_tripped",
    "job.paused",
    "verdict.evict",
    "verdict.readmit",
    "verdict.defer_eviction",
)
