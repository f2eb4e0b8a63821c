"""An active outbreak in the views for operators."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from everstep.cli import tables
from everstep.wire.v1 import operator as op
from everstep_controller.core.policy import CorePolicy
from everstep_controller.read_models import fleet_views, prometheus
from everstep_controller.remediation.alerts import Alert, active_alerts
from tests.support.fleet.core_fleet import CoreFleet
from tests.support.fleet.findings import xid
from tests.unit.controller.core.health.view_context import view_context_of

ILL = [f"n{number}" for number in range(1, 11)]


def printed(content: RenderableType, width: int) -> str:
    """Return the lines that a terminal of ``width`` columns shows, without colours."""
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(content)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _outbreak(nodes: int = 40, **knobs: Any) -> CoreFleet:
    """XID 79 on ten nodes of forty, 130 s ago."""
    fleet = CoreFleet(CorePolicy().with_values(probes={"required": False}).with_values(**knobs))
    fleet.register(*(f"n{number}" for number in range(1, nodes + 1)))
    for node in ILL:
        fleet.raise_finding(node, xid())
    fleet.advance(130.0, *fleet.state.nodes)
    return fleet


def _status(fleet: CoreFleet) -> op.FleetStatus:
    return fleet_views.fleet_status(view_context_of(fleet), ())


def _alerts(fleet: CoreFleet) -> list[Alert]:
    return [alert for alert in active_alerts(fleet.state, fleet.now) if alert.labels["alertname"] == "EverstepOutbreak"]


@pytest.mark.promise("outbreaks-shown")
def test_status_names_a_standing_outbreak() -> None:
    fleet = _outbreak()
    (outbreak,) = _status(fleet).outbreaks
    assert (outbreak.finding, outbreak.rule, outbreak.count, set(outbreak.nodes)) == (
        "gpu.xid/79",
        "gpu.xid",
        10,
        set(ILL),
    )
    assert 130.0 <= fleet.now - outbreak.since < 140.0
    assert outbreak.sentence.startswith("gpu.xid/79 is present on 10 of 40 nodes (")
    assert "no node is evicted for it" in outbreak.sentence
    assert "everstep node evict" in outbreak.advice
    assert "every 120 s" in outbreak.advice


@pytest.mark.promise("outbreaks-shown")
def test_status_counts_no_node_of_an_outbreak_as_healthy() -> None:
    assert _status(_outbreak()).nodes == {"outbreak": 10, "healthy": 30}


def test_node_reason_names_the_outbreak_finding() -> None:
    views = view_context_of(_outbreak())
    ill, well = fleet_views.node_detail(views, "n2").summary, fleet_views.node_detail(views, "n30").summary
    assert ill.reason.startswith("gpu.xid/79 is present on n2: XID 79: GPU has fallen off the bus; not evicted because")
    assert (ill.outbreaks, well.outbreaks) == (("gpu.xid/79",), ())
    assert "outbreak" not in well.reason


def test_nodes_are_filtered_by_outbreak_state() -> None:
    views = view_context_of(_outbreak())

    def names(state: str) -> set[str]:
        return set(fleet_views.find_nodes(views, fleet_views.NodeFilter(state=state)))

    assert names("outbreak") == set(ILL)
    assert not names("healthy") & set(ILL)


def test_status_table_names_the_outbreak() -> None:
    fleet = _outbreak()
    screen = printed(tables.status(_status(fleet)), 160)
    assert "10 outbreak" in screen
    assert "30 healthy" in screen
    assert "since 2 min: gpu.xid/79 is present on 10 of 40 nodes" in screen
    detail = fleet_views.node_detail(view_context_of(fleet), "n2")
    assert "healthy (outbreak)" in printed(tables.node(detail, fleet.now), 160)


def test_metrics_count_outbreaks_and_their_nodes() -> None:
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in prometheus.FleetCollector(view_context_of(_outbreak()), prometheus.Metrics()).collect()
        for sample in family.samples
    }
    assert samples["everstep_controller_nodes", ("outbreak",)] == 10
    assert samples["everstep_controller_nodes", ("healthy",)] == 30
    assert samples["everstep_controller_outbreaks", ()] == 1
    assert samples["everstep_controller_outbreak_nodes", ()] == 10


@pytest.mark.promise("outbreaks-shown")
def test_alert_fires_until_outbreak_ends() -> None:
    fleet = _outbreak()
    (alert,) = _alerts(fleet)
    assert alert.labels == {"alertname": "EverstepOutbreak", "severity": "critical", "finding": "gpu.xid/79"}
    assert alert.since == _status(fleet).outbreaks[0].since
    for node in ILL:
        fleet.clear_finding(node, xid().key)
    assert (_alerts(fleet), _status(fleet).outbreaks) == ([], ())
    assert _status(fleet).nodes == {"healthy": 40}


@pytest.mark.promise("outbreaks-shown")
def test_outbreak_start_survives_restart() -> None:
    fleet = _outbreak()
    before = _status(fleet).outbreaks
    fleet.advance(600.0, *fleet.state.nodes)
    fleet.raise_finding("n1", msgspec.structs.replace(xid(), value=2.0))
    fleet.restart()
    assert _status(fleet).outbreaks == before
