from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from everstep_controller.api import openapi
from everstep_controller.api.routes import OPERATOR_ROUTES as OPERATOR_ROUTES
from everstep_controller.core.policy import CorePolicy
from starlette.testclient import TestClient

from everstep.bearer_tokens import TokenRole
from everstep.vocabulary import Decision, JobState, NodeState, Verdict
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.training import FindingRaised, ProbeFinished, RankFinished, RankLost, UserError
from tests.support.controllers import (
    OPERATOR,
    VIEWER,
    InProcess,
    Refused,
    bearer,
    get,
    joined,
    post,
)
from tests.support.spoken import FELL_OFF, fleet, resume, running_job

BECAUSE = op.ReasonOnlyRequest(reason="a smell of smoke")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[TestClient]:
    with TestClient(InProcess(f"sqlite:///{tmp_path / 'c.db'}")) as client:
        yield client


def test_status_counts_nodes_and_shows_running_jobs(client: TestClient) -> None:
    running_job(client, "n1", "n2", spare="n3")
    status = get(client, "/v1/status", op.FleetStatus)
    assert status.nodes == {"healthy": 3}
    assert (status.epoch, status.budget_left, status.breaker) == (1, 3, "")
    (job,) = status.jobs
    assert (job.job, job.state, job.generation, job.world_size, job.nodes, job.spares) == ("j", "running", 1, 2, 2, 1)


def test_node_without_seat_shows_reason(client: TestClient) -> None:
    speakers = running_job(client, "n1", "n2", spare="n3")
    assert get(client, "/v1/jobs/j", op.JobDetail).ineligible_nodes == {}
    hopeless = RankLost(job="j", at=1.0, generation=1, rank=1, local_rank=0, detail="killed", has_replacement=False)
    speakers[1].report(hopeless)
    detail = get(client, "/v1/jobs/j", op.JobDetail)
    assert detail.ineligible_nodes == {"n2": "its launcher has no replacement for a lost rank"}
    assert detail.spares == ()
    speakers[2].report(FindingRaised(finding=FELL_OFF))
    assert "fallen off the bus" in get(client, "/v1/nodes/n3", op.NodeDetail).summary.reason


def test_node_shows_agent_registration_time(client: TestClient) -> None:
    fleet(client, "n1")
    detail = get(client, "/v1/nodes/n1", op.NodeDetail)
    assert 0 < detail.registered_at <= get(client, "/v1/status", op.FleetStatus).now


def test_recovery_is_shown_with_phases(client: TestClient) -> None:
    speakers = running_job(client, "n1", "n2")
    lost = RankLost(job="j", at=1.0, generation=1, rank=1, local_rank=0, detail="killed", signal=9, trace="kill-1")
    speakers[1].report(lost)
    under_way = get(client, "/v1/jobs/j", op.JobDetail).recoveries[-1]
    assert (under_way.generation, under_way.duration_s, under_way.resumed_ranks) == (2, None, 0)
    resume(speakers, 2)
    detail = get(client, "/v1/jobs/j", op.JobDetail)
    assert [one.reason for one in detail.recoveries] == ["formed", "rank_lost"]
    recovery = detail.recoveries[-1]
    assert recovery.trace == "kill-1"
    assert recovery.duration_s is not None
    assert (recovery.resumed_ranks, recovery.world_size) == (2, 2)
    assert recovery.phases_s == {"rendezvous": 0.02, "restore": 0.02}
    text = client.get("/metrics", headers=VIEWER).text
    assert 'everstep_controller_recoveries_total{reason="rank_lost",run="j"} 1.0' in text
    assert 'everstep_controller_recovery_seconds_count{reason="rank_lost"} 1.0' in text


def test_events_are_found_by_trace(client: TestClient) -> None:
    speakers = running_job(client, "n1", "n2", spare="n3")
    speakers[0].report(FindingRaised(finding=FELL_OFF))
    kinds = [event.kind for event in get(client, "/v1/events?trace=bus-79", op.EventList).events]
    assert kinds[0] == "finding"
    assert "verdict.evict" in kinds
    assert "generation" in kinds


@pytest.mark.promise("eviction-evidence")
def test_verdict_is_shown_with_its_evidence(client: TestClient) -> None:
    speakers = running_job(client, "n1", "n2", spare="n3")
    speakers[0].report(FindingRaised(finding=FELL_OFF))
    (verdict,) = get(client, "/v1/nodes/n1", op.NodeDetail).verdicts
    assert get(client, f"/v1/verdicts/{verdict.id}", Verdict) == verdict
    assert (verdict.decision, verdict.evidence[0].xid) == (Decision.EVICT, 79)

    assert get(client, "/v1/nodes/n1", op.NodeDetail).summary.state is NodeState.QUARANTINED
    assert 'everstep_controller_verdicts_total{decision="evict"} 1.0' in client.get("/metrics", headers=VIEWER).text


