"""A real agent and a real controller, with a metadata service that announces and withdraws a reclaim."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from everstep.bearer_tokens import TokenRole, mint
from everstep.vocabulary import FindingKind, NodeState
from everstep.wire.v1 import operator as op
from tests.support.agents.agent_process import AgentProcess, agent_process
from tests.support.agents.fake_metadata import FakeMetadata, fake_metadata
from tests.support.fleet.controllers import SECRET, VIEWER, ControllerProcess, controller_process
from tests.support.processes.fork_pool import ForkPool
from tests.support.processes.waiting import until

pytestmark = pytest.mark.slow

SPOT = "/latest/meta-data/spot/instance-action"


@pytest.fixture
def controller(program_forks: ForkPool, tmp_path: Path) -> Iterator[ControllerProcess]:
    with controller_process(tmp_path, program_forks) as process:
        yield process


@pytest.fixture
def cloud() -> Iterator[FakeMetadata]:
    with fake_metadata() as service:
        yield service


@pytest.fixture
def agent(controller: ControllerProcess) -> Iterator[AgentProcess]:
    with agent_process(controller.url) as process:
        process.token_file.write_text(mint(SECRET, TokenRole.AGENT, "n1"))
        yield process


def _node(controller: ControllerProcess) -> op.NodeDetail:
    _, body = controller.ask("GET", "/v1/nodes/n1", None, VIEWER)
    return msgspec.json.decode(body, type=op.NodeDetail)


def test_cloud_notice_drains_node_until_withdrawn(
    agent: AgentProcess, controller: ControllerProcess, cloud: FakeMetadata
) -> None:
    options = ("--notices", "aws", "--notices-url", cloud.url, "--notice-poll-s", "0.1")
    agent.start(*options)
    until(lambda: len(cloud.requests) > 3, "the service is read")
    assert _node(controller).summary.state is NodeState.HEALTHY
    cloud.answers[SPOT] = (200, b'{"action": "terminate", "time": "2099-09-18T08:22:00Z"}')
    until(lambda: _node(controller).summary.state is NodeState.HELD, "the node is held")
    agent.end()
    agent.start(*options)
    count = len(cloud.requests)
    until(lambda: len(cloud.requests) > count + 8, "the next agent reads the service")
    node = _node(controller)
    assert (node.summary.state, len(node.verdicts)) == (NodeState.HELD, 0)
    messages = [finding.message for finding in node.findings if finding.kind is FindingKind.NODE_NOTICE]
    assert messages == ["AWS will terminate this spot instance at 2099-09-18T08:22:00Z"]
    del cloud.answers[SPOT]
    until(lambda: _node(controller).summary.state is not NodeState.HELD, "the node returns")
    events = controller.ask("GET", "/v1/events?kind=node.notice", None, VIEWER)[1]
    assert events.count(b"is drained while a notice stands") == 1
