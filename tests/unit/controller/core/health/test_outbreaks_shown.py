"""What people are shown of an outbreak that stands."""

from __future__ import annotations

import msgspec
import pytest
from everstep_controller.core.policy import CorePolicy
from everstep_controller.read_models import fleet_views, prometheus
from everstep_controller.remediation.alerts import Alert, active_alerts

from everstep.cli import tables
from everstep.vocabulary import NodeState
from everstep.wire.v1 import operator as op
from tests.support.core_fleet import CoreFleet
from tests.support.findings import xid
from tests.support.printed import printed
from tests.support.shown import desk_of

ILL = [f"n{number}" for number in range(1, 11)]


def _outbreak(nodes: int = 40, **knobs: object) -> CoreFleet:
    """XID 79 on ten nodes of forty, 130 s ago."""
    fleet = CoreFleet(msgspec.structs.replace(CorePolicy(), probe_required=False, **knobs))
    fleet.register(*(f"n{number}" for number in range(1, nodes + 1)))
    for node in ILL:
        fleet.raise_finding(node, xid())
    fleet.advance(130.0, *fleet.state.nodes)
    return fleet


def _status(fleet: CoreFleet) -> op.FleetStatus:
    return fleet_views.fleet_status(desk_of(fleet), ())


def _alerts(fleet: CoreFleet) -> list[Alert]:
    return [one for one in active_alerts(fleet.state, fleet.now) if one.labels["alertname"] == "EverstepOutbreak"]


@pytest.mark.promise("outbreaks-shown")
def test_status_names_a_standing_outbreak() -> None:
    fleet = _outbreak()
    (one,) = _status(fleet).outbreaks
    assert (one.finding, one.rule, one.count, set(one.nodes)) == ("gpu.xid/79", "gpu.xid", 10, set(ILL))
    assert 130.0 <= fleet.now - one.since < 140.0
    assert one.sentence.startswith("gpu.xid/79 is present on 10 of 40 nodes (")
    assert "no node is evicted for it" in one.sentence
    assert "everstep node evict" in one.advice
    assert "every 120 s" in one.advice


@pytest.mark.promise("outbreaks-shown")
def test_status_counts_no_node_of_an_outbreak_as_healthy() -> None:
    assert _status(_outbreak()).nodes == {"outbreak": 10, "healthy": 30}


def test_node_reason_names_the_outbreak_finding() -> None:
    desk = desk_of(_outbreak())
    ill, well = fleet_views.node_detail(desk, "n2").summary, fleet_views.node_detail(desk, "n30").summary
    assert ill.reason.startswith("gpu.xid/79 is present on n2: XID 79: GPU has fallen off the bus; not evicted because")
    assert (ill.outbreaks, well.outbreaks) == (("gpu.xid/79",), ())
    assert "outbreak" not in well.reason


def test_nodes_are_filtered_by_outbreak_state() -> None:
    desk = desk_of(_outbreak())

    def names(state: str) -> set[str]:
        return set(fleet_views.find_nodes(desk, fleet_views.NodeFilter(state=state)))

    assert names("outbreak") == set(ILL)
    assert not names("healthy") & set(ILL)


def test_status_table_names_the_outbreak() -> None:
    fleet = _outbreak()
    screen = printed(tables.status(_status(fleet)), 160)
    assert "10 outbreak" in screen
    assert "30 healthy" in screen
    assert "since 2 min: gpu.xid/79 is present on 10 of 40 nodes" in screen
    detail = fleet_views.node_detail(desk_of(fleet), "n2")
    assert "healthy (outbreak)" in printed(tables.node(detail, fleet.now), 160)


def test_metrics_count_outbreaks_and_their_nodes() -> None:
    samples = {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in prometheus.FleetCollector(desk_of(_outbreak()), prometheus.Metrics()).collect()
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


def test_later_outbreak_has_its_own_start() -> None:
    fleet = _outbreak()
    for node in ILL:
        fleet.clear_finding(node, xid().key)
    fleet.advance(3600.0, *fleet.state.nodes)
    again = fleet.now
    for node in ILL:
        fleet.raise_finding(node, xid())
    (one,) = _status(fleet).outbreaks
    assert one.since >= again


def test_returning_node_sentence_names_the_outbreak() -> None:
    fleet = _outbreak()
    evicted = fleet.state.nodes["n1"]
    assert evicted.state is NodeState.HEALTHY
    assert evicted.sentence.endswith("it is in service although it still shows gpu.xid/79, because that is an outbreak")
