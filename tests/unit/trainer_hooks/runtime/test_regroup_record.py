"""The ranks' records of a regroup, and callbacks that fail."""

from __future__ import annotations

import logging

import pytest
import torch

from everstep_trainer.parallel.replicas import RankContext
from everstep_trainer.run import Run
from everstep_trainer.runtime.regroup_record import RecoveryTally, RegroupRecord
from everstep_trainer.session.generation_session import TrainingSession
from tests.support.fleet.generations import generation


def record_at(step: int) -> RegroupRecord:
    return RecoveryTally().record(generation(number=2), 4, step, 10.0, {"restore": 0.5})


class Recording(TrainingSession):
    """A source with one record."""

    def __init__(self) -> None:
        self.records = [record_at(5)]

    def take_regroup_record(self) -> RegroupRecord | None:
        return self.records.pop() if self.records else None


def test_new_process_continues_the_tally_of_survivors() -> None:
    survivor, new = RecoveryTally(), RecoveryTally()
    survivor.finish_step(9, 1000.0)
    survivor.lost_s = 3.0
    new.merge(new.entry() + survivor.entry())
    record = new.record(generation(number=3), 7, 8, 1002.5, {})
    assert (record.lost_s, record.total_lost_s, record.repeated_steps, record.regroups) == (2.5, 5.5, 2, 2)


def test_callbacks_receive_losses_and_one_regroup() -> None:
    run, losses = Run(RankContext(generation=2), Recording()), []
    records: list[RegroupRecord] = []
    run.on_report(lambda step, loss: losses.append((step, float(loss))))
    run.on_regroup(records.append)
    for _ in run.steps(until=2):
        run.report(loss=torch.tensor(0.5))
    assert losses == [(1, 0.5), (2, 0.5)]
    assert [record.step for record in records] == [5]


def test_failing_callback_is_logged_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    run, calls = Run(RankContext(generation=2), Recording()), []

    def fail(step: int, loss: object) -> None:
        calls.append(step)
        raise RuntimeError("no space")

    run.on_report(fail)
    with caplog.at_level(logging.WARNING):
        for _ in run.steps(until=3):
            run.report(loss=1.0)
    assert calls == [1]
    assert sum("is not called again" in record.getMessage() for record in caplog.records) == 1
