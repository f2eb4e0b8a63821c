"""Families that name nodes, racks and ranks: which they show, and how many at most."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from everstep_controller.read_models import bounded_families
from everstep_controller.read_models.bounded_families import (
    RECOVERY_PHASES,
    NextStep,
    late_ranks,
    node_families,
    probe_families,
)
from everstep_controller.read_models.fleet_views import ProbeTracker
from prometheus_client.core import Metric
from starlette.testclient import TestClient

from everstep.vocabulary import Action, NodeState
from everstep.wire.v1.directives import RunProbe
from everstep.wire.v1.training import ProbeFinished, RankLost, RankProgress
from tests.support.controllers import VIEWER, InProcess
from tests.support.core_fleet import CoreFleet
from tests.support.findings import xid
from tests.support.spoken import resume, running_job

Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(families: Iterable[Metric]) -> Samples:
    found: Samples = {}
    for family in families:
        found.setdefault(family.name.removeprefix("everstep_controller_"), [])
        for one in family.samples:
            found[family.name.removeprefix("everstep_controller_")].append((one.labels, one.value))
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


def test_healthy_fleet_has_racks_at_zero_and_no_node() -> None:
    fleet = CoreFleet()
    fleet.register("n1", "n2")
    found = samples(node_families(fleet.state, fleet.now))
    assert found["node_unfit_since_timestamp_seconds"] == []
    assert {value for _, value in found["rack_unfit_nodes"]} == {0}


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
        one = RankProgress(job="job", generation=1, rank=rank, step=3, step_s=1.0, busy_s=busy_s)
        fleet.beat(node, ranks=(one,))
    late = late_ranks(fleet.state, fleet.job())
    assert late is not None
    assert (late.median_s, late.slowest[0]) == (0.1, (2, seats[2], 0.9))
    assert len(late.slowest) == 4


def test_run_without_measured_ranks_has_no_late_ranks() -> None:
    fleet = CoreFleet()
    fleet.start(2)
    assert late_ranks(fleet.state, fleet.job()) is None


def test_probe_results_start_at_zero_and_count_once() -> None:
    tracker = ProbeTracker()
    found = samples(probe_families(tracker))
    assert found["probes"] == [({"result": "passed"}, 0), ({"result": "failed"}, 0)]
    assert found["probe_bandwidth_bytes_per_second"] == [({}, 0.0)]
    probe = RunProbe(probe="probe-1", nodes=("a", "b"), store="a:1")
    tracker.record_started(probe, 1.0)
    for node in ("a", "b", "b"):
        rows = ((1024, 0.001, 5e8), (1 << 20, 0.01, 9e9))
        tracker.record_result(node, ProbeFinished(probe="probe-1", ok=True, rows=rows))
    found = samples(probe_families(tracker))
    assert found["probes"] == [({"result": "passed"}, 1), ({"result": "failed"}, 0)]
    assert found["probe_bandwidth_bytes_per_second"] == [({}, 9e9)]
    assert found["probe_latency_seconds"] == [({}, 0.001)]


def test_phases_of_the_newest_recovery_are_shown(tmp_path: Path) -> None:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as client:
        speakers = running_job(client, "n1", "n2")

        def phases() -> dict[str, float]:
            lines = client.get("/metrics", headers=VIEWER).text.splitlines()
            shown = [line for line in lines if line.startswith("everstep_controller_job_recovery_phase_seconds{")]
            return {line.split('phase="')[1].split('"')[0]: float(line.split()[-1]) for line in shown}

        assert phases() == dict.fromkeys((*RECOVERY_PHASES, "other"), 0.0)
        lost = RankLost(job="j", at=1.0, generation=1, rank=1, local_rank=0, detail="killed", signal=9, trace="k-1")
        speakers[1].report(lost)
        resume(speakers, 2)
        assert phases()["rendezvous"] == 0.02
        assert phases()["restore"] == 0.02


def test_documentation_explains_every_next_step() -> None:
    page = (Path(__file__).parents[4] / "docs" / "how-to" / "monitoring.md").read_text()
    section = page.split("### What a node waits for", 1)[1].split("\n### ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert {word for row in rows for word in re.findall(r"`(\w+)`", row)} == {*NextStep, *Action}
