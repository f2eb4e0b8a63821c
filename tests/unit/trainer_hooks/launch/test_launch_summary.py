"""What the launcher says at the end of a run."""

from __future__ import annotations

import asyncio
from typing import Any

from everstep_trainer.launch.private_services import MAX_LISTED_RECOVERIES, _ask, summary

from everstep.cli.client import ControllerClient
from everstep.vocabulary import GenerationReason, JobState
from everstep.wire.v1.operator import GenerationRecovery, JobDetail, JobSummary
from everstep.wire.v1.training import JobSpec


def recovery(generation: int, seconds: float | None, **more: Any) -> GenerationRecovery:
    fields = {"reason": GenerationReason.RANK_LOST, "sentence": "rank 1 was\nkilled", "trace": "t"} | more
    return GenerationRecovery(generation=generation, duration_s=seconds, decided_at=1.0, **fields)


def detail(*recoveries: GenerationRecovery, state: JobState = JobState.FINISHED) -> JobDetail:
    one = JobSummary(job="llama", state=state, generation=3, world_size=2, nodes=1, spares=0, step=60)
    spec = JobSpec(job="llama", min_nodes=1, max_nodes=1, nproc_per_node=2)
    return JobDetail(summary=one, spec=spec, recoveries=recoveries)


def test_undisturbed_run_lost_nothing() -> None:
    formed = recovery(1, 4.0, reason=GenerationReason.FORMED)
    assert summary(detail(formed)) == ["job llama finished at step 60: 0 recoveries, 0.00 s lost to them"]


def test_each_recovery_is_listed_with_its_seconds() -> None:
    assert summary(detail(recovery(2, 0.25), recovery(3, None), state=JobState.FAILED)) == [
        "job llama failed at step 60: 2 recoveries, 0.25 s lost to them",
        "  generation 2: 0.25 s, rank_lost: rank 1 was killed",
        "  generation 3: not completed, rank_lost: rank 1 was killed",
    ]


def test_many_recoveries_are_counted_and_the_last_listed() -> None:
    lines = summary(detail(*(recovery(2 + n, 1.0) for n in range(MAX_LISTED_RECOVERIES + 5))))
    assert "25 recoveries, 25.00 s lost" in lines[0]
    assert len(lines) == MAX_LISTED_RECOVERIES + 2


def test_long_reason_is_cut() -> None:
    assert len(summary(detail(recovery(2, 1.0, sentence="x" * 4000)))[1]) < 250


def test_unresponsive_controller_costs_only_the_summary() -> None:
    client = ControllerClient("http://127.0.0.1:9", "a.token")
    assert asyncio.run(_ask(lambda: client.get("/v1/jobs/llama", JobDetail))) is None
