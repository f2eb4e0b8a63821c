from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.bearer_tokens import TokenRole
from everstep.vocabulary import Decision, JobState, NodeState, Verdict
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.training import FindingRaised, UserError
from everstep_controller.api.routes import OPERATOR_ROUTES as OPERATOR_ROUTES
from everstep_controller.core.policy import CorePolicy
from tests.support.fleet.controllers import (
    OPERATOR,
    VIEWER,
    InProcess,
    Refused,
    bearer,
    get,
    post,
)
from tests.support.fleet.in_process_fleet import FELL_OFF, fleet, running_job

BECAUSE = op.ReasonOnlyRequest(reason="a smell of smoke")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as client:
        yield client


def test_events_are_found_by_trace(client: TestClient) -> None:
    agents = running_job(client, "n1", "n2", spare="n3")
    agents[0].report(FindingRaised(finding=FELL_OFF))
    kinds = [event.kind for event in get(client, "/v1/events?trace=bus-79", op.EventList).events]
    assert kinds[0] == "finding"
    assert "verdict.evict" in kinds
    assert "generation" in kinds


@pytest.mark.promise("eviction-evidence")
def test_verdict_is_shown_with_its_evidence(client: TestClient) -> None:
    agents = running_job(client, "n1", "n2", spare="n3")
    agents[0].report(FindingRaised(finding=FELL_OFF))
    (verdict,) = get(client, "/v1/nodes/n1", op.NodeDetail).verdicts
    assert get(client, f"/v1/verdicts/{verdict.id}", Verdict) == verdict
    assert (verdict.decision, verdict.evidence[0].xid) == (Decision.EVICT, 79)

    assert get(client, "/v1/nodes/n1", op.NodeDetail).summary.state is NodeState.QUARANTINED
    assert 'everstep_controller_verdicts_total{decision="evict"} 1.0' in client.get("/metrics", headers=VIEWER).text


def test_order_is_executed_and_logged_with_operator_name(client: TestClient) -> None:
    fleet(client, "n1")
    changed = post(client, "/v1/nodes/n1/hold", BECAUSE, op.ChangeResult)
    assert changed.sentence == "olga ordered to hold n1: a smell of smoke"
    assert get(client, "/v1/nodes/n1", op.NodeDetail).summary.state is NodeState.HELD
    (event,) = get(client, f"/v1/events?trace={changed.trace}", op.EventList).events
    assert (event.kind, event.node, event.detail["actor"]) == ("operator.hold", "n1", "olga")
    post(client, "/v1/nodes/n1/readmit", BECAUSE, op.ChangeResult)
    assert get(client, "/v1/nodes/n1", op.NodeDetail).summary.state is NodeState.HEALTHY


@pytest.mark.parametrize(
    ("order", "state"), [("drain", "held"), ("evict", "quarantined"), ("repair", "repair"), ("hold", "held")]
)
def test_node_order_sets_node_state(client: TestClient, order: str, state: str) -> None:
    fleet(client, "n1")
    post(client, f"/v1/nodes/n1/{order}", BECAUSE, op.ChangeResult)
    assert get(client, "/v1/nodes/n1", op.NodeDetail).summary.state == state


def test_stopped_job_ends_and_notifies_its_nodes(client: TestClient) -> None:
    (node_agent,) = running_job(client, "n1")
    post(client, "/v1/jobs/j/stop", BECAUSE, op.ChangeResult)
    assert [type(directive.body).__name__ for directive in node_agent.directives()][-1] == "StopJob"
    assert get(client, "/v1/status", op.FleetStatus).jobs == ()
    refused = refusal(client, "/v1/jobs/j/stop", BECAUSE)
    assert (refused.status, refused.code) == (409, "conflict")


def refusal(client: TestClient, path: str, body: object, headers: dict[str, str] = OPERATOR) -> Refused:
    with pytest.raises(Refused) as caught:
        post(client, path, body, op.ChangeResult, headers)
    return caught.value


