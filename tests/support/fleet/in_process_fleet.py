"""A small fleet that sends messages to a controller in the test's own process."""

from __future__ import annotations

from starlette.testclient import TestClient

from everstep.vocabulary import Action, Finding, FindingKind, Severity
from everstep.wire.v1.training import Resumed
from tests.support.fleet.controllers import AgentClient, joined

FELL_OFF = Finding(
    kind=FindingKind.GPU_XID,
    subject="gpu0",
    severity=Severity.CRITICAL,
    message="XID 79: GPU has fallen off the bus",
    action=Action.REPAIR,
    rule="xid-79",
    source="NVIDIA XID catalogue",
    xid=79,
    trace="bus-79",
)


def fleet(client: TestClient, *nodes: str) -> list[AgentClient]:
    """Register nodes without findings."""
    agents = [AgentClient(client, node) for node in nodes]
    for agent in agents:
        agent.register()
        agent.beat(findings=())
    return agents


def running_job(client: TestClient, *nodes: str, spare: str = "") -> list[AgentClient]:
    """Start job ``j`` over ``nodes`` in generation 1, with stepping ranks."""
    agents = fleet(client, *nodes, *filter(None, [spare]))
    for agent in agents:
        agent.report(joined("j", 1.0, nodes=len(nodes)))
    resume(agents[: len(nodes)], 1)
    return agents


def resume(agents: list[AgentClient], generation: int) -> None:
    """Report the first step of a rank on each node."""
    for rank, agent in enumerate(agents):
        phases = {"rendezvous": 0.01 * (rank + 1), "restore": 0.02}
        agent.report(Resumed(job="j", at=1.0, generation=generation, rank=rank, step=1, restored=None, phases_s=phases))
