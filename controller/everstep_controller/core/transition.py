"""One event's work in progress: collects effects, and which records changed, until the event is done."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from everstep.ids import JobId, NodeId, Rank
from everstep.vocabulary import Action, Decision, Finding, Verdict
from everstep.wire.v1.directives import AnyDirective
from everstep_controller.core import records
from everstep_controller.core.effects import (
    Audit,
    AuditEntry,
    DropJob,
    DropNode,
    Effect,
    PutFleet,
    PutJob,
    PutNode,
    PutVerdict,
    Remedy,
    RequestRemedy,
    Send,
)
from everstep_controller.core.jobs.progress import Laggards, Stride, laggards_of, stride_of
from everstep_controller.core.state import FleetState, Ignored


class PulseRead(msgspec.Struct, frozen=True, tag=True):
    """``state.Pulse`` of node ``of`` as a rule saw it. ``since``: when its silence began, by what we could hear."""

    of: NodeId
    heard_at: float
    beats: int
    longest_s: float
    since: float


class StepsRead(msgspec.Struct, frozen=True, tag=True):
    """Each rank's last finished step in job ``of``, as a rule saw them."""

    of: JobId
    steps: dict[Rank, int]


class EnteredRead(msgspec.Struct, frozen=True, tag=True):
    """Ranks that were seen in the current generation of job ``of``, as a rule saw them."""

    of: JobId
    ranks: frozenset[Rank]


class BeyondRead(msgspec.Struct, frozen=True, tag=True):
    """Ranks of job ``of`` that had begun a step after a given one, with the last step each had begun."""

    of: JobId
    begun: dict[Rank, int]


class Looked(msgspec.Struct, frozen=True, tag=True):
    """A Tick looked at ``of``, and more than a node heard in time was found there."""

    of: str
    kind: str


class OwnNews(msgspec.Struct, frozen=True):
    """A finding of the controller's own was raised on ``node`` (``before``: the one of its key that stood; ``why``:
    what a second pass has shown), or, without ``finding``, the one ``before`` has cleared, as ``why`` says."""

    node: NodeId
    before: Finding | None
    finding: Finding | None
    why: str = ""


R = TypeVar("R", PulseRead, StepsRead, EnteredRead, BeyondRead, Stride, Laggards)
Read = PulseRead | StepsRead | EnteredRead | BeyondRead | Stride | Laggards | Looked
"""What a rule read of that which heartbeats change. Beats are too many to be written down; these are few."""