def test_order_is_executed_and_audited_with_operator_name(client: TestClient) -> None:
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


def test_hold_of_evicted_node_is_shown_until_released(client: TestClient) -> None:
    fleet(client, "n1")
    post(client, "/v1/nodes/n1/repair", BECAUSE, op.ChangeResult)
    words = post(client, "/v1/nodes/n1/hold", BECAUSE, op.ChangeResult).sentence
    detail, listed = get(client, "/v1/nodes/n1", op.NodeDetail), get(client, "/v1/nodes", op.NodeList).nodes
    assert {(one.state, one.hold_reason) for one in (detail.summary, *listed)} == {(NodeState.REPAIR, words)}
    assert detail.hold_reason == words
    post(client, "/v1/nodes/n1/release", BECAUSE, op.ChangeResult)
    assert get(client, "/v1/nodes/n1", op.NodeDetail).summary.hold_reason == ""
    refused = refusal(client, "/v1/nodes/n1/release", BECAUSE)
    assert (refused.status, refused.code) == (409, "conflict")


def test_ended_job_shows_its_last_step(tmp_path: Path) -> None:
    """Also under the next controller, which has heard no beat of its ranks."""
    database = f"sqlite:///{tmp_path / 'c.db'}"
    with TestClient(InProcess(database)) as client:
        for rank, speaker in enumerate(running_job(client, "n1", "n2")):
            speaker.report(RankFinished(job="j", at=2.0, generation=1, rank=rank, step=40))
        ended = get(client, "/v1/jobs/j", op.JobDetail).summary
        assert (ended.state, ended.step) == (JobState.FINISHED, 40)
    with TestClient(InProcess(database)) as client:
        assert get(client, "/v1/jobs/j", op.JobDetail).summary.step == 40


def test_failed_job_shows_its_last_step(client: TestClient) -> None:
    (speaker,) = running_job(client, "n1")
    speaker.report(UserError(job="j", at=2.0, generation=1, rank=0, step=7, error="KeyError: 1", traceback="x"))
    ended = get(client, "/v1/jobs/j", op.JobDetail).summary
    assert (ended.state, ended.step) == (JobState.FAILED, 7)


def test_rerun_job_starts_at_step_zero(client: TestClient) -> None:
    (speaker,) = running_job(client, "n1")
    speaker.report(RankFinished(job="j", at=2.0, generation=1, rank=0, step=40))
    speaker.report(joined("j", 1.0, nodes=1, launcher=1 << 50))
    again = get(client, "/v1/jobs/j", op.JobDetail).summary
    assert again.state in (JobState.FORMING, JobState.RUNNING)
    assert again.step == 0


def test_stopped_job_ends_and_notifies_its_nodes(client: TestClient) -> None:
    (speaker,) = running_job(client, "n1")
    post(client, "/v1/jobs/j/stop", BECAUSE, op.ChangeResult)
    assert [type(one.body).__name__ for one in speaker.directives()][-1] == "StopJob"
    assert get(client, "/v1/status", op.FleetStatus).jobs == ()
    refused = refusal(client, "/v1/jobs/j/stop", BECAUSE)
    assert (refused.status, refused.code) == (409, "conflict")


def refusal(client: TestClient, path: str, body: object, headers: dict[str, str] = OPERATOR) -> Refused:
    with pytest.raises(Refused) as caught:
        post(client, path, body, op.ChangeResult, headers)
    return caught.value


def test_probe_shows_figures_of_the_slowest_node(client: TestClient) -> None:
    one, two = fleet(client, "n1", "n2")
    started = post(client, "/v1/probes", op.StartProbe(nodes=("n1", "n2"), reason="slow"), op.ProbeStatus)
    assert (started.ok, started.nodes) == (None, ("n1", "n2"))
    one.report(ProbeFinished(probe=started.probe, ok=True, rows=((8, 0.001, 100.0),)))
    assert get(client, f"/v1/probes/{started.probe}", op.ProbeStatus).ok is None
    two.report(ProbeFinished(probe=started.probe, ok=True, rows=((8, 0.002, 90.0),)))
    status = get(client, f"/v1/probes/{started.probe}", op.ProbeStatus)
    assert status.ok is True
    assert status.rows == (op.ProbeRow(bytes=8, latency_s=0.002, bandwidth_bytes_per_s=90.0),)