def test_viewer_responses_never_contain_job_secret(client: TestClient) -> None:
    (node_agent,) = running_job(client, "n1")
    secret = node_agent.directives()[0].body.spec.secret  # type: ignore[union-attr]
    paths = ["/v1/status", "/v1/nodes", "/v1/nodes/n1", "/v1/jobs", "/v1/jobs/j", "/v1/generations", "/v1/events"]
    for path in [*paths, "/metrics"]:
        response = client.get(path, headers=VIEWER)
        assert response.status_code == 200
        assert secret not in response.text


_NAMES = {"{node}": "n1", "{job}": "j", "{verdict}": "n1-1", "{probe}": "probe-1", "{order}": "hold"}


def _concrete(path: str) -> str:
    for name, value in _NAMES.items():
        path = path.replace(name, value)
    return path


@pytest.mark.promise("strangers")
@pytest.mark.parametrize("name", OPERATOR_ROUTES)
def test_operator_routes_refuse_other_roles(client: TestClient, name: str) -> None:
    route = OPERATOR_ROUTES[name]
    path = _concrete(route.path)
    agent = bearer(TokenRole.AGENT, "n1")
    assert client.request(route.method, path).status_code == 401
    assert client.request(route.method, path, headers=agent).status_code == 403
    if route.method == "POST":
        viewer = client.request(route.method, path, headers=VIEWER)
        assert viewer.status_code == 403
        assert "it needs the token of an operator" in viewer.json()["detail"]


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/nodes/none", 404),
        ("/v1/jobs/none", 404),
        ("/v1/verdicts/none", 404),
        ("/v1/probes/none", 404),
        ("/v1/events?after=x", 422),
        ("/v1/events?limit=-1", 422),
        ("/v1/events?limit=", 422),
        ("/v1/events?after=99999999999999999999", 422),
        ("/v1/events/stream?after=x", 422),
    ],
)
def test_query_of_unknown_object_is_refused_with_reason(client: TestClient, path: str, status: int) -> None:
    response = client.get(path, headers=VIEWER)
    assert response.status_code == status
    assert len(response.json()["detail"]) > 10


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/nodes/none/hold", BECAUSE, 404),
        ("/v1/nodes/n1/dance", BECAUSE, 404),
        ("/v1/nodes/n1/readmit", BECAUSE, 409),
        ("/v1/nodes/n1/hold", {"reason": ""}, 422),
        ("/v1/nodes/n1/hold", {"reason": "x", "force": True}, 422),
        ("/v1/jobs/none/stop", BECAUSE, 404),
        ("/v1/breaker/reset", BECAUSE, 409),
        ("/v1/probes", op.StartProbe(nodes=("n1",), reason="slow"), 409),
        ("/v1/probes", op.StartProbe(nodes=("n1", "none"), reason="slow"), 404),
        ("/v1/probes", {"nodes": [], "reason": "slow"}, 422),
        ("/v1/probes", {"nodes": ["n1", "n2"]}, 422),
    ],
)
def test_refused_order_changes_nothing(client: TestClient, path: str, body: object, status: int) -> None:
    fleet(client, "n1")
    before = get(client, "/v1/events", op.EventList)
    assert refusal(client, path, body).status == status
    assert get(client, "/v1/events", op.EventList) == before


def test_refusals_are_counted_by_route_template(client: TestClient) -> None:
    for node in ("a", "b", "c"):
        client.get(f"/v1/nodes/{node}", headers=VIEWER)
    client.get("/no/such/path", headers=VIEWER)
    text = client.get("/metrics", headers=VIEWER).text
    assert 'requests_failed_total{code="not_found",route="/v1/nodes/{node}"} 3.0' in text
    assert "/no/such/path" not in text