class Turn:
    """What the rules write to while they handle one event.

    ``reads`` lists, in order, what was read of that which heartbeats change: with them the event can be handled again
    elsewhere, without the beats before it, and leads to the same effects. ``quiet``: a Tick that only found nodes
    heard in time; history can do without it. ``looks``: where the Tick of ``recorded`` looked; silence deadlines, which
    beats move, are not to be looked at otherwise then. ``freed``: scopes whose held evictions are to be looked at again
    (``eviction``). ``departed``: nodes lost in this turn, and why, by the jobs that they had a seat in. ``own``: what
    the controller found itself and is not judged yet. ``returning``: nodes on probation against which something
    stands, to be judged as well. ``proving``: nodes on probation that were heard, to be looked at after that.
    ``released``: nodes whose held eviction is over in this turn. ``regrouped``: jobs that a rule regroups once for all
    that it decides in this turn, so that nobody else need.

    Args:
        trace: of the stimulus; rules that carry out something older pass that one's trace instead.
        entropy: hex digits for a new job's secret.
        recorded: ``reads`` of the time when the event was handled first; None for the first time. A node of which
            nothing was read then counts as heard just now: nothing had followed from its silence.
    """

    def __init__(
        self, state: FleetState, now: float, trace: str, entropy: str = "", recorded: Sequence[Read] | None = None
    ) -> None:
        self.reads: list[Read] = []
        self.looks = None if recorded is None else [read for read in recorded if isinstance(read, Looked)]
        self._recorded = None if recorded is None else _by_subject(recorded)
        self.quiet = False
        self.state = state
        self.policy = state.policy
        self.now = now
        self.trace = trace
        self.entropy = entropy
        self.freed: dict[str, None] = {}
        self.returning: dict[NodeId, None] = {}
        self.proving: dict[NodeId, None] = {}
        self.released: dict[NodeId, None] = {}
        self.departed: dict[JobId, dict[NodeId, str]] = {}
        self.own: list[OwnNews] = []
        self.regrouped: set[JobId] = set()
        self._effects: list[Effect] = []
        self._remedies: list[Remedy] = []
        self._verdicts: dict[NodeId, str] = {}
        self._fleet = False
        self._nodes: dict[str, None] = {}
        self._jobs: dict[str, None] = {}

    def pulse(self, node: str) -> PulseRead:
        """When the node was last heard, its clean beats, its longest pause of lately."""
        pulse = self.state.live_nodes[node].pulse
        heard_at = pulse.heard_at if self._recorded is None else self.now
        since = max(heard_at, self.state.hearing.since)
        return self._read(PulseRead(node, heard_at, pulse.beats, pulse.longest_s, since))

    def stride(self, job: str) -> Stride:
        """How fast the job steps."""
        return self._read(stride_of(job, self.state.live_jobs[job].pace))

    def laggards(self, job: str, factor: float) -> Laggards:
        """Ranks whose own time for a step is more than ``factor`` times the job's median."""
        return self._read(laggards_of(job, self.state.live_jobs[job].pace, factor))

    def steps(self, job: str) -> dict[Rank, int]:
        """Each rank's last finished step in the running generation, where it is known."""
        pace = self.state.live_jobs[job].pace
        return self._read(StepsRead(job, {rank: progress.step for rank, progress in pace.progress.items()})).steps

    def entered(self, job: str) -> frozenset[Rank]:
        """Ranks that were seen in the current generation."""
        return self._read(EnteredRead(job, frozenset(self.state.live_jobs[job].pace.entered))).ranks

    def beyond(self, job: str, step: int) -> dict[Rank, int]:
        """Ranks that have begun a step after ``step`` in the running generation, with the last step each has begun."""
        progress = self.state.live_jobs[job].pace.progress.values()
        further = {report.rank: report.begun for report in progress if report.begun > step}
        return self._read(BeyondRead(job, further)).begun

    def _read(self, seen: R) -> R:
        if self._recorded and (then := self._recorded.get((type(seen), seen.of))):
            seen = then.popleft()
        self.reads.append(seen)
        return seen

    def fleet_changed(self) -> None:
        self._fleet = True

    def node_changed(self, node: str) -> None:
        self._nodes[node] = None

    def job_changed(self, job: str) -> None:
        self._jobs[job] = None

    def node_forgotten(self, node: str) -> None:
        """The state knows the node no more."""
        self._nodes.pop(node, None)
        self.emit(DropNode(node))

    def job_forgotten(self, job: str) -> None:
        """The state knows the job no more."""
        self._jobs.pop(job, None)
        self.emit(DropJob(job))

    def changed(self) -> tuple[list[NodeId], list[JobId]]:
        """Nodes and jobs whose records changed so far."""
        return list(self._nodes), list(self._jobs)

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
        if decision in MOVING:
            record.stands_by = self._verdicts[node] = verdict.id
        records.enter(record, self.now, "verdict", f"{decision}: {sentence}", {"verdict": verdict.id})
        self.audit(f"verdict.{decision}", sentence, node=node, trace=verdict.trace, data={"verdict": verdict.id})

    def remedy(self, remedy: Remedy) -> None:
        """Asks for an action on a node: last of all effects, so that the verdict it follows from is known by then."""
        self._remedies.append(remedy)

    def ignore(self, why: Ignored) -> None:
        """Count an event that a rule drops; the log is spared."""
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
        return puts + self._effects + [RequestRemedy(self._with_verdict(remedy)) for remedy in self._remedies]

    def _with_verdict(self, remedy: Remedy) -> Remedy:
        return msgspec.structs.replace(remedy, verdict=self._verdicts.get(remedy.node, remedy.verdict))


MOVING = (Decision.EVICT, Decision.QUARANTINE, Decision.READMIT, Decision.REPAIR)
"""Decisions by which a node is where it is; what is asked of the outside follows from one of them."""


def _by_subject(reads: Iterable[Read]) -> dict[tuple[type, str], deque[Any]]:
    found: dict[tuple[type, str], deque[Any]] = defaultdict(deque)
    for read in reads:
        found[type(read), read.of].append(read)
    return found


def push_deadline(state: FleetState, due: float, kind: str, subject: str) -> None:
    """Queues a hint to look at ``subject``: ``silence`` or ``node`` of a node, ``job``, ``probe``; or at what it says
    itself: ``correlation``, ``reunion``, ``held``, ``retention``,
    ``maintenance``."""
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


# ---- undecided
# Findings that stand and cannot be judged yet: each is looked at again when what stood in the way may be over.


def look_later(turn: Turn, node: str, key: str, why: str, due: float) -> None:
    """One look a second at most, however often findings are raised meanwhile."""
    turn.state.nodes[node].undecided[key] = why
    turn.node_changed(node)
    turn.wake(float(math.ceil(due)), "care", node)
