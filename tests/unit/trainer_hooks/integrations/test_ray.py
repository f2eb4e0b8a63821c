"""Settings, flags and waiting reports of the integration with Ray Train, without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
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


@pytest.mark.parametrize(("error", "is_dead"), [("", False), ("RayActorError", True), ("GetTimeoutError", False)])
def test_actor_without_an_answer_counts_as_alive(
    integration: Any, monkeypatch: pytest.MonkeyPatch, error: str, is_dead: bool
) -> None:
    waits = list[float]()

    def get(references: list[object], *, timeout: float) -> None:
        waits.append(timeout)
        if error:
            raise getattr(integration.ray.exceptions, error)

    monkeypatch.setattr(integration.ray, "get", get)
    assert integration._is_dead(SimpleNamespace(get_workers=list)) is is_dead
    assert waits == [integration.ANSWER_S]


class Group:
    """A replica group, of which ``dead`` may be set, and the worker group around it."""

    def __init__(self) -> None:
        self.dead, self.shut = False, False

    def is_active(self) -> bool:
        return not self.shut

    def shutdown(self) -> None:
        self.shut = True


class WorkerGroup:
    """Fails as Ray does while it replaces one of three, if another is dead."""

    def __init__(self, integration: Any) -> None:
        self._error = integration.ray.exceptions.RayActorError
        self._replica_groups = [Group() for _ in range(3)]
        self.status, self.replaced, self.dies_meanwhile = object(), list[int](), -1

    def get_latest_poll_status(self) -> object:
        return self.status

    def replace_replica_group(self, index: int) -> None:
        if self.dies_meanwhile >= 0:
            self._replica_groups[self.dies_meanwhile].dead, self.dies_meanwhile = True, -1
        if any(group.dead and group.is_active() for n, group in enumerate(self._replica_groups) if n != index):
            raise self._error
        self._replica_groups[index] = Group()
        self.replaced.append(index)


@pytest.mark.parametrize("meanwhile", [False, True])
def test_actor_that_died_later_is_replaced_too(
    integration: Any, monkeypatch: pytest.MonkeyPatch, meanwhile: bool
) -> None:
    monkeypatch.setattr(integration, "_is_dead", lambda group: group.dead)
    workers = WorkerGroup(integration)
    integration._Replacements(workers)
    workers._replica_groups[0].dead = True
    if meanwhile:
        workers.dies_meanwhile = 2
    else:
        workers._replica_groups[2].dead = True
    for known in (0, 2):  # Ray may know of both
        workers.replace_replica_group(known)
    assert workers.replaced == [0, 2]
    workers.status = object()
    workers.replace_replica_group(2)
    assert workers.replaced == [0, 2, 2]
