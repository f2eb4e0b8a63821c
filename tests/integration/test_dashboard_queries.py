"""Every query of the dashboard, in a real Prometheus that scrapes a real controller and a real agent."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.peers.run import free_port
from dashboards.build import queries
from everstep.tokens import TokenRole, mint
from examples.demo.world import World, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("prometheus") is None,
        reason="prometheus is not installed (Debian's package has it): the dashboard's queries were not run",
    ),
]

RULES = Path(__file__).parents[2] / "dashboards" / "prometheus" / "everstep.rules.yml"
SILENT_WITHOUT_A_JOB = ("job_", "everstep:job:", "recover", "requests_refused", "verdicts", "xids", "loss")


def configuration(folder: Path, controller: str, agent: str, viewer: Path, agents: Path) -> Path:
    """Prometheus' configuration for one controller and one agent."""
    path = folder / "prometheus.yml"
    path.write_text(
        f"""
global: {{ scrape_interval: 250ms, evaluation_interval: 250ms }}
rule_files: [{RULES}]
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
    with urllib.request.urlopen(url, timeout=10) as answer:
        result: list[object] = json.load(answer)["data"]["result"]
        return result


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[str]:
    """The address of a Prometheus that has scraped both."""
    with World(tmp_path / "out", ["n1"]) as world:
        world.start_controller()
        node = world.nodes["n1"]
        node.boot()
        wait_for(lambda: node.booted, "the agent is up")
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
            yield address
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def scraped(address: str) -> bool:
    try:
        return len(ask(address, "up == 1")) == 2
    except OSError:
        return False


def without_data(address: str) -> list[str]:
    """Queries that give nothing now, though they should."""
    empty = [query for query in queries() if not ask(address, query)]
    return [query for query in empty if not any(word in query for word in SILENT_WITHOUT_A_JOB)]


def test_every_query_is_understood_and_those_that_can_have_data_do(prometheus: str) -> None:
    try:
        wait_for(lambda: not without_data(prometheus), "data for every query", 30)
    except TimeoutError:
        assert without_data(prometheus) == []