@pytest.mark.promise("user-error")
def test_user_error_fails_job_and_is_counted_once(
    client: TestClient,
) -> None:
    error = {"error": "KeyError: 'label'", "traceback": "Traceback ...", "generation": 1, "step": 3}
    for rank, node_agent in enumerate(running_job(client, "n1", "n2")):
        node_agent.report(UserError(job="j", at=2.0, rank=rank, **error))  # type: ignore[arg-type]
    job = get(client, "/v1/jobs/j", op.JobDetail)
    assert job.summary.state == JobState.FAILED
    assert "raised on rank 0 (n1) at step 3: KeyError: 'label'" in job.summary.reason
    assert get(client, "/v1/nodes/n1", op.NodeDetail).summary.state == NodeState.HEALTHY
    assert 'user_errors_total{run="j"} 1.0' in client.get("/metrics", headers=VIEWER).text


def test_health_and_readiness_expose_only_the_role(client: TestClient) -> None:
    for path in ("/healthz", "/readyz"):
        response = client.get(path)
        assert (response.status_code, response.json()) == (200, {"ok": True, "role": "controller"})


def test_openapi_lists_every_route_and_resolves_references(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    for route in OPERATOR_ROUTES.values():
        operation = document["paths"][route.path][route.method.lower()]
        assert operation["responses"]["200"]["content"]["application/json"]["schema"]
        assert ("requestBody" in operation) == (route.body is not None)

    def references(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            if isinstance(value.get("$ref"), str):
                yield value["$ref"]
            for inner in value.values():
                yield from references(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from references(inner)

    for reference in set(references(document)):
        assert reference.removeprefix("#/components/schemas/") in document["components"]["schemas"]


def test_answers_decode_strictly_as_declared_types(client: TestClient) -> None:
    agents = running_job(client, "n1", "n2", spare="n3")
    agents[0].report(FindingRaised(finding=FELL_OFF))
    post(client, "/v1/probes", op.StartProbe(nodes=("n1", "n2"), reason="slow"), op.ProbeStatus)
    for route in OPERATOR_ROUTES.values():
        if route.method == "GET":
            response = client.get(_concrete(route.path), headers=OPERATOR)
            assert response.status_code == 200, route.path
            msgspec.json.decode(response.content, type=route.response)


HASTY = CorePolicy.lab_preset().with_values(
    liveness={"suspect_after_s": 1.1, "suspect_after_max_s": 1.1, "lost_after_s": 1.2, "disconnect_grace_s": 1.0}
)


def test_forgotten_node_leaves_every_list_and_database(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'c.db'}"
    with TestClient(InProcess(url, policy=HASTY)) as client:
        gone, stays = fleet(client, "n1", "n2")
        gone.report(FindingRaised(finding=FELL_OFF))
        path = "/v1/nodes/n1/forget"
        assert refusal(client, path, BECAUSE).status == 409
        stale = client.get("/v1/nodes/n1", headers=VIEWER).headers["etag"]
        deadline = time.perf_counter() + 60
        while not get(client, "/v1/events?node=n1&kind=node.lost", op.EventList).events:
            assert time.perf_counter() < deadline
            stays.beat(findings=())
        assert refusal(client, path, BECAUSE, OPERATOR | {"If-Match": stale}).status == 412
        tag = client.get("/v1/nodes/n1", headers=VIEWER).headers["etag"]
        changed = post(client, path, BECAUSE, op.ChangeResult, OPERATOR | {"If-Match": tag})
        assert "ordered to forget n1: a smell of smoke" in changed.sentence
        assert [node.node for node in get(client, "/v1/nodes", op.NodeList).nodes] == ["n2"]
        assert refusal(client, path, BECAUSE).status == 404
    with TestClient(InProcess(url, policy=HASTY)) as client:
        assert [node.node for node in get(client, "/v1/nodes", op.NodeList).nodes] == ["n2"]
        assert get(client, "/v1/verdicts?node=n1", operator_history.VerdictList).verdicts == ()
        kinds = [event.kind for event in get(client, "/v1/orders?node=n1", op.EventList).events]
        assert kinds == ["operator.forget"]
