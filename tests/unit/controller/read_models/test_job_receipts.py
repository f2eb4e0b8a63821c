"""The cost of failures by one formula, and the receipt that the controller makes from its records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.ids import Version
from everstep.receipts.text import describe_rest, summary_lines
from everstep.vocabulary import Action, Decision, GenerationReason, JobState, Verdict
from everstep.wire.v1.operator import GenerationRecovery, JobDetail, JobSummary, ProgressSample
from everstep.wire.v1.receipts import JobReceipt
from everstep.wire.v1.training import FindingRaised, JobSpec, RankProgress
from everstep_controller.read_models.receipts import (
    RestartModel,
    make_receipt,
    mistaken_traces,
    priced_recoveries,
    repeated_steps,
)
from tests.support.fleet.controllers import VIEWER, InProcess, get, joined
from tests.support.fleet.in_process_fleet import FELL_OFF, fleet, resume, running_job


def recovery(generation: int, decided_at: float, duration_s: float | None, **more: Any) -> GenerationRecovery:
    fields: dict[str, Any] = {"reason": GenerationReason.RANK_LOST, "sentence": "killed", "trace": "t", "world_size": 4}
    return GenerationRecovery(generation=generation, decided_at=decided_at, duration_s=duration_s, **fields | more)


FORMED = recovery(1, 1000.0, 10.0, reason=GenerationReason.FORMED)


def detail(*recoveries: GenerationRecovery, state: JobState = JobState.FINISHED, **more: Any) -> JobDetail:
    summary = JobSummary(job="j", state=state, generation=3, world_size=4, nodes=2, step=60, step_s=0.5, reason="over")
    fields = {"created_at": 990.0, "since": 5010.0} | more
    return JobDetail(summary=summary, spec=JobSpec(job="j"), recoveries=(FORMED, *recoveries), **fields)


def made(
    job_detail: JobDetail,
    *samples: tuple[float, int],
    until: float = 9999.0,
    every_s: float = 1800.0,
    restart_s: float = 60.0,
) -> JobReceipt:
    progress = [ProgressSample(at=at, generation=1, step=step, world_size=4, loss=1.5) for at, step in samples]
    return make_receipt(job_detail, progress, (), (), until=until, gpus=4, model=RestartModel(every_s, restart_s))


def test_costs_add_up_over_recoveries() -> None:
    """Of two recoveries 100 s and 2000 s after the first step, the second one repeats 200 s after a checkpoint."""
    receipt = made(detail(recovery(2, 1110.0, 2.0), recovery(3, 3010.0, 3.0, world_size=2)))
    costs = receipt.costs
    assert (costs.lost_s, costs.lost_rank_s) == (5.0, 4 * 2.0 + 2 * 3.0)
    assert (costs.restart_lost_s, costs.restart_lost_rank_s) == (160.0 + 260.0, 4 * 160.0 + 2 * 260.0)
    assert costs.saved_rank_s == 4 * 160.0 + 2 * 260.0 - 14.0
    assert costs.effective_share == 1 - 5.0 / 4000.0
    assert [(size.generation, size.ranks) for size in receipt.sizes] == [(1, 4), (3, 2)]


def test_other_restarts_can_be_compared() -> None:
    (entry,) = made(detail(recovery(2, 1710.0, 2.0)), every_s=300.0, restart_s=5.0).recoveries
    assert entry.restart_lost_s == 5.0 + 100.0


def test_repeated_steps_cost_their_time() -> None:
    shown = detail(recovery(2, 1110.0, 2.0, restored=Version(1, 40)))
    (entry,) = made(shown, (1050.0, 20), (1109.0, 46), (1120.0, 47)).recoveries
    assert (entry.repeated_steps, entry.lost_s) == (6, 2.0 + 6 * 0.5)


def test_steps_of_an_earlier_recovery_count_once() -> None:
    shown = detail(recovery(2, 1110.0, 2.0, restored=Version(1, 40)), recovery(3, 1130.0, 2.0, restored=Version(2, 44)))
    _, second = made(shown, (1050.0, 20), (1109.0, 46), (1129.0, 45), (1140.0, 46)).recoveries
    assert second.repeated_steps == 1


def test_repeated_steps_are_unknown_without_earlier_samples() -> None:
    late = [ProgressSample(at=2000.0, generation=2, step=50, world_size=4)]
    assert repeated_steps(recovery(2, 1110.0, 2.0, restored=Version(1, 40)), late) is None
    assert repeated_steps(recovery(2, 1110.0, 2.0), late) is None
    assert made(detail(recovery(2, 1110.0, 2.0))).recoveries[0].lost_s == 2.0


def test_repeated_steps_come_from_surviving_ranks() -> None:
    shown = detail(recovery(2, 1110.0, 2.0, restored=Version(1, 40), finished_step=49))
    (entry,) = made(shown, (1050.0, 20), (1109.0, 46)).recoveries
    assert entry.repeated_steps == 9


@pytest.mark.parametrize("reason", ["growth", "operator", "placement", "priority", "straggler"])
def test_planned_regroups_are_not_priced_as_failures(reason: str) -> None:
    receipt = made(detail(recovery(2, 1110.0, 2.0), recovery(3, 1210.0, 3.0, reason=GenerationReason(reason))))
    assert (receipt.recovery_count, receipt.other_regroups) == (1, 1)
    assert [(recovery.is_failure, recovery.restart_lost_s) for recovery in receipt.recoveries] == [
        (True, 160.0),
        (False, 0.0),
    ]
    assert (receipt.costs.lost_s, receipt.costs.restart_lost_s) == (5.0, 160.0)


def test_rolled_back_eviction_is_not_priced() -> None:
    def verdict(decision: Decision, at: float, sentence: str, trace: str) -> Verdict:
        return Verdict(
            id=trace,
            node="n2",
            decision=decision,
            sentence=sentence,
            action=Action.NONE,
            evidence=(),
            at=at,
            trace=trace,
        )

    evicted = [verdict(Decision.EVICT, at, "n2: XID 79; evicted", f"t{at:.0f}") for at in (1100.0, 1200.0)]
    back = verdict(Decision.CORRELATED, 1230.0, "the eviction of n2 is rolled back: 10 of 40 nodes show it", "t9")
    spared = verdict(Decision.CORRELATED, 1900.0, "n2: XID 79; not evicted: 10 nodes", "t10")
    mistaken = mistaken_traces(evicted, [back, spared])
    assert mistaken == {"t1200"}
    regroups = [
        recovery(2, 1100.0, 2.0, reason=GenerationReason.NODE_EVICTED, trace="t1100"),
        recovery(3, 1200.0, 2.0, reason=GenerationReason.NODE_EVICTED, trace="t1200"),
        recovery(4, 1201.0, 2.0, reason=GenerationReason.RANK_LOST, trace="t1200"),
    ]
    model = RestartModel()
    priced = priced_recoveries(
        regroups, [], began_at=1000.0, ended_at=2000.0, step_s=0.5, model=model, mistaken=mistaken
    )
    assert [recovery.is_failure for recovery in priced] == [True, False, True]


def test_training_up_to_a_boundary_is_not_lost() -> None:
    evicted = recovery(
        2,
        1110.0,
        0.5,
        reason=GenerationReason.NODE_EVICTED,
        phases_s={"rendezvous": 0.1, "restore": 0.05},
        after_step=46,
    )
    (entry,) = made(detail(evicted)).recoveries
    assert entry.duration_s == 0.5
    assert entry.lost_s == pytest.approx(0.15)
    assert describe_rest(entry) == "all ranks train on until step 46"


def test_stopped_job_is_stopped_and_not_failed() -> None:
    shown = detail(state=JobState.FAILED)
    shown = msgspec.structs.replace(shown, summary=msgspec.structs.replace(shown.summary, is_stopped=True))
    receipt = made(shown)
    assert (receipt.result, receipt.outcome) == ("failed", "stopped")
    assert summary_lines(receipt)[0].startswith("job j stopped at step 60: ")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as client:
        yield client


def test_receipt_names_eviction_with_rule_and_evidence(client: TestClient) -> None:
    agents = running_job(client, "n1", "n2", spare="n3")
    progress = RankProgress(job="j", generation=1, rank=1, step=7, step_s=0.5, loss=2.25, until_step=500)
    agents[1].beat(ranks=(progress,))
    receipt = get(client, "/v1/jobs/j/receipt", JobReceipt)
    assert (receipt.result, receipt.recovery_count, receipt.evictions) == ("running", 0, ())
    assert (receipt.loss, receipt.until_step, receipt.ranks, receipt.nodes) == (2.25, 500, 2, 2)
    agents[0].report(FindingRaised(finding=FELL_OFF))
    resume([agents[2], agents[1]], 2)
    receipt = get(client, "/v1/jobs/j/receipt?checkpoint_interval_s=600&restart_s=30", JobReceipt)
    (eviction,) = receipt.evictions
    assert (eviction.node, eviction.rule, eviction.evidence) == ("n1", FELL_OFF.rule, FELL_OFF.message)
    assert (receipt.costs.checkpoint_interval_s, receipt.costs.restart_s) == (600.0, 30.0)
    assert [recovery.reason for recovery in receipt.recoveries] == [GenerationReason.NODE_EVICTED]
    assert receipt.costs.saved_rank_s > 0


def test_job_that_restarts_its_script_has_no_receipt(client: TestClient) -> None:
    """Only the script knows the step from which it continues, so the cost of a loss is unknown."""
    (agent,) = fleet(client, "n1")
    agent.report(joined("j", 1.0, restarts_script=True))
    answer = client.get("/v1/jobs/j/receipt", headers=VIEWER)
    assert answer.status_code == 404
    assert "continues from its own checkpoint" in answer.text


@pytest.mark.parametrize("query", ["checkpoint_interval_s=0", "restart_s=-1", "until=x", "other=1"])
def test_unusable_comparison_is_refused(client: TestClient, query: str) -> None:
    running_job(client, "n1")
    assert client.get(f"/v1/jobs/j/receipt?{query}", headers=VIEWER).status_code == 422
