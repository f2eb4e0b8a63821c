"""Every query of the dashboard, in a real Prometheus that scrapes a real controller and a real agent.

Beside the agent's node the controller has a fleet that is spoken for, with a job that lost a rank and a node.
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

from bench.peers.run import free_port
from dashboards.build import queries
from everstep.tokens import TokenRole, mint
from examples.demo.world import World, wait_for
from tests.support.eventful import EventfulFleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed (Debian's package has it): the dashboard's queries were not run",
    ),
]

RULES = Path(__file__).parents[2] / "dashboards" / "prometheus" / "everstep.rules.yml"
NOTHING_OF_THE_KIND = ("ignored_total", "xids_total", "job_protected_step", "job_stored_step")
"""What has no series before the first of its kind: counters by label, and jobs that ask for parity or storage."""


def configuration(folder: Path, controller: str, agent: str, viewer: Path, agents: Path) -> Path:
    """Prometheus' configuration for one controller and one agent; rules are looked at twice a second."""
    path, rules = folder / "prometheus.yml", folder / "rules.yml"
    rules.write_text(RULES.read_text().replace("interval: 15s", "interval: 500ms"))
    path.write_text(
        f"""
global: {{ scrape_interval: 250ms, evaluation_interval: 250ms }}
rule_files: [{rules}]
scrape_configs:
  - job_name: everstep-controller
    authorization: {{ credentials_file: {viewer} }}
    static_configs: [{{ targets: ["{controller}"] }}]
  - job_name: everstep-agent
    authorization: {{ credentials_file: {agents} }}
    static_configs: [{{ targets: ["{agent}"] }}]
"""
    )
    return path


def ask(address: str, query: str) -> list[object]:
    """The result of an instant query. Raises HTTPError, with Prometheus' complaint, for a bad one."""
    url = f"http://{address}/api/v1/query?" + urllib.parse.urlencode({"query": query})
    with urllib.request.urlopen(url, timeout=120) as answer:
        result: list[object] = json.load(answer)["data"]["result"]
        return result


def tell(world: World, method: str, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
    """One request to the world's controller."""
    connection = http.client.HTTPConnection(world.url.removeprefix("http://"), timeout=120)
    try:
        connection.request(method, path, None if body is None else msgspec.json.encode(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that has scraped both, and then sees a fleet live through something."""
    with World(tmp_path / "out", ["n1"]) as world:
        world.start_controller()
        world.boot_nodes()
        node = world.nodes["n1"]
        viewer = tmp_path / "viewer"
        viewer.write_text(mint(world.secret, TokenRole.VIEWER, "prometheus"))
        agent = json.loads((node.folder / "agent.json").read_text())["metrics"]
        config = configuration(tmp_path, world.url.removeprefix("http://"), agent, viewer, node.folder / "token")
        address = f"127.0.0.1:{free_port()}"
        flags = [f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'data'}"]
        flags += [f"--web.listen-address={address}", "--log.level=error"]
        process = subprocess.Popen(["prometheus", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(lambda: scraped(address), "both targets are scraped")
            EventfulFleet(lambda *asked: tell(world, *asked), world.secret)
            assert tell(world, "GET", "/v1/status", None, {})[0] == 401
            yield address
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def scraped(address: str) -> bool:
    try:
        return len(ask(address, "up == 1")) == 2
    except OSError:
        return False


def test_every_query_is_understood_and_has_data(prometheus: str) -> None:
    missing = [query for query in queries() if not any(name in query for name in NOTHING_OF_THE_KIND)]

    def drawn() -> bool:
        """Each query need have had data once: a fleet that nobody speaks for any more falls silent."""
        missing[:] = [query for query in missing if not ask(prometheus, query)]
        return not missing

    try:
        wait_for(drawn, "data for every query", 30)
    except TimeoutError:
        assert missing == []
    for query in queries():
        ask(prometheus, query)
