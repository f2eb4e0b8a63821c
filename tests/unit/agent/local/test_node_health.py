"""A node's health follows from its findings, and the file for scripts can be read by any shell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep.vocabulary import Action, Finding, FindingKind, Mode, Severity
from everstep.wire.v1.node_status import NodeHealth
from everstep_agent.local.health import HealthFile, health_reason, judge_health
from everstep_agent.sensors.sensor_messages import SensorReport


def finding(**values: Any) -> Finding:
    """Return a critical finding that drains the node. ``values``: other values of fields."""
    fields = {"kind": FindingKind.GPU_LOST, "subject": "0000:1b:00", "severity": Severity.CRITICAL, "message": "lost"}
    return Finding(**{**fields, "action": Action.DRAIN, **values})


@pytest.mark.parametrize(
    ("values", "health"),
    [
        ({}, NodeHealth.UNFIT),
        ({"mode": Mode.RECOMMEND}, NodeHealth.DEGRADED),
        ({"action": Action.NONE}, NodeHealth.DEGRADED),
        ({"action": Action.RESTART_RANK}, NodeHealth.DEGRADED),
        ({"severity": Severity.WARNING}, NodeHealth.DEGRADED),
        ({"severity": Severity.INFO}, NodeHealth.HEALTHY),
    ],
)
def test_only_enforced_actions_make_a_node_unfit(values: dict[str, Any], health: NodeHealth) -> None:
    assert judge_health([finding(**values)], 100.0, 101.0) is health


def test_silent_sensors_hide_health_but_no_enforced_finding() -> None:
    assert judge_health([], 0.0, 100.0) is NodeHealth.UNKNOWN
    assert judge_health([finding()], 0.0, 100.0) is NodeHealth.UNFIT


def test_reason_is_the_enforced_finding() -> None:
    mild = finding(kind=FindingKind.HOST_DISK, mode=Mode.OBSERVE, message="full")
    assert health_reason([mild, finding()]) == "gpu.lost/0000:1b:00: lost"
    assert health_reason([finding(severity=Severity.INFO)]) == ""


def test_health_file_has_no_text_that_a_shell_interprets(tmp_path: Path) -> None:
    file = HealthFile(tmp_path / "health")
    file.update(SensorReport(polled_at=100.0), [finding(message="a `b` $(c)\n'd' \"e\"")], 101.0)
    lines = (tmp_path / "health").read_text().splitlines()
    assert lines == ["at=101", "health=unfit", "reason=gpu.lost/0000:1b:00: a  b   (c)  d   e "]


def test_health_file_is_written_on_change_and_as_it_ages(tmp_path: Path) -> None:
    path = tmp_path / "health"
    file = HealthFile(path)
    for now, changes in ((100.0, True), (101.0, False), (110.0, True), (109.0, True)):
        before = path.read_text() if path.exists() else ""
        file.update(SensorReport(polled_at=now), [], now)
        assert (path.read_text() != before) is changes
