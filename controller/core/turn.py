"""One event's work in progress: collects effects, and which records changed, until the event is done."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TypeVar

import msgspec

from controller.core.effects import Audit, AuditEntry, Effect, PutFleet, PutJob, PutNode, PutVerdict, Send
from controller.core.progress import Stride, stride_of
from controller.core.state import FleetState
from everstep.ids import Rank
from everstep.vocabulary import Action, Decision, Finding, Verdict
from everstep.wire.v1.directives import AnyDirective


class PulseRead(msgspec.Struct, frozen=True, tag=True):
    """``state.Pulse`` as a rule saw it."""

    heard_at: float
    beats: int


class StepsRead(msgspec.Struct, frozen=True, tag=True):
    """Each rank's last finished step, as a rule saw them."""

    steps: dict[Rank, int]


class EnteredRead(msgspec.Struct, frozen=True, tag=True):
    """Ranks that were seen in the current generation, as a rule saw them."""

    ranks: frozenset[Rank]


R = TypeVar("R", "PulseRead", "StepsRead", "EnteredRead", Stride)
Read = PulseRead | StepsRead | EnteredRead | Stride
"""What a rule read of that which heartbeats change. Beats are too many to be written down; these are few."""


class Turn:
    """What the rules write to while they handle one event.

    ``reads`` lists, in order, what was read of that which heartbeats change: with them the event can be handled again
    elsewhere, without the beats before it, and leads to the same effects.

    Args:
        trace: of the stimulus; rules that carry out something older pass that one's trace instead.
        entropy: hex digits for a new job's secret.
        recorded: ``reads`` of the time when the event was handled first; None for the first time.
    """

    def __init__(
        self, state: FleetState, now: float, trace: str, entropy: str = "", recorded: Iterable[Read] | None = None
    ) -> None:
        self.reads: list[Read] = []
        self._recorded = None if recorded is None else iter(recorded)
        self.state = state
        self.policy = state.policy
        self.now = now
        self.trace = trace
        self.entropy = entropy
        self._effects: list[Effect] = []
        self._fleet = False
        self._nodes: dict[str, None] = {}
        self._jobs: dict[str, None] = {}

    def pulse(self, node: str) -> PulseRead:
        """When the node was last heard, and its clean beats."""
        pulse = self.state.live_nodes[node].pulse
        return self._read(PulseRead(pulse.heard_at, pulse.beats))

    def stride(self, job: str) -> Stride:
        """How fast the job steps."""
        return self._read(stride_of(self.state.live_jobs[job].pace))

    def steps(self, job: str) -> dict[Rank, int]:
        """Each rank's last finished step in the running generation, where it is known."""
        pace = self.state.live_jobs[job].pace
        return self._read(StepsRead({rank: progress.step for rank, progress in pace.progress.items()})).steps

    def entered(self, job: str) -> frozenset[Rank]:
        """Ranks that were seen in the current generation."""
        return self._read(EnteredRead(frozenset(self.state.live_jobs[job].pace.entered))).ranks

    def _read(self, seen: R) -> R:
        if self._recorded is not None:
            then = next(self._recorded, None)
            if type(then) is type(seen):
                seen = then
        self.reads.append(seen)
        return seen

    def fleet_changed(self) -> None:
        self._fleet = True

    def node_changed(self, node: str) -> None:
        self._nodes[node] = None

    def job_changed(self, job: str) -> None:
        self._jobs[job] = None

    def emit(self, effect: Effect) -> None:
        self._effects.append(effect)

    def send(self, node: str, body: AnyDirective) -> None:
        """A directive for ``node``, unless nobody ever registered under that name."""
        if node in self.state.nodes:
            self.emit(Send(node, body))

    def audit(
        self,
        kind: str,
        sentence: str,
        *,
        node: str | None = None,
        job: str | None = None,
        generation: int | None = None,
        trace: str | None = None,
        data: dict[str, str] | None = None,
    ) -> None:
        self.emit(
            Audit(
                AuditEntry(
                    kind=kind,
                    sentence=sentence,
                    at=self.now,
                    trace=self.trace if trace is None else trace,
                    node=node,
                    job=job,
                    generation=generation,
                    data=data or {},
                )
            )
        )

    def verdict(
        self,
        node: str,
        decision: Decision,
        sentence: str,
        *,
        action: Action = Action.NONE,
        evidence: tuple[Finding, ...] = (),
        trace: str | None = None,
    ) -> None:
        """A judgement on ``node``, with a line in the log."""
        record = self.state.nodes[node]
        record.verdicts += 1
        self.node_changed(node)
        verdict = Verdict(
            id=f"{node}-{record.verdicts}",
            node=node,
            decision=decision,
            sentence=sentence,
            action=action,
            evidence=evidence,
            at=self.now,
            trace=self.trace if trace is None else trace,
        )
        self.emit(PutVerdict(verdict))
        self.audit(f"verdict.{decision}", sentence, node=node, trace=verdict.trace, data={"verdict": verdict.id})

    def ignore(self, why: str) -> None:
        """Counts what a rule drops; the log is spared."""
        self.state.ignored[why] = self.state.ignored.get(why, 0) + 1

    def wake(self, due: float, kind: str, subject: str) -> None:
        """Asks for a look at ``subject`` at ``due``."""
        push_deadline(self.state, due, kind, subject)

    def finish(self) -> list[Effect]:
        """All effects: first the records that changed, then what was emitted, in order."""
        state = self.state
        puts: list[Effect] = [PutFleet(state.fleet)] if self._fleet else []
        puts += [PutNode(node, state.nodes[node]) for node in self._nodes]
        puts += [PutJob(job, state.jobs[job]) for job in self._jobs]
        return puts + self._effects


def push_deadline(state: FleetState, due: float, kind: str, subject: str) -> None:
    """Queues a hint to look at ``subject``: ``silence`` or ``node`` of a node, ``job``, ``probe``."""
    if (due, kind, subject) in state.queued:
        return
    state.queued.add((due, kind, subject))
    state.order += 1
    heapq.heappush(state.deadlines, (due, state.order, kind, subject))


def pop_due(state: FleetState, now: float) -> tuple[str, str] | None:
    """The next (kind, subject) whose time has come."""
    if not state.deadlines or state.deadlines[0][0] > now:
        return None
    due, _, kind, subject = heapq.heappop(state.deadlines)
    state.queued.discard((due, kind, subject))
    return kind, subject
