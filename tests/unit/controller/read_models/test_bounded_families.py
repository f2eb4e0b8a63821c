"""Metric families by node, rack and rank, and their maximal number of series."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from everstep.vocabulary import RECOVERY_PHASES, Action, Decision, GenerationReason, NodeState
from everstep.wire.v1 import operator as op
from everstep.wire.v1.training import RankLost, RankProgress
from everstep_controller.core import events as ev
from everstep_controller.core.state import Ignored
from everstep_controller.read_models import bounded_families
from everstep_controller.read_models.bounded_families import (
    NextStep,
    late_ranks,
    node_families,
)
from tests.support.fleet.controllers import OPERATOR, VIEWER, InProcess
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import xid
from tests.support.fleet.in_process_fleet import resume, running_job

Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(families: Iterable[Metric]) -> Samples:
    found: Samples = {}
    for family in families:
        found.setdefault(family.name.removeprefix("everstep_controller_"), [])
        for sample in family.samples:
            found[family.name.removeprefix("everstep_controller_")].append((sample.labels, sample.value))
    return found


def test_unfit_node_has_rule_reason_and_next_step() -> None:
    fleet = CoreFleet()
    fleet.register(*(f"n{number}" for number in range(1, 11)))
    fleet.raise_finding("n3", xid())
    ((labels, since),) = samples(node_families(fleet.state, fleet.now))["node_unfit_since_timestamp_seconds"]
    record = fleet.state.nodes["n3"]
    assert (labels["node"], labels["state"], since) == ("n3", str(record.state), record.since)
    assert record.state is not NodeState.HEALTHY
    assert labels["rule"] == "gpu.xid"
    assert labels["reason"] == record.sentence[: bounded_families.REASON_CHARACTERS]
    assert labels["next"] in {*Action, *NextStep}


def test_families_of_nodes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_families, "NODES_SHOWN", 3)
    monkeypatch.setattr(bounded_families, "RACKS_SHOWN", 2)
    fleet = CoreFleet()
    fleet.register(*(f"n{number}" for number in range(8)))
    for number, record in enumerate(fleet.state.nodes.values()):
        rack = msgspec.structs.replace(record.identity.domain, rack=f"r{number % 4}")
        record.identity.domain, record.state, record.since = rack, NodeState.LOST, float(number)
    found = samples(node_families(fleet.state, fleet.now))
    assert [labels["node"] for labels, _ in found["node_unfit_since_timestamp_seconds"]] == ["n7", "n6", "n5"]
    assert [value for _, value in found["rack_unfit_nodes"]] == [2, 2]


def test_latest_ranks_are_those_that_others_wait_for() -> None:
    fleet = CoreFleet()
    fleet.start(4)
    seats = fleet.seats()
    for rank, node in enumerate(seats):
        busy_s = 0.9 if rank == 2 else 0.1
        progress = RankProgress(job="job", generation=1, rank=rank, step=3, step_s=1.0, busy_s=busy_s)
        fleet.beat(node, ranks=(progress,))
    late = late_ranks(fleet.state, fleet.job())
    assert late is not None
    assert (late.median_s, late.slowest[0]) == (0.1, (2, seats[2], 0.9))
    assert len(late.slowest) == 4


def test_phases_of_the_newest_recovery_are_shown(tmp_path: Path) -> None:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as client:
        agents = running_job(client, "n1", "n2")

        def phases() -> dict[str, float]:
            lines = client.get("/metrics", headers=VIEWER).text.splitlines()
            shown = [line for line in lines if line.startswith("everstep_controller_job_recovery_phase_seconds{")]
            return {line.split('phase="')[1].split('"')[0]: float(line.split()[-1]) for line in shown}

        assert phases() == dict.fromkeys((*RECOVERY_PHASES, "other"), 0.0)
        lost = RankLost(job="j", at=1.0, generation=1, rank=1, local_rank=0, detail="killed", signal=9, trace="k-1")
        agents[1].report(lost)
        resume(agents, 2)
        assert phases()["rendezvous"] == 0.02
        assert phases()["restore"] == 0.02


def test_documentation_explains_every_next_step() -> None:
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "monitoring.md").read_text()
    section = page.split("### What a node waits for", 1)[1].split("\n### ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {word for row in rows for word in re.findall(r"`(\w+)`", row)} == {*NextStep, *Action}


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
    assert series(client, "verdicts_total", "decision") == {str(decision): 0.0 for decision in Decision}
    assert series(client, "reports_ignored_total", "reason") == dict.fromkeys(get_args(Ignored), 0.0)
    assert series(client, "recovery_seconds_count", "reason") == dict.fromkeys(LATER, 0.0)
    assert set(series(client, "events_total", "kind")) == {kind.__name__ for kind in get_args(ev.Event)}


def test_first_generation_counts_as_no_recovery(client: TestClient) -> None:
    """A run's first generation is no recovery, and events that are read twice count once."""
    running_job(client, "n1")
    first = series(client, "recoveries_total", "reason", run="j")
    body = msgspec.json.encode(op.ReasonOnlyRequest(reason="done"))
    assert client.post("/v1/jobs/j/stop", content=body, headers=OPERATOR).status_code == 200
    assert series(client, "recoveries_total", "reason", run="j") == first
