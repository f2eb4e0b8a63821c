"""Every query of every dashboard has data in a real Prometheus, while a real run lives through faults.

Four nodes with virtual GPUs train a sharded model with parity and storage. A rank is killed, a GPU throttles and loses
an NVLink, and another falls off the bus. A query need have had data once: some faults clear by themselves.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dashboards.build import DASHBOARDS, filled_in
from dashboards.panels import Kind
from everstep.bearer_tokens import TokenRole, mint
from everstep.errors import NotFound
from everstep.vocabulary import NodeState
from examples.demo.world import Node, wait_for
from tests.integration.checkpoints.sharded_job import JOB, NODES, ShardedJob
from tests.support.processes.warm_programs import WarmWorld
from tests.support.services.prometheus import Prometheus, needs_prometheus

pytestmark = [pytest.mark.slow, needs_prometheus, pytest.mark.timeout(400)]

C = "everstep_controller_"
DEADLINE_S = 180.0
RANGE_S = 300
THROTTLED = {"throttle_reasons": 0x8 | 0x40, "sm_clock_mhz": 600, "nvlinks_down": 1}
"""NVML's bits for a hardware slowdown, and for a thermal one."""


class Scene:
    """The job, its nodes, and the Prometheus that scrapes them."""

    def __init__(self, job: ShardedJob, prometheus: Prometheus) -> None:
        self.job = job
        self.prometheus = prometheus

    def node_state(self, node: Node) -> NodeState:
        return self.job.client.node(node.name).summary.state

    def kill_rank(self, node: Node) -> None:
        """Send SIGKILL to the newest rank of the node; its log has the pid."""
        logs = sorted(self.job.world.steps.glob(f"{node.name}-*.jsonl"), key=lambda path: path.stat().st_mtime)
        os.kill(int(logs[-1].stem.rpartition("-")[2]), signal.SIGKILL)

    def one(self, query: str) -> float:
        """Return the value of a query with one series; 0 while it has none."""
        found = self.prometheus.ask(query)
        return float(found[0]["value"][1]) if found else 0.0


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    folder = tmp_path_factory.mktemp("dashboards")
    storage = ("--spill-to", str(folder / "storage"), "--spill-every", "5")
    with WarmWorld(folder / "out", NODES) as world:
        options = ("--parity-group-size", "2", *storage)
        job = ShardedJob(world, 64, 96, 64, options=options, script="tests.integration.fleet.observed_training")
        viewer = folder / "viewer"
        viewer.write_text(mint(world.secret, TokenRole.VIEWER, "prometheus"))
        agents = [json.loads((node.folder / "agent.json").read_text())["metrics"] for node in world.nodes.values()]
        targets = {"everstep-controller": [world.url.removeprefix("http://")], "everstep-agent": agents}
        for node in world.nodes.values():
            (node.folder / "token").write_text(mint(world.secret, TokenRole.VIEWER, "prometheus"))
        with Prometheus(folder, targets, dict.fromkeys(targets, viewer), hold="0s") as prometheus:
            wait_for(prometheus.has_scraped, "all targets are scraped", DEADLINE_S)
            made = Scene(job, prometheus)
            live_through_faults(made)
            yield made


def live_through_faults(scene: Scene) -> None:
    world = scene.job.world
    wait_for(lambda: scene.one(f'{C}job_parity_step{{run="{JOB}"}}') > 0, "a version under parity", DEADLINE_S)
    wait_for(lambda: scene.one(f'{C}job_storage_step{{run="{JOB}"}}') > 0, "a version on storage", DEADLINE_S)
    scene.kill_rank(world.nodes["n2"])
    wait_for(lambda: scene.one(f'sum({C}recoveries_total{{run="{JOB}"}})') >= 1, "a recovery", DEADLINE_S)
    world.nodes["n3"].set_gpu(**THROTTLED)
    world.nodes["n4"].set_gpu(xid=79)
    wait_for(lambda: scene.node_state(world.nodes["n4"]) is not NodeState.HEALTHY, "n4 is evicted", DEADLINE_S)
    with suppress(NotFound):
        scene.job.client.node("unknown")


def queries_by_panel() -> dict[str, Kind]:
    """Return every query with the kind of its panel."""
    values = {"run": JOB, "__range": f"{RANGE_S}s", "__rate_interval": "10s"}
    return {
        filled_in(query, **values): panel.kind
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for query, _ in panel.queries
    }


def test_every_query_has_data_while_faults_happen(scene: Scene) -> None:
    missing = queries_by_panel()

    def all_have_data() -> bool:
        for query, kind in list(missing.items()):
            with_time = kind == "timeseries"
            if scene.prometheus.ask_range(query, RANGE_S) if with_time else scene.prometheus.ask(query):
                del missing[query]
        return not missing

    with suppress(TimeoutError):
        wait_for(all_have_data, "data for every query", 60)
    assert list(missing) == []


def test_table_names_the_node_the_rule_and_the_time(scene: Scene) -> None:
    unfit = f'{C}node_unfit_since_timestamp_seconds{{node="n4"}}'
    wait_for(lambda: bool(scene.prometheus.ask(unfit)), unfit, 30)  # the next scrape
    (found,) = scene.prometheus.ask(unfit)
    labels = found["metric"]
    assert (labels["rack"], labels["rule"]) == ("rack-n4", "gpu.xid")
    assert "79" in labels["reason"]
    assert 0 <= scene.one(f'time() - {C}node_unfit_since_timestamp_seconds{{node="n4"}}') < DEADLINE_S


@pytest.mark.parametrize(
    "query",
    [
        'everstep:gpu:xids_last_hour{node="n4", xid="79"} >= 1',
        'everstep_gpu_throttled_gpus{node="n3", reason="hardware_thermal"} == 1',
        'everstep_gpu_nvlinks_down{node="n3"} == 1',
        f'sum({C}job_recovery_phase_seconds{{run="{JOB}"}}) > 0',
        f'sum({C}recoveries_total{{run="{JOB}"}}) >= 1',
        f'0 < everstep:job:effective_share{{run="{JOB}"}} <= 1',
        f'rate({C}job_committed_bytes_total{{run="{JOB}"}}[1m]) > 0',
        f'count({C}job_rank_lateness_seconds{{run="{JOB}"}}) >= 2',
        f'{C}rack_unfit_nodes{{rack="rack-n4"}} == 1',
        'everstep_port_rate_bits_per_second{node="n1", kind="infiniband"} == 400e9',
        'ALERTS{alertname="EverstepNeedsPerson", alertstate="firing", node="n4", finding="gpu.xid/79", gpu!=""}',
    ],
)
def test_faults_show_where_people_look(scene: Scene, query: str) -> None:
    wait_for(lambda: bool(scene.prometheus.ask(query)), query, 30)
