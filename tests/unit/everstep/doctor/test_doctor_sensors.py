"""A survey of the sensors that hangs or fails costs its last results only."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from everstep.doctor import sensors
from everstep.doctor.results import CheckResult, Status, ok


def check(code: str, timeout_s: float = 60.0) -> list[CheckResult]:
    line = '{"check":"host","status":"ok","sentence":"6 values"}'
    program = f"import sys, time\nprint({line!r}, flush=True)\n{code}"
    return list(sensors.check_sensors((sys.executable, "-c", program), timeout_s))


def test_results_of_the_survey_are_passed_on() -> None:
    assert check("") == [ok("host", "6 values")]


def test_hung_driver_is_named_after_the_other_sensors() -> None:
    results = check("time.sleep(60)", 0.3)
    assert [(result.check, result.status) for result in results][-1] == ("GPUs", Status.FAIL)
    assert "did not answer within 0.3 s" in results[-1].sentence


def test_failed_survey_shows_its_last_line() -> None:
    assert check("sys.exit('no such thing')")[-1].sentence == "the survey ended with status 1: no such thing"


def test_absent_agent_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (result,) = sensors.check_sensors()
    assert "everstep[agent]" in result.sentence
