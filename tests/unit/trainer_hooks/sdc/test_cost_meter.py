"""The cost of an audit: work and waits, by the host's clock and by events of a GPU."""

from __future__ import annotations

import time

import pytest
import torch

from everstep_trainer.sdc import cost_meter
from everstep_trainer.sdc.cost_meter import CostMeter, StepCost


class _Event:
    """An event that its stream reaches at a time that the test sets."""

    def __init__(self) -> None:
        self.at_ms: float | None = None

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end: _Event) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


class _Stream:
    def __init__(self) -> None:
        self.events: list[_Event] = []

    def record_event(self, event: _Event) -> _Event:
        self.events.append(event)
        return event


def test_gpu_is_measured_by_events_once_they_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(cost_meter, "timed_event", _Event)
    meter = CostMeter(torch.device("cuda"))
    with meter.count(work=1.0), meter.count(work=-1.0, wait=1.0):
        time.sleep(0.02)  # the host waits for the backward pass, which is no cost
    reading = meter.take()
    assert reading.cost() is None
    for event, at_ms in zip(stream.events, (100.0, 101.0, 104.0, 110.0), strict=True):
        assert reading.cost() is None
        event.at_ms = at_ms
    cost = reading.cost()
    assert cost is not None
    assert cost == pytest.approx((0.007, 0.003))
    assert meter.take().cost() == StepCost(0.0, 0.0)
