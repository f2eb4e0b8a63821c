"""Settings, flags and waiting reports of the Ray Train integration, without a Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.frameworks("ray"), pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def integration() -> Any:
    from everstep_trainer.integrations import ray

    return ray


def test_reports_keep_order_until_removed(integration: Any) -> None:
    pending = integration.PendingReports()
    pending.add({"step": 1}, None)
    pending.add({"step": 2}, "checkpoint")
    assert pending.first() == pending.first() == (1, {"step": 1}, None)
    pending.remove(1)
    assert pending.first() == (2, {"step": 2}, "checkpoint")
    pending.remove(2)
    assert pending.first() is None


def test_reports_drop_metrics_but_no_checkpoints(integration: Any) -> None:
    pending, taken = integration.PendingReports(limit=4), []
    for step in range(1, 11):
        pending.add({"step": step}, "checkpoint" if step in (2, 5) else None)
    while (found := pending.first()) is not None:
        number, metrics, _ = found
        taken.append(metrics["step"])
        pending.remove(number)
    assert taken == [1, 2, 5, 10], "the first is on its way, and the last is the newest"


def test_config_refuses_settings_of_the_job(integration: Any) -> None:
    with pytest.raises(ValueError, match="job follows from the Ray job"):
        integration.EverstepConfig(settings={"job": "mine"})
    with pytest.raises(ValueError, match="no setting 'standbies'"):
        integration.EverstepConfig(settings={"standbies": 2})


def test_plan_makes_flags_of_a_later_node(integration: Any, tmp_path: Path) -> None:
    settings = {"standbys": 2, "preload": ("numpy",), "spill_to": None}
    plan = integration.JobPlan("job", (1, 3), 8, settings, "192.0.2.1:4000", "secret")
    flags = plan.flags(0, tmp_path)
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given == {
        "--nnodes": "1:3",
        "--nproc-per-node": "8",
        "--job": "job",
        "--rdzv-endpoint": "192.0.2.1:4000",
        "--node-rank": "1",
        "--node": "ray-0",
        "--job-secret-file": str(tmp_path / "secret"),
        "--preload": "everstep_trainer.integrations.ray,numpy",
        "--standbys": "2",
    }
    assert "secret" not in repr(plan)


def test_plan_of_one_worker_meets_nobody(integration: Any, tmp_path: Path) -> None:
    flags = integration.JobPlan("job", (1, 1), 2, {"standalone": False}, "", "secret").flags(0, tmp_path)
    assert "--rdzv-endpoint" not in flags
    assert flags[:2] == ["--nnodes", "1:1"]


@pytest.mark.parametrize(("run", "job"), [("my run/1", "my-run-1-0123abcd"), ("___", "ray-0123abcd")])
def test_job_is_named_after_the_run(integration: Any, run: str, job: str) -> None:
    assert integration._job_name(run, "0123abcdef") == job
