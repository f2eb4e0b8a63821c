"""Judge what ranks state with the controller's own core: a job of one rank on each of three nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from bench.calm.audited_training import RANKS, Record, node_of
from everstep.vocabulary import Decision, JobState
from everstep.wire.v1.agent import Register
from everstep.wire.v1.training import AuditStatement, JobSpec, LauncherJoined, Resumed
from everstep_controller.core.effects import Effect, PutVerdict
from everstep_controller.core.engine import apply_heartbeat, handle, next_deadline
from everstep_controller.core.events import AgentRegistered, ControllerStarted, Event, ReportArrived, Tick
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.startup import restore_state
from everstep_controller.policy.rulebook import with_rules

JOB = "honest"
START = 1_700_000_000.0
STEP_S, SETTLE_S = 0.5, 30.0
EVICTING = (Decision.EVICT, Decision.QUARANTINE, Decision.REPAIR, Decision.DEFER_EVICTION)


@dataclass(frozen=True)
class Sentence:
    """The harm that the controller would do to the nodes and the job of a run."""

    strikes: int
    evictions: int
    failed: bool
    regroups: int
    words: str


def judge(record: Record) -> Sentence:
    """Return what the controller does about a run."""
    court = _Court(record.kinds)
    for statements in record.statements.values():
        court.hear(statements)
    return court.sentence()


class _Court:
    """The controller's core with a clock of its own."""

    def __init__(self, kinds: Sequence[str]) -> None:
        self._kinds = kinds
        policy = CorePolicy().with_values(liveness={"lost_after_s": 1e6})
        self._state, self._now, self._number = restore_state(with_rules(policy)), START, 0
        self._nodes = [node_of(rank) for rank in range(RANKS)]
        self._verdicts: list[PutVerdict] = []
        self._resumed = 0
        self._strikes: set[tuple[str, float, str]] = set()
        self._feed(ControllerStarted())
        for node in self._nodes:
            register = Register(
                protocols=(1,), node=node, incarnation=1, agent_version="1", vault=f"{node}:7000", boot_id="boot"
            )
            self._feed(AgentRegistered(register=register, trace="t"))
            apply_heartbeat(self._state, node, 1, self._now, ())
        spec = JobSpec(job=JOB, min_nodes=1, max_nodes=RANKS)
        for node in self._nodes:
            self._report(node, LauncherJoined(job=JOB, at=self._now, spec=spec, launcher=1, store=f"{node}:8000"))
        self._pass(SETTLE_S)

    def hear(self, statements: list[tuple[int, Any]]) -> None:
        """Take the statements of one step, as the ranks of the running generation make them."""
        spec = self._state.jobs[JOB].running_generation
        for rank, mismatch in statements:
            if spec is None or node_of(rank) not in {member.node for member in spec.roster}:
                continue  # the node is out
            fields = msgspec.structs.asdict(mismatch)
            fields |= {"kind": self._kinds[rank] if self._kinds else ""}
            words = AuditStatement(job=JOB, at=self._now, generation=spec.number, rank=rank, **fields)
            self._report(node_of(rank), words)
        self._pass(SETTLE_S)

    def sentence(self) -> Sentence:
        """Return the harm so far."""
        job = self._state.jobs[JOB]
        evicted = [verdict.verdict for verdict in self._verdicts if verdict.verdict.decision in EVICTING]
        words = [job.status.sentence] if job.status.state is JobState.FAILED else []
        words += [str(verdict.sentence) for verdict in evicted]
        words += [words_of_strike for _, _, words_of_strike in sorted(self._strikes)]
        return Sentence(
            strikes=len(self._strikes),
            evictions=len({verdict.node for verdict in evicted}),
            failed=job.status.state is JobState.FAILED,
            regroups=max(0, job.progress.last_number - 1),
            words=words[0] if words else "",
        )

    def _report(self, node: str, body: Any) -> None:
        self._number += 1
        self._feed(
            ReportArrived(node=node, incarnation=1, number=self._number, body=body, entropy="ab" * 32, trace="t")
        )

    def _feed(self, event: Event) -> None:
        effects: list[Effect] = handle(self._state, event, self._now)
        self._verdicts += [effect for effect in effects if isinstance(effect, PutVerdict)]
        for name, node in self._state.nodes.items():
            self._strikes |= {(name, strike.at, strike.sentence) for strike in node.audits.strikes}

    def _pass(self, seconds: float) -> None:
        """Let time pass: nodes send heartbeats, and ranks of a new generation resume."""
        end = self._now + seconds
        while self._now < end:
            for node in self._nodes:
                apply_heartbeat(self._state, node, 1, self._now, ())
            due = next_deadline(self._state)
            self._now = min(end, self._now + STEP_S, max(self._now + 1e-3, end if due is None else due))
            self._feed(Tick(trace="t"))
            for node, resumed in self._to_resume():
                self._report(node, resumed)

    def _to_resume(self) -> Iterator[tuple[str, Resumed]]:
        spec = self._state.jobs[JOB].running_generation if JOB in self._state.jobs else None
        if spec is None or spec.number <= self._resumed:
            return
        self._resumed = spec.number
        for member in spec.roster:
            yield (
                member.node,
                Resumed(
                    job=JOB, at=self._now, generation=spec.number, rank=member.rank, step=1, restored=None, phases_s={}
                ),
            )
