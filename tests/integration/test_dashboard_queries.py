"""Run the dashboard's queries and the alerts in a real Prometheus that scrapes a real controller and a real agent.

Prometheus runs with the scrape file of ``deploy/``; only addresses, token files and intervals are replaced. Beside the
agent's node the controller has a fleet spoken for over HTTP: one run that lost a rank and a node, and one that ended.
"""

from __future__ import annotations

import http.client
import json
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from bench.peers.run import free_port
from dashboards.build import queries
from everstep.bearer_tokens import TokenRole, mint
from examples.demo.world import World, wait_for
from tests.support.controllers import bearer, joined
from tests.support.eventful import EventfulFleet
from tests.support.sessions import Door

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed (Debian's package has it): the dashboard's queries were not run",
    ),
]

ROOT = Path(__file__).parents[2]
SCRAPE = ROOT / "deploy" / "prometheus" / "prometheus.yml"
RULES = ROOT / "dashboards" / "prometheus" / "everstep.rules.yml"
WITHOUT_SERIES = ("xids_total", "job_parity_step", "job_storage_step")
"""XIDs have a series each from the first one on; the two steps exist for runs that ask for parity or storage."""


def configuration(folder: Path, targets: dict[str, str], token_files: dict[str, Path]) -> Path:
    """Write the shipped Prometheus configuration with our targets, and with intervals that suit a test.

    Args:
        folder: where to write.
        targets: the address to scrape, by the scrape file's job name.
        token_files: the token to scrape it with, by the same.
    """
    path, rules = folder / "prometheus.yml", folder / "rules.yml"
    quick = RULES.read_text().replace("interval: 15s", "interval: 500ms").replace("for: 2m", "for: 1s")
    rules.write_text(quick.replace("job_step[1m]", "job_step[3s]"))
    shipped = yaml.safe_load(SCRAPE.read_text())
    shipped["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    shipped["rule_files"] = [str(rules)]
    for scraped in shipped["scrape_configs"]:
        name = scraped["job_name"]
        scraped.pop("dns_sd_configs", None)
        scraped["static_configs"] = [{"targets": [targets[name]]}]
        scraped["authorization"] = {"credentials_file": str(token_files[name])}
    path.write_text(yaml.safe_dump(shipped))
    return path


def ask(address: str, query: str) -> list[dict[str, Any]]:
    """Return the result of an instant query. Raises HTTPError, with Prometheus' complaint, for a bad one."""
    url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=120) as answer:
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return result


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
def scraping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, EventfulFleet]]:
    """The address of a Prometheus that has scraped both, and then sees a fleet live through something."""
    folder = tmp_path_factory.mktemp("prometheus")
    with World(folder / "out", ["n1"]) as world:
        world.start_controller()
        world.boot_nodes()
        node = world.nodes["n1"]
        viewer = folder / "viewer"
        viewer.write_text(mint(world.secret, TokenRole.VIEWER, "prometheus"))
        agent = json.loads((node.folder / "agent.json").read_text())["metrics"]
        targets = {"everstep-controller": world.url.removeprefix("http://"), "everstep-agent": agent}
        tokens = {"everstep-controller": viewer, "everstep-agent": node.folder / "token"}
        config = configuration(folder, targets, tokens)
        address = f"127.0.0.1:{free_port()}"
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        flags += [f"--web.listen-address={address}", "--log.level=error"]
        process = subprocess.Popen(["prometheus", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        door = Door(world.url.removeprefix("http://"))
        try:
            wait_for(lambda: scraped(address), "both targets are scraped")
            fleet = EventfulFleet(lambda *asked: tell(world, *asked), door, world.secret)
            fleet.report("node-6", joined("ended", 1.0))
            operator = bearer(TokenRole.OPERATOR, "olga", world.secret)
            assert tell(world, "POST", "/v1/jobs/ended/stop", {"reason": "it is done"}, operator)[0] == 200
            assert tell(world, "GET", "/v1/status", None, {})[0] == 401
            yield address, fleet
        finally:
            door.close()
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def prometheus(scraping: tuple[str, EventfulFleet]) -> str:
    return scraping[0]


def scraped(address: str) -> bool:
    try:
        return len(ask(address, "up == 1")) == 2
    except OSError:
        return False


def test_stalled_alert_spares_an_ended_run(scraping: tuple[str, EventfulFleet]) -> None:
    """The run that is under way stands still and is paged; the one that ended stands still too, and is not."""
    prometheus, fleet = scraping
    stalled = 'ALERTS{alertname="EverstepJobStalled", alertstate="firing"}'

    def paged() -> bool:
        fleet.beat()
        return bool(ask(prometheus, stalled))

    wait_for(paged, "the run that stands still is paged", 120)
    assert {alert["metric"].get("run") for alert in ask(prometheus, stalled)} == {"llama"}


def test_every_dashboard_query_has_data(prometheus: str) -> None:
    every = queries(run="llama")
    missing = [query for query in every if not any(name in query for name in WITHOUT_SERIES)]

    def drawn() -> bool:
        """Each query need have had data once: a fleet that nobody speaks for any more falls silent."""
        missing[:] = [query for query in missing if not ask(prometheus, query)]
        return not missing

    try:
        wait_for(drawn, "data for every query", 30)
    except TimeoutError:
        assert missing == []
    for query in every:
        ask(prometheus, query)


def test_run_panels_show_only_their_run(prometheus: str) -> None:
    """Each series of a query by run carries the run's name, as its legend and its variable expect."""
    for query in queries(run="llama"):
        if 'run=~"llama"' in query and not query.startswith("sum") and "_step" in query:
            for series in ask(prometheus, query):
                assert series["metric"]["run"] == "llama"


def test_everstep_labels_do_not_clash_with_prometheus(prometheus: str) -> None:
    """Prometheus renames a scraped label that it sets itself to ``exported_...``."""
    assert ask(prometheus, '{__name__=~"everstep_.*", exported_job!=""}') == []
    assert ask(prometheus, '{__name__=~"everstep_.*", exported_instance!=""}') == []
