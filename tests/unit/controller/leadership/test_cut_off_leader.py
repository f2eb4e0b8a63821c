"""A leader that loses only the database: another leads, and the old one learns of it from its agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from everstep.bearer_tokens import TokenRole, mint
from everstep.wire.v1 import operator as op
from tests.support.agents.agent_process import agent_process
from tests.support.fleet.controllers import LONG_SILENCES, SECRET, VIEWER, ControllerProcess
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.services.proxies import Proxy, database_proxy
from tests.support.services.sqlite import create_with_schema

pytestmark = pytest.mark.slow

SETTINGS = "lease_s = 1.5\nlease_renew_s = 0.3\n" + LONG_SILENCES


@contextmanager
def two_controllers(
    forks: ForkPool, directory: Path, database: str, line: Proxy
) -> Iterator[tuple[ControllerProcess, ControllerProcess]]:
    """The first one leads, and reaches the database over ``line``."""
    create_with_schema(database)
    settings = directory / "settings.toml"
    settings.write_text(SETTINGS)
    made = []
    try:
        for name, url in (("a", line.url), ("b", database)):
            (directory / name).mkdir()
            made.append(
                ControllerProcess(directory / name, forks, database=url, arguments=("--settings", str(settings)))
            )
            made[-1].start()
        until(made[0].leads, "the first to lead")
        yield made[0], made[1]
    finally:
        for controller in made:
            controller.end()


def connected(controller: ControllerProcess) -> int:
    status, body = controller.ask("GET", "/v1/status", None, VIEWER)
    return msgspec.json.decode(body, type=op.FleetStatus).connected_nodes if status == 200 else 0


def ready(controller: ControllerProcess) -> tuple[int, dict[str, object]]:
    status, body = controller.ask("GET", "/readyz", None, {})
    return status, json.loads(body)


def node_states(controller: ControllerProcess) -> list[str]:
    return [node["state"] for node in json.loads(controller.ask("GET", "/v1/nodes", None, VIEWER)[1])["nodes"]]


@pytest.mark.promise("cut-off-leader")
def test_leader_cut_off_from_database_steps_down_for_new_one(
    program_forks: ForkPool, tmp_path: Path, postgres: str
) -> None:
    with (
        database_proxy(postgres) as line,
        two_controllers(program_forks, tmp_path, postgres, line) as (old, new),
        agent_process(f"{old.url},{new.url}") as agent,
    ):
        agent.token_file.write_text(mint(SECRET, TokenRole.AGENT, "n1"))
        agent.start()
        until(lambda: connected(old), "the agent's session")
        line.cut()
        until(new.leads, "the other one to lead")
        until(lambda: connected(new), "the agent to come to the new leader")
        until(lambda: ready(old)[0] == 503, "the old one to stand by")
        assert ready(old)[1]["role"] == "standby"
        until(lambda: "stepping down" in old.log(), "the old one to end its writes, and say so")
        assert node_states(new) == ["healthy"]
        line.mend()
        until(lambda: ready(old)[1]["leader"] == new.url, "the old one to see who leads")
