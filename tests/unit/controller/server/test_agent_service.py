from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.bearer_tokens import TokenRole
from everstep.vocabulary import Finding, FindingKind, Severity
from everstep.wire.v1 import operator as op
from everstep.wire.v1.agent import MAX_FINDINGS, Register
from everstep.wire.v1.directives import NewGeneration
from everstep.wire.v1.training import RankLost, RankProgress
from everstep_controller.core import engine
from everstep_controller.core.events import ReportArrived
from tests.support.fleet.controllers import (
    OPERATOR,
    VIEWER,
    AgentClient,
    InProcess,
    Refused,
    bearer,
    get,
    joined,
    registration,
)

WARNING = Finding(kind=FindingKind.HOST_DISK, subject="/", severity=Severity.WARNING, message="90 % full")


@pytest.fixture
def served(tmp_path: Path) -> InProcess:
    return InProcess(f"sqlite:///{tmp_path / 'c.db'}")


@pytest.fixture
def client(served: InProcess) -> Iterator[TestClient]:
    with TestClient(served) as client:
        yield client


def test_heartbeat_without_change_writes_nothing(served: InProcess, client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register()
    agent.beat(findings=())
    assert served.controller is not None
    commits = served.controller.metrics.registry.get_sample_value("everstep_controller_commit_seconds_count")
    for _ in range(5):
        assert agent.beat().resend is False
    after = served.controller.metrics.registry.get_sample_value("everstep_controller_commit_seconds_count")
    assert after == commits
    assert served.controller.metrics.registry.get_sample_value("everstep_controller_heartbeats_total") == 6.0


def test_heartbeat_finding_is_durable_when_answered(served: InProcess, client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register()
    agent.beat(findings=(WARNING,))
    detail = get(client, "/v1/nodes/n1", op.NodeDetail)
    assert [finding.kind for finding in detail.findings] == [FindingKind.HOST_DISK]
    assert detail.summary.findings == 1


@pytest.mark.promise("bounded-node")
def test_heartbeat_with_too_many_findings_is_refused(client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register()
    agent.beat(findings=(WARNING,))
    many = tuple(msgspec.structs.replace(WARNING, subject=f"/mnt/{number}") for number in range(MAX_FINDINGS + 1))
    with pytest.raises(Refused, match=f"length <= {MAX_FINDINGS}"):
        agent.beat(findings=many)
    assert len(get(client, "/v1/nodes/n1", op.NodeDetail).findings) == 1
    agent.beat(findings=many[1:])
    assert len(get(client, "/v1/nodes/n1", op.NodeDetail).findings) == MAX_FINDINGS


def test_registration_with_too_many_findings_is_refused(client: TestClient) -> None:
    many = tuple(msgspec.structs.replace(WARNING, subject=f"/mnt/{number}") for number in range(MAX_FINDINGS + 1))
    with pytest.raises(Refused, match=f"length <= {MAX_FINDINGS}"):
        AgentClient(client, "n1").register(findings=many)
    assert get(client, "/v1/nodes", op.NodeList).nodes == ()


def test_restarted_controller_requests_findings_once(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'c.db'}"
    with TestClient(InProcess(database)) as client:
        AgentClient(client, "n1").register(findings=(WARNING,))
    with TestClient(InProcess(database)) as client:
        agent = AgentClient(client, "n1")
        assert get(client, "/v1/nodes/n1", op.NodeDetail).findings[0].kind == FindingKind.HOST_DISK
        assert agent.beat().resend is True
        assert agent.beat(findings=()).resend is False
        assert agent.beat().resend is False


@pytest.mark.promise("failover-rejoin")
def test_heartbeat_after_restart_keeps_node_in_roster(
    tmp_path: Path,
) -> None:
    database = f"sqlite:///{tmp_path / 'c.db'}"
    with TestClient(InProcess(database)) as client:
        for node in ("n1", "n2"):
            agent = AgentClient(client, node)
            agent.register()
            agent.report(joined("j", 1.0, nodes=2))
    with TestClient(InProcess(database)) as client:
        agents = [AgentClient(client, node) for node in ("n1", "n2")]
        assert all(agent.beat().resend for agent in agents)
        lost = RankLost(job="j", at=2.0, generation=1, rank=0, local_rank=0, has_replacement=True, detail="")
        agents[0].report(lost, first=2)
        job = get(client, "/v1/jobs/j", op.JobDetail)
        assert job.summary.generation == 2
        assert {member.node for member in job.roster} == {"n1", "n2"}


@pytest.mark.parametrize("findings", [None, ()])
def test_heartbeat_with_unknown_launcher_is_refused(tmp_path: Path, findings: tuple[Finding, ...] | None) -> None:
    database = f"sqlite:///{tmp_path / 'c.db'}"
    with TestClient(InProcess(database)) as client:
        agent = AgentClient(client, "n1")
        agent.register()
        agent.report(joined("j", 1.0))
    with TestClient(InProcess(database)) as client:
        agent = AgentClient(client, "n1")
        for stranger in (("other", 1), ("j", 2)):
            ranks = (RankProgress(job=stranger[0], generation=stranger[1], rank=0, step=1, step_s=0.1),)
            with pytest.raises(
                Refused, match=f"the launcher of job {stranger[0]} on node n1 is unknown to this controller"
            ):
                agent.beat(ranks=ranks, findings=findings)
        known = (RankProgress(job="j", generation=1, rank=0, step=1, step_s=0.1),)
        assert agent.beat(ranks=known, findings=findings).resend is (findings is None)


def test_repeated_registration_keeps_directives(client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register()
    agent.report(joined("j", 1.0))
    agent.register()
    assert [type(directive.body) for directive in agent.directives()] == [NewGeneration]


def test_poisonous_report_alone_is_dropped_after_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = engine.handle

    def with_an_error(state: Any, event: Any, now: float) -> Any:
        if isinstance(event, ReportArrived) and getattr(event.body, "job", "") == "poison":
            raise ZeroDivisionError("an error of our own")
        return handle(state, event, now)

    monkeypatch.setattr("everstep_controller.runtime.transaction.engine.handle", with_an_error)
    database = f"sqlite:///{tmp_path / 'c.db'}"
    batch = (joined("before", 1.0), joined("poison", 1.0), joined("after", 1.0))
    first = InProcess(database)
    with TestClient(first) as client:
        agent = AgentClient(client, "n1")
        agent.register()
        assert refusal(agent.report, *batch).code == "unavailable"
        assert first.controller is not None
        assert first.controller.loop_task is not None
        assert isinstance(first.controller.loop_task.exception(), ZeroDivisionError)
        assert client.get("/readyz").status_code == 503
    with TestClient(InProcess(database)) as client:
        again = AgentClient(client, "n1")
        assert again.report(*batch).through == 3
        assert {job.job for job in get(client, "/v1/jobs", op.JobList).jobs} == {"before", "after"}
        (event,) = [
            event
            for event in get(client, "/v1/events", op.EventList).events
            if event.kind == "controller.report_dropped"
        ]
        assert "report 2 (LauncherJoined) of n1" in event.sentence


def refusal(call: Any, *arguments: Any, **fields: Any) -> Refused:
    with pytest.raises(Refused) as caught:
        call(*arguments, **fields)
    return caught.value


@pytest.mark.promise("strangers")
@pytest.mark.parametrize(
    ("headers", "status", "says"),
    [
        ({}, 401, "everstep-controller token"),
        ({"Authorization": "Basic abc"}, 401, "must be `Bearer TOKEN`"),
        ({"Authorization": "Bearer agent:n1:0000"}, 401, "minted under another secret"),
        ({"Authorization": "Bearer \xff"}, 401, "mint it again with `everstep-controller token`"),
        (bearer(TokenRole.AGENT, "n1", b"another secret, long enough"), 401, "minted under another secret"),
        (bearer(TokenRole.AGENT, "n2"), 403, "belongs to node n2 and cannot act for node n1"),
        (VIEWER, 403, "a viewer token does not allow this: it needs the token of the node's agent"),
        (OPERATOR, 403, "an operator token does not allow this"),
    ],
)
def test_agent_service_accepts_only_the_agent_of_the_node(
    client: TestClient, headers: dict[str, str], status: int, says: str
) -> None:
    agent = AgentClient(client, "n1")
    agent.headers = headers
    refused = refusal(agent.register)
    assert refused.status == status
    assert says in refused.message
    assert get(client, "/v1/nodes", op.NodeList).nodes == ()


def test_other_protocol_version_is_refused_first(client: TestClient) -> None:
    body = {**msgspec.to_builtins(registration("n1")), "protocols": [7, 8], "from_the_future": True}
    refused = refusal(AgentClient(client, "n1").send_bytes, Register, msgspec.json.encode(body))
    assert (refused.status, refused.code) == (426, "protocol_version")
    assert "offered [7, 8], spoken here [1]; upgrade this side" in refused.message


def test_registration_of_another_node_is_refused(client: TestClient) -> None:
    refused = refusal(AgentClient(client, "n1").send, registration("n2"))
    assert refused.status == 422
    assert "the body is about node n2, the path about node n1" in refused.message


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "truncated?"),
        (msgspec.json.encode(registration("n1"))[:-20], "truncated?"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"protocols":[1],"node":"n1","incarnation":-1,"agent_version":"x","vault":"h:1"}', "`$.incarnation`"),
        (b'{"protocols":[1],"node":"n1","agent_version":"x","vault":"h:1"}', "missing required field `incarnation`"),
        (b"[]", "Expected `object`"),
    ],
)
def test_malformed_body_is_refused_with_position(client: TestClient, body: bytes, says: str) -> None:
    refused = refusal(AgentClient(client, "n1").send_bytes, Register, body)
    assert (refused.status, refused.code) == (422, "malformed")
    assert says in refused.message


@pytest.mark.promise("mixed-versions")
def test_unknown_fields_of_newer_agent_are_ignored(client: TestClient) -> None:
    body = {**msgspec.to_builtins(registration("n1")), "mood": "fine", "host": {"vendor": "ACME", "colour": "blue"}}
    AgentClient(client, "n1").send_bytes(Register, msgspec.json.encode(body))
    assert client.get("/v1/nodes/n1", headers=bearer(TokenRole.VIEWER, "eve")).json()["host"]["vendor"] == "ACME"


def test_too_many_reports_in_one_message_are_refused(client: TestClient) -> None:
    agent = AgentClient(client, "n1")
    agent.register()
    refused = refusal(agent.report, *[joined("j", 1.0)] * 1025)
    assert (refused.status, refused.code) == (422, "malformed")


@pytest.mark.promise("stale-refused")
@pytest.mark.parametrize("incarnation", [1, 3])
def test_messages_of_other_incarnation_are_refused(client: TestClient, incarnation: int) -> None:
    AgentClient(client, "n1", incarnation=2).register()
    other = AgentClient(client, "n1", incarnation=incarnation)
    expected = (409, "stale") if incarnation < 2 else (404, "not_found")
    for call in (other.beat, lambda: other.beat(findings=()), lambda: other.report(joined("j", 1.0)), other.directives):
        refused = refusal(call)
        assert (refused.status, refused.code) == expected
    assert get(client, "/v1/jobs", op.JobList).jobs == ()


def test_earlier_incarnation_cannot_register(client: TestClient) -> None:
    AgentClient(client, "n1", incarnation=2).register()
    refused = refusal(AgentClient(client, "n1", incarnation=1).register)
    assert (refused.status, refused.code) == (409, "stale")
    assert get(client, "/v1/nodes/n1", op.NodeDetail).incarnation == 2


def test_unregistered_node_is_asked_to_register(client: TestClient) -> None:
    stranger = AgentClient(client, "n1")
    for call in (stranger.beat, lambda: stranger.report(joined("j", 1.0)), stranger.directives):
        refused = refusal(call)
        assert refused.status == 404
        assert "register first" in refused.message
