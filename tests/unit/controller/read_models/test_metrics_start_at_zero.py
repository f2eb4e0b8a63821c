"""Counters exist at 0 before the first event, so that ``increase()`` sees the first one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from everstep_controller.core import events as ev
from everstep_controller.core.state import Ignored
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from everstep.vocabulary import Decision, GenerationReason
from everstep.wire.v1 import operator as op
from tests.support.controllers import OPERATOR, VIEWER, InProcess
from tests.support.spoken import running_job

PREFIX = "everstep_controller_"
LATER = {str(reason) for reason in GenerationReason} - {"formed"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as client:
        yield client


def series(client: TestClient, name: str, label: str, **labels: str) -> dict[str, float]:
    """The samples of ``name`` that have ``labels``, by the value of ``label``."""
    text = client.get("/metrics", headers=VIEWER).text
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
    }


def test_counters_by_known_labels_start_at_zero(client: TestClient) -> None:
    assert series(client, "verdicts_total", "decision") == {str(one): 0.0 for one in Decision}
    assert series(client, "reports_ignored_total", "reason") == dict.fromkeys(get_args(Ignored), 0.0)
    assert series(client, "recovery_seconds_count", "reason") == dict.fromkeys(LATER, 0.0)
    assert set(series(client, "events_total", "kind")) == {kind.__name__ for kind in get_args(ev.Event)}


def test_counters_of_a_run_start_at_zero(client: TestClient) -> None:
    running_job(client, "n1")
    assert series(client, "recoveries_total", "reason", run="j") == dict.fromkeys(LATER, 0.0)
    assert series(client, "user_errors_total", "run") == {"j": 0.0}


def test_first_generation_counts_as_no_recovery(client: TestClient) -> None:
    """A run's first generation is no recovery, and what is read twice is not counted twice."""
    running_job(client, "n1")
    first = series(client, "recoveries_total", "reason", run="j")
    body = msgspec.json.encode(op.ReasonOnlyRequest(reason="done"))
    assert client.post("/v1/jobs/j/stop", content=body, headers=OPERATOR).status_code == 200
    assert series(client, "recoveries_total", "reason", run="j") == first
