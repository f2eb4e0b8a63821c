"""The log line with the cost of the exchange of gradients in a step."""

from __future__ import annotations

import itertools
import logging

import pytest

from everstep_trainer.parallel import wait_report
from everstep_trainer.parallel.wait_report import MEASURED_STEPS, SKIPPED_STEPS, WaitReport


def report_of(waited_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report steps that each wait for this time. The measured steps take 0.4 s each."""
    monkeypatch.setattr(wait_report, "_has_told", False)
    clock = itertools.count(100.0, 0.4 * MEASURED_STEPS)
    for _ in range(2):  # two generations
        report = WaitReport(lambda: next(clock))
        for _ in range(2 * (SKIPPED_STEPS + MEASURED_STEPS)):
            report.add(waited_s)
            report.step_finished()


def test_wait_is_told_once_and_warns_of_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Plain DistributedDataParallel would wait too, so a long wait alone is no fault."""
    caplog.set_level(logging.INFO)
    report_of(0.1, monkeypatch)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "a step of 400.0 ms waits 100.0 ms (25 %) for gradients of other ranks" in record.getMessage()


def test_steps_without_waits_are_not_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    report_of(0.0, monkeypatch)
    assert not caplog.records
