"""Trackers on their own thread: those that work, fail, hang or cannot keep up."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from everstep_trainer.integrations import trackers
from everstep_trainer.integrations.trackers import Tracker, track_recoveries
from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.runtime.regroup_record import RecoveryTally, RegroupRecord
from everstep_trainer.session.generation_session import TrainingSession
from tests.support.fleet.generations import generation


class Noting(Tracker):
    """Notes all calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def open(self, job: str, step: int) -> None:
        self.calls.append(("open", job, step))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(("log", step, dict(values)))

    def mark(self, record: RegroupRecord) -> None:
        self.calls.append(("mark", record.generation))

    def close(self) -> None:
        self.calls.append(("close",))


class Failing(Noting):
    def log(self, step: int, values: Mapping[str, float]) -> None:
        super().log(step, values)
        raise RuntimeError("no space")


class Hanging(Noting):
    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.go_on.wait()
        super().log(step, values)


class Session(TrainingSession):
    """A session of a generation that began with a regroup."""

    def __init__(self, number: int) -> None:
        self.record: RegroupRecord | None = RecoveryTally().record(generation(number), 0, 1, 0.0, {})

    def take_regroup_record(self) -> RegroupRecord | None:
        record, self.record = self.record, None
        return record


@pytest.fixture(autouse=True)
def own_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check that no tracker thread of another test runs, and that this test leaves none."""
    threads: dict[str, trackers.TrackerThread] = {}
    monkeypatch.setattr(trackers, "_threads", threads)
    yield
    for thread in threads.values():
        thread.close(10.0)


def finish(*_: object) -> None:
    """Wait until all is written."""
    for thread in trackers._threads.values():
        thread.close(10.0)


def steps_of(run: Run, until: int, *of: Tracker) -> None:
    track_recoveries(run, *of)
    for step in run.steps(until=until):
        run.report(loss=torch.tensor(float(step)))


def test_generations_of_a_process_share_one_tracker() -> None:
    noting = Noting()
    steps_of(Run(RankContext(generation=1, job="j"), TrainingSession()), 2, noting)
    steps_of(Run(RankContext(generation=2, job="j"), Session(2)), 1, Noting())
    finish()
    begun = {"everstep/generation": 1.0, "everstep/world_size": 1.0}
    assert noting.calls[:3] == [("open", "j", 1), ("log", 1, {**begun, "loss": 1.0}), ("log", 2, {"loss": 2.0})]
    assert noting.calls[3:5] == [("open", "j", 1), ("log", 1, {**begun, "everstep/generation": 2.0, "loss": 1.0})]
    kind, step, numbers = noting.calls[5]
    assert (kind, step) == ("log", 1)
    assert numbers.keys() >= {"everstep/lost_s", "everstep/total_lost_s", "everstep/regroups"}
    assert noting.calls[6:] == [("mark", 2), ("close",)]


def test_failing_tracker_is_left_out_alone(caplog: pytest.LogCaptureFixture) -> None:
    failing, noting = Failing(), Noting()
    with caplog.at_level(logging.WARNING):
        steps_of(Run(RankContext(), TrainingSession()), 3, failing, noting)
        finish()
    assert [call[0] for call in failing.calls] == ["open", "log"]
    assert [call[1] for call in noting.calls if call[0] == "log"] == [1, 2, 3]
    assert sum("is left out" in record.getMessage() for record in caplog.records) == 1


def test_hanging_tracker_drops_values_over_its_limit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trackers, "QUEUE_LENGTH", 4)
    hanging = Hanging()
    with caplog.at_level(logging.WARNING):
        steps_of(Run(RankContext(), TrainingSession()), 100, hanging)
    assert sum("slower than the training" in record.getMessage() for record in caplog.records) == 1
    hanging.go_on.set()
    finish()
    assert 4 <= sum(call[0] == "log" for call in hanging.calls) <= 6


def test_process_that_is_no_longer_rank_0_closes_its_tracker() -> None:
    noting = Noting()
    steps_of(Run(RankContext(generation=1), TrainingSession()), 1, noting)
    (thread,) = trackers._threads.values()
    steps_of(Run(RankContext(generation=2, rank=1, world_size=2), TrainingSession()), 1, Noting())
    assert not trackers._threads
    thread.close(10.0)
    assert noting.calls[-1] == ("close",)
    assert sum(call[0] == "log" for call in noting.calls) == 1


def test_broken_key_does_not_end_training(caplog: pytest.LogCaptureFixture) -> None:
    class Keyless(Noting):
        @property
        def key(self) -> str:
            raise RuntimeError("no key")

    with caplog.at_level(logging.WARNING):
        steps_of(Run(RankContext(), TrainingSession()), 1, Keyless())
    assert "is left out" in caplog.text
