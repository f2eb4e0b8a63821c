"""Samples of a job's progress: their interval, their bound, and a job that begins again under its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from everstep.wire.v1 import operator as op
from everstep.wire.v1.training import RankProgress
from everstep_controller.read_models.fleet_views import SAMPLES_KEPT, ProgressRecorder
from tests.support.fleet.controllers import InProcess, get
from tests.support.fleet.in_process_fleet import running_job


class Played:
    """A recorder over a controller's state, with a clock that the test moves."""

    def __init__(self, client: TestClient) -> None:
        controller = client.app.controller  # type: ignore[attr-defined]
        assert controller is not None
        self.state = controller.loop.state
        self.now = 1000.0
        self.recorder = ProgressRecorder(self.state, lambda: self.now)

    def sample(self, after_s: float = 1.0) -> None:
        self.now += after_s
        for job in self.recorder.due_jobs():
            self.recorder.sample(job)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as client:
        yield client


def progress(step: int, loss: float) -> RankProgress:
    return RankProgress(job="j", generation=1, rank=0, step=step, step_s=0.5, loss=loss)


def test_sample_holds_step_loss_and_size(client: TestClient) -> None:
    (agent,) = running_job(client, "n1")
    played = Played(client)
    for step in (4, 6):
        agent.beat(ranks=(progress(step, 1.0 / step),))
        played.sample()
    history = played.recorder.history("j")
    assert [(sample.step, sample.loss, sample.step_s) for sample in history.samples] == [
        (4, 0.25, 0.5),
        (6, 1 / 6, 0.5),
    ]
    assert {(sample.generation, sample.world_size) for sample in history.samples} == {(1, 1)}
    assert [sample.step for sample in played.recorder.history("j", since=history.samples[0].at).samples] == [6]


def test_samples_are_thinned_when_too_many(client: TestClient) -> None:
    running_job(client, "n1")
    played = Played(client)
    for _ in range(4 * SAMPLES_KEPT):
        played.sample()
    history = played.recorder.history("j")
    assert SAMPLES_KEPT // 2 <= len(history.samples) <= SAMPLES_KEPT
    assert history.samples[0].at == 1001.0
    assert history.interval_s >= 4.0


def test_new_run_of_a_job_begins_anew(client: TestClient) -> None:
    running_job(client, "n1")
    played = Played(client)
    played.sample()
    played.state.jobs["j"].progress.created_at += 100.0
    played.sample()
    assert len(played.recorder.history("j").samples) == 1
    del played.state.jobs["j"]
    assert played.recorder.due_jobs() == []
    assert played.recorder.history("j").samples == ()


def test_route_answers_samples_of_a_job(client: TestClient) -> None:
    running_job(client, "n1")
    controller = client.app.controller  # type: ignore[attr-defined]
    assert controller is not None
    controller.progress.sample("j")
    (first, *_) = get(client, "/v1/jobs/j/progress", op.ProgressHistory).samples
    assert get(client, f"/v1/jobs/j/progress?since={first.at + 1e6}", op.ProgressHistory).samples == ()
    assert client.get("/v1/jobs/k/progress").status_code in (401, 404)


def test_job_shows_its_times_and_what_ranks_report(client: TestClient) -> None:
    (agent,) = running_job(client, "n1")
    busy = RankProgress(job="j", generation=1, rank=0, step=5, step_s=0.5, busy_s=0.3, snapshot_every=4)
    agent.beat(ranks=(busy,))
    detail = get(client, "/v1/jobs/j", op.JobDetail)
    assert detail.ranks[0].busy_s == 0.3
    assert detail.ranks[0].snapshot_every == 4
    assert 0 < detail.created_at <= detail.since