def test_failed_probe_names_the_failing_node(client: TestClient) -> None:
    _, two = fleet(client, "n1", "n2")
    started = post(client, "/v1/probes", op.StartProbe(nodes=("n1", "n2"), reason="slow"), op.ProbeStatus)
    two.report(ProbeFinished(probe=started.probe, ok=False, detail="connection refused"))
    status = get(client, f"/v1/probes/{started.probe}", op.ProbeStatus)
    assert (status.ok, status.answers) == (False, {"n2": "connection refused"})


def test_generations_are_shown_without_secret(client: TestClient) -> None:
    running_job(client, "n1")
    (spec,) = get(client, "/v1/generations?job=j", op.GenerationList).generations
    assert (spec.number, spec.secret) == (1, "")


def test_viewer_responses_never_contain_job_secret(client: TestClient) -> None:
    (speaker,) = running_job(client, "n1")
    secret = speaker.directives()[0].body.spec.secret  # type: ignore[union-attr]
    paths = ["/v1/status", "/v1/nodes", "/v1/nodes/n1", "/v1/jobs", "/v1/jobs/j", "/v1/generations", "/v1/events"]
    for path in [*paths, "/metrics"]:
        response = client.get(path, headers=VIEWER)
        assert response.status_code == 200
        assert secret not in response.text


def test_events_are_paged_from_either_end(client: TestClient) -> None:
    fleet(client, "n1", "n2", "n3")
    whole = get(client, "/v1/events", op.EventList)
    assert [event.id for event in whole.events] == list(range(1, whole.next_after + 1))
    first = get(client, "/v1/events?limit=2", op.EventList)
    second = get(client, f"/v1/events?limit=2&after={first.next_after}", op.EventList)
    assert (*first.events, *second.events) == whole.events[:4]
    assert get(client, "/v1/events?limit=1&newest=true", op.EventList).events == whole.events[-1:]
    assert get(client, f"/v1/events?after={whole.next_after}", op.EventList).events == ()


# --- who may, and what is refused --------------------------------------------------------------------------------

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
    for rank, speaker in enumerate(running_job(client, "n1", "n2")):
        speaker.report(UserError(job="j", at=2.0, rank=rank, **error))  # type: ignore[arg-type]
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


def test_openapi_arrays_declare_items_as_schema() -> None:
    """Code generators read ``items`` of every array, and know no boolean schema there."""

    def arrays(value: object) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            if value.get("type") == "array":
                yield value
            for inner in value.values():
                yield from arrays(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from arrays(inner)

    found = list(arrays(openapi.document()))
    tuples = [array for array in found if "prefixItems" in array]
    assert len(tuples) >= 3
    for array in found:
        assert isinstance(array["items"], dict), array
    for array in tuples:
        kinds = array["items"].get("anyOf", [array["items"]])
        assert all(part in kinds for part in array["prefixItems"]) or array["items"] == {}


def test_answers_decode_strictly_as_declared_types(client: TestClient) -> None:
    speakers = running_job(client, "n1", "n2", spare="n3")
    speakers[0].report(FindingRaised(finding=FELL_OFF))
    post(client, "/v1/probes", op.StartProbe(nodes=("n1", "n2"), reason="slow"), op.ProbeStatus)
    for route in OPERATOR_ROUTES.values():
        if route.method == "GET":
            response = client.get(_concrete(route.path), headers=VIEWER)
            assert response.status_code == 200, route.path
            msgspec.json.decode(response.content, type=route.response)


HASTY = msgspec.structs.replace(
    CorePolicy.lab_preset(), suspect_after_s=1.1, suspect_after_max_s=1.1, lost_after_s=1.2, disconnect_grace_s=1.0
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
        assert [one.node for one in get(client, "/v1/nodes", op.NodeList).nodes] == ["n2"]
        assert refusal(client, path, BECAUSE).status == 404
    with TestClient(InProcess(url, policy=HASTY)) as client:
        assert [one.node for one in get(client, "/v1/nodes", op.NodeList).nodes] == ["n2"]
        assert get(client, "/v1/verdicts?node=n1", operator_history.VerdictList).verdicts == ()
        kinds = [event.kind for event in get(client, "/v1/audit?node=n1", op.EventList).events]
        assert kinds == ["operator.forget"]
