"""A leader that reaches the database but no nodes resigns in favour of the controller that they reach."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import msgspec
import pytest

from everstep.bearer_tokens import TokenRole, mint
from everstep.wire.v1 import operator as op
from tests.support.agents.agent_process import AgentProcess, agent_process
from tests.support.fleet.controllers import LONG_SILENCES, SECRET, VIEWER, ControllerProcess
from tests.support.fleet.report_stream import events
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until
from tests.support.services.proxies import Proxy, controller_proxy
from tests.support.services.sqlite import create_with_schema

pytestmark = pytest.mark.slow

SETTINGS = "lease_s = 1.5\nlease_renew_s = 0.3\nresign_after_s = 2.0\n" + LONG_SILENCES


class Pair:
    """Two controllers over one database, of which the first leads, and a line to each."""

    def __init__(self, forks: ForkPool, directory: Path, database: str, stack: ExitStack) -> None:
        create_with_schema(database)
        settings = directory / "settings.toml"
        settings.write_text(SETTINGS)
        self.controllers: list[ControllerProcess] = []
        self.lines: list[Proxy] = []
        for name in "ab":
            (directory / name).mkdir()
            arguments = ("--settings", str(settings))
            controller = ControllerProcess(directory / name, forks, database=database, arguments=arguments)
            stack.callback(controller.end)
            self.controllers.append(controller.start())
            self.lines.append(stack.enter_context(controller_proxy(partial(getattr, controller, "listen"))))
            until(self.controllers[0].leads, "the first to lead")

    def agent(self, node: str, stack: ExitStack, *lines: Proxy) -> AgentProcess:
        """An agent of ``node``, over these lines or both."""
        urls = ",".join(line.url for line in lines or self.lines)
        agent = stack.enter_context(agent_process(urls, node))
        agent.token_file.write_text(mint(SECRET, TokenRole.AGENT, node))
        agent.start("--answer-timeout-s", "1")
        return agent


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def pair(program_forks: ForkPool, tmp_path: Path, postgres: str, stack: ExitStack) -> Pair:
    return Pair(program_forks, tmp_path, postgres, stack)


def connected(controller: ControllerProcess) -> int:
    status, body = controller.ask("GET", "/v1/status", None, VIEWER)
    return msgspec.json.decode(body, type=op.FleetStatus).connected_nodes if status == 200 else 0


def metric(controller: ControllerProcess, name: str) -> float:
    text = controller.ask("GET", "/metrics", None, VIEWER)[1].decode()
    return float(next(line for line in text.splitlines() if line.startswith(f"everstep_controller_{name} ")).split()[1])


@pytest.mark.promise("unreachable-leader")
def test_leader_unreachable_by_nodes_resigns_to_their_standby(pair: Pair, stack: ExitStack) -> None:
    (old, new), (line, _other) = pair.controllers, pair.lines
    for node in ("n1", "n2"):
        pair.agent(node, stack)
    until(lambda: connected(old) == 2, "the agents' sessions")
    line.cut()
    until(lambda: metric(new, "standby_persistent_nodes") == 2 or new.leads(), "the agents to insist on the other one")
    until(new.leads, "the other one to lead")
    until(lambda: connected(new) == 2, "the agents to come to it")
    until(lambda: json.loads(old.ask("GET", "/readyz", None, {})[1]).get("leader") == new.url, "the old one to see it")
    assert "stepping down: for" in old.log()
    (resigned,) = events(new, "controller.resigned")
    assert f" kept contacting standby {new.listen} while this leader received messages from none" in resigned.sentence
    assert [events(new, kind) for kind in ("node.suspect", "node.lost", "verdict.evict")] == [[], [], []]
    until(lambda: metric(new, "leader_resignations") == 1.0, "the number of leaders that resigned")
    line.mend()
    assert new.leads()
    assert (metric(old, "leader"), metric(old, "standby_persistent_nodes")) == (0.0, 0.0)


@pytest.mark.promise("unreachable-leader")
def test_split_fleet_keeps_leader_and_is_reported(pair: Pair, stack: ExitStack) -> None:
    (leader, standby), (line, other) = pair.controllers, pair.lines
    pair.agent("n1", stack, line)
    pair.agent("n2", stack, other)
    until(lambda: connected(leader) == 1, "the session of the half that reaches it")
    until(lambda: events(leader, "controller.partition_suspected"), "the split to be told")
    until(
        lambda: metric(leader, "nodes_contacting_standby") == metric(standby, "standby_persistent_nodes") == 1.0,
        "the metrics to tell of it",
    )
    assert leader.leads()
    assert events(leader, "controller.resigned") == []
