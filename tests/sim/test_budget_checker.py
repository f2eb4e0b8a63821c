"""Which evictions the checker counts against a job's budget, and what it takes for one that nobody asked it for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from everstep_controller.core.effects import Audit, AuditEntry, Effect, PutGeneration, PutJob, PutNode, PutVerdict
from everstep_controller.core.events import Tick
from everstep_controller.core.policy import CorePolicy
from everstep_controller.core.records import JobRecord, JobStatus, NodeIdentity, NodeRecord, RunProgress
from everstep_controller.store.rows import AuditRow, Batch, VerdictRow

from everstep.vocabulary import Action, Decision, GenerationReason, JobState, Verdict
from everstep.wire.v1.agent import Domain
from everstep.wire.v1.training import GenerationSpec, JobSpec, RestoreRule
from tests.sim import facts
from tests.sim.checkers.budget import Budget
from tests.sim.facts import Violation

POLICY = msgspec.structs.replace(
    CorePolicy.lab_preset(),
    eviction_count=9,
    eviction_share=1.0,
    eviction_rack_count=9,
    eviction_rack_share=1.0,
    eviction_job_count=1,
    eviction_window_s=20.0,
)


class Days:
    """What a controller decides about two nodes of one job, and what of it is written."""

    def __init__(self, policy: CorePolicy = POLICY) -> None:
        self.checker = Budget()
        self.checker.world = SimpleNamespace(plan=SimpleNamespace(policy=policy))  # type: ignore[assignment]
        self._watch = self.checker.watches()
        self.begins("c1", 1)
        nodes = [
            NodeRecord(node=name, identity=NodeIdentity(incarnation=1, vault=f"{name}:7000", domain=Domain(rack=rack)))
            for name, rack in (("n1", ""), ("n2", "r1"), ("n3", "r1"), ("n4", ""))
        ]
        self.decides(*(PutNode(node.node, node) for node in nodes), self.job(JobState.RUNNING, "n1", "n2"))
        documents = {node.node: msgspec.json.encode(node).decode() for node in nodes}
        self._watch[facts.Durable](facts.Durable(1, Batch(nodes=documents)))

    def begins(self, controller: str, epoch: int) -> None:
        self._watch[facts.TookOver](facts.TookOver(controller, epoch, {}))

    def decides(self, *effects: Effect) -> None:
        self._watch[facts.Decided](facts.Decided("c1", 1, Tick(), list(effects), 0.0))

    def written(self, node: str, at: float) -> None:
        row = VerdictRow(id=f"{node}-1", node=node, decision=Decision.EVICT, at=at, trace="", doc="")
        self._watch[facts.Durable](facts.Durable(1, Batch(verdicts=[row])))

    @staticmethod
    def spec(*seats: str, number: int = 1) -> GenerationSpec:
        more: dict[str, Any] = {"trace": "", "store": "n1:8000", "store_node": "n1", "secret": "s" * 64, "holders": ()}
        return GenerationSpec(
            job="a",
            number=number,
            reason=GenerationReason.FORMED,
            sentence="",
            seats=seats,
            restore=RestoreRule(),
            replica_nodes={},
            spec=JobSpec(job="a", min_nodes=2, max_nodes=2),
            issued_at=0.0,
            **more,
        )

    def logs(self, *kinds: str, at: float) -> None:
        rows = [AuditRow(id=number, at=at, kind=kind, sentence="") for number, kind in enumerate(kinds)]
        self._watch[facts.Durable](facts.Durable(1, Batch(audit=rows)))

    def job(self, state: JobState, *seats: str) -> PutJob:
        spec = self.spec(*seats)
        record = JobRecord(
            job="a",
            spec=spec.spec,
            secret="s" * 64,
            status=JobStatus(state=state),
            generation=spec,
            progress=RunProgress(created_at=0.0),
        )
        return PutJob("a", record)

    @staticmethod
    def evicts(node: str, decision: Decision = Decision.EVICT) -> PutVerdict:
        words: dict[str, Any] = {"sentence": "", "action": Action.DRAIN, "evidence": (), "trace": ""}
        return PutVerdict(Verdict(id=f"{node}-1", node=node, decision=decision, at=0.0, **words))

    @staticmethod
    def pauses() -> Audit:
        return Audit(AuditEntry(kind="job.paused", sentence="n2 is silent", at=0.0, trace="", job="a"))


@pytest.fixture
def days() -> Days:
    return Days()


def test_an_eviction_of_a_seat_counts_against_its_job(days: Days) -> None:
    days.decides(days.evicts("n2"), days.job(JobState.RUNNING, "n1", "n3"))
    days.written("n2", 10.0)
    days.decides(days.evicts("n1"))
    with pytest.raises(Violation, match="2 evictions of the job a within 20 s, 1 allowed"):
        days.written("n1", 15.0)


def test_successor_counts_the_reachable_nodes_of_a_rack(days: Days) -> None:
    days.begins("c2", 2)
    days.decides(days.evicts("n2"), days.evicts("n3"))
    days.written("n2", 10.0)
    days.written("n3", 11.0)


def test_successor_counts_evictions_against_their_rack() -> None:
    days = Days(msgspec.structs.replace(POLICY, eviction_rack_count=1))
    days.begins("c2", 2)
    days.decides(days.evicts("n2"), days.evicts("n3"))
    days.written("n2", 10.0)
    with pytest.raises(Violation, match="2 evictions of the rack r1 within 20 s, 1 allowed"):
        days.written("n3", 11.0)


def test_nodes_without_a_rack_share_no_budget() -> None:
    days = Days(msgspec.structs.replace(POLICY, eviction_rack_count=1))
    days.decides(days.evicts("n1"), days.evicts("n4"))
    days.written("n1", 10.0)
    days.written("n4", 11.0)


def test_eviction_after_pause_without_the_node_is_not_counted(days: Days) -> None:
    days.decides(days.job(JobState.PAUSED, "n1", "n2"), days.pauses(), days.evicts("n2"))
    days.written("n2", 10.0)
    days.decides(days.job(JobState.RUNNING, "n1", "n3"))
    days.decides(days.evicts("n1"))
    days.written("n1", 15.0)


def test_eviction_after_regroup_without_node_is_not_counted(days: Days) -> None:
    onward = PutGeneration(days.spec("n1", "n3", number=2), 0.0)
    days.decides(days.job(JobState.RUNNING, "n1", "n3"), onward, days.evicts("n2"))
    days.written("n2", 10.0)
    days.decides(days.evicts("n1"))
    days.written("n1", 15.0)


def test_quarantine_of_a_seated_node_counts_as_eviction(days: Days) -> None:
    with pytest.raises(Violation, match="n2 is quarantined out of its seat in job a, and no budget was asked"):
        days.decides(days.evicts("n2", Decision.QUARANTINE), days.job(JobState.RUNNING, "n1", "n3"))


def test_quarantine_of_a_seatless_node_is_no_eviction(days: Days) -> None:
    days.decides(days.evicts("n3", Decision.QUARANTINE))
    onward = PutGeneration(days.spec("n1", "n3", number=2), 0.0)
    days.decides(days.job(JobState.RUNNING, "n1", "n3"), onward, days.evicts("n2", Decision.QUARANTINE))
    days.decides(days.job(JobState.PAUSED, "n1", "n3"), days.pauses(), days.evicts("n1", Decision.QUARANTINE))


def test_latched_breaker_forbids_evictions_until_over(days: Days) -> None:
    days.decides(days.evicts("n2"), days.evicts("n3"))
    days.logs("fleet.breaker_tripped", at=5.0)
    with pytest.raises(Violation, match="n3 is evicted while the breaker is latched"):
        days.written("n3", 6.0)
    days.logs("fleet.breaker_reset", at=7.0)
    days.written("n2", 8.0)


def test_breaker_ending_and_relatching_at_once_is_latched(days: Days) -> None:
    days.decides(days.evicts("n2"))
    days.logs("fleet.breaker_tripped", at=5.0)
    days.logs("fleet.breaker_reset", "fleet.breaker_tripped", at=6.0)
    with pytest.raises(Violation, match="n2 is evicted while the breaker is latched"):
        days.written("n2", 7.0)


def test_eviction_after_job_failure_is_not_counted(days: Days) -> None:
    days.decides(days.evicts("n2"), days.job(JobState.RUNNING, "n1", "n3"))
    days.written("n2", 10.0)
    over = Audit(AuditEntry(kind="job.failed", sentence="wrong for the 3. time", at=0.0, trace="", job="a"))
    days.decides(days.job(JobState.FAILED, "n1", "n3"), over, days.evicts("n1"))
    days.written("n1", 15.0)
