"""Run the dashboards' queries and the alerts in a real Prometheus that scrapes a real controller and a real agent.

Beside the agent's node the controller has a fleet spoken for over HTTP: one run that lost a rank and a node, and one
that ended. ``test_dashboards_with_faults.py`` asks whether every query has data.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from dashboards.build import queries
from everstep.bearer_tokens import TokenRole, mint
from examples.demo.world import World, wait_for
from tests.support.fleet.controllers import bearer, joined
from tests.support.fleet.fleet_with_faults import FleetWithFaults
from tests.support.fleet.session_client import SessionPool
from tests.support.processes.warm_programs import WarmWorld
from tests.support.services.prometheus import Prometheus, needs_prometheus

pytestmark = [pytest.mark.slow, needs_prometheus]


def tell(world: World, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send one request to the world's controller."""
    connection = http.client.HTTPConnection(world.url.removeprefix("http://"), timeout=120)
    try:
        connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def scraping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Prometheus, FleetWithFaults]]:
    """A Prometheus that has scraped both, and then sees a fleet live through something."""
    folder = tmp_path_factory.mktemp("prometheus")
    with WarmWorld(folder / "out", ["n1"]) as world:
        world.start_controller()
        world.boot_nodes()
        node = world.nodes["n1"]
        viewer = folder / "viewer"
        viewer.write_text(mint(world.secret, TokenRole.VIEWER, "prometheus"))
        agent = json.loads((node.folder / "agent.json").read_text())["metrics"]
        targets = {"everstep-controller": [world.url.removeprefix("http://")], "everstep-agent": [agent]}
        tokens = {"everstep-controller": viewer, "everstep-agent": node.folder / "token"}
        door = SessionPool(world.url.removeprefix("http://"))
        with Prometheus(folder, targets, tokens) as prometheus:
            try:
                wait_for(prometheus.has_scraped, "both targets are scraped")
                fleet = FleetWithFaults(lambda *asked: tell(world, *asked), door, world.secret)
                fleet.report("node-6", joined("ended", 1.0))
                operator = bearer(TokenRole.OPERATOR, "olga", world.secret)
                assert tell(world, "POST", "/v1/jobs/ended/stop", {"reason": "it is done"}, operator)[0] == 200
                assert tell(world, "GET", "/v1/status", None, {})[0] == 401
                yield prometheus, fleet
            finally:
                door.close()


@pytest.fixture
def prometheus(scraping: tuple[Prometheus, FleetWithFaults]) -> Prometheus:
    return scraping[0]


def test_stalled_alert_spares_an_ended_run(scraping: tuple[Prometheus, FleetWithFaults]) -> None:
    """The run that is under way stands still and is paged; the one that ended stands still too, and is not."""
    prometheus, fleet = scraping
    stalled = 'ALERTS{alertname="EverstepJobStalled", alertstate="firing"}'

    def paged() -> bool:
        fleet.beat()
        return bool(prometheus.ask(stalled))

    wait_for(paged, "the run that stands still is paged", 120)
    assert {alert["metric"].get("run") for alert in prometheus.ask(stalled)} == {"llama"}


def test_run_panels_show_only_their_run(prometheus: Prometheus) -> None:
    """Each series of a query by run carries the run's name, as its legend and its variable expect."""
    for query in queries(run="llama"):
        if 'run=~"llama"' in query and not query.startswith("sum") and "_step" in query:
            for series in prometheus.ask(query):
                assert series["metric"]["run"] == "llama"


def test_everstep_labels_do_not_clash_with_prometheus(prometheus: Prometheus) -> None:
    """Prometheus renames a scraped label that it sets itself to ``exported_...``."""
    assert prometheus.ask('{__name__=~"everstep_.*", exported_job!=""}') == []
    assert prometheus.ask('{__name__=~"everstep_.*", exported_instance!=""}') == []
