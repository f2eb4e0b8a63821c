"""Wrong requests are refused with an explanation, and never answered as a different request."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from starlette.testclient import TestClient

from everstep.clock import ManualClock
from everstep.wire.v1 import operator as op
from everstep.wire.v1 import operator_history
from everstep.wire.v1.agent import Gpu
from everstep_controller.api.routes import PARAMETER_CHOICES, PLAIN_ROUTES, ROUTES
from everstep_controller.server.responses import MEDIA_TYPE
from tests.support.fleet.controllers import OPERATOR, AgentClient, InProcess, get, post


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    app = InProcess(f"sqlite:///{tmp_path_factory.mktemp('controller') / 'c.db'}", clock=ManualClock())
    with TestClient(app, follow_redirects=False) as client:
        for node, driver in (("n1", "570.1"), ("n2", "570.2"), ("n3", "570.1")):
            gpu = Gpu(index=0, uuid=f"GPU-{node}", name="H200", pci_bus_id="1", memory_bytes=1, serial=f"S-{node}")
            AgentClient(client, node).register(driver_version=driver, gpus=(gpu,))
        yield client


def refusal(client: TestClient, path: str, status: int = 422) -> str:
    answer = client.get(path, headers=OPERATOR)
    assert (answer.status_code, answer.headers["content-type"]) == (status, MEDIA_TYPE), answer.text
    return str(answer.json()["detail"])


def names(client: TestClient, query: str) -> list[str]:
    return [node.node for node in get(client, f"/v1/nodes?{query}", op.NodeList).nodes]


@pytest.mark.parametrize(
    "path",
    sorted({r.path for r in [*ROUTES.values(), PLAIN_ROUTES["stream"]] if r.method == "GET" and "{" not in r.path}),
)
def test_unknown_query_parameter_is_refused_by_name(client: TestClient, path: str) -> None:
    assert "'stat'" in refusal(client, f"{path}?stat=quarantined")


def test_duplicate_filter_is_refused(client: TestClient) -> None:
    assert "given 2 times" in refusal(client, "/v1/nodes?rack=a&rack=b")


def test_unknown_choice_is_refused_with_valid_choices(client: TestClient) -> None:
    for path in ("/v1/nodes?state=sick", "/v1/nodes?state=HEALTHY", "/v1/nodes?state=held,", "/v1/nodes?state="):
        assert "healthy, suspect, lost" in refusal(client, path)
    assert "evict" in refusal(client, "/v1/verdicts?decision=murder")
    answer = client.post("/v1/nodes/n1/kill", json={"reason": "x"}, headers=OPERATOR)
    assert (answer.status_code, "drain, hold, release" in answer.json()["detail"]) == (404, True)
    assert {"state", "job_state", "decision", "remediation_state", "role", "order"} == set(PARAMETER_CHOICES)


def test_stream_explains_invalid_last_event_id(client: TestClient) -> None:
    answer = client.get("/v1/events/stream", headers=OPERATOR | {"Last-Event-ID": "abc"})
    assert (answer.status_code, "Last-Event-ID" in answer.json()["detail"]) == (422, True)


def test_path_with_trailing_slash_is_not_found(client: TestClient) -> None:
    for path in ("/v1/nodes/", "/v1/jobs/", "/healthz/"):
        refusal(client, path, 404)
    assert client.post("/v1/maintenance/", json={}, headers=OPERATOR).status_code == 404


def test_wrong_method_is_answered_with_allowed_methods(client: TestClient) -> None:
    answer = client.put("/v1/nodes", headers=OPERATOR)
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")
    assert answer.json()["detail"] == "this path allows GET, HEAD, not PUT"


def test_nodes_are_filtered_by_several_states(client: TestClient) -> None:
    post(client, "/v1/nodes/n2/hold", op.ReasonOnlyRequest(reason="x"), op.ChangeResult)
    assert names(client, "state=held,repair") == ["n2"]
    assert names(client, "state=healthy,held") == ["n1", "n2", "n3"]


def test_nodes_are_filtered_by_driver_and_gpu(client: TestClient) -> None:
    assert names(client, "driver=570.1") == ["n1", "n3"]
    assert names(client, "gpu=GPU-n2") == names(client, "gpu=S-n2") == ["n2"]
    assert get(client, "/v1/nodes?gpu=GPU-n2", op.NodeList).nodes[0].driver_version == "570.2"


@pytest.mark.parametrize(
    "kind",
    [
        op.ReasonOnlyRequest,
        op.Resize,
        op.StartProbe,
        operator_history.MaintenanceRequest,
        operator_history.CancelMaintenance,
    ],
)
def test_reason_becomes_one_line_and_rejects_blank(kind: type[msgspec.Struct]) -> None:
    more = {"size": 1, "nodes": ("a", "b"), "until": 1.0}
    given = {name: value for name, value in more.items() if name in kind.__struct_fields__}
    request = msgspec.convert(given | {"reason": "fan\n 7 node-1 evicted\x1b[2J by\tvera"}, kind)
    assert request.reason == "fan 7 node-1 evicted [2J by vera"  # type: ignore[attr-defined]
    with pytest.raises(msgspec.ValidationError, match="blank"):
        msgspec.convert(given | {"reason": " \n\t"}, kind)


def test_maintenance_end_in_milliseconds_is_refused(client: TestClient) -> None:
    now = get(client, "/v1/status", op.FleetStatus).now
    body = {"node": "n1", "until": (now + 3600) * 1000, "reason": "firmware"}
    answer = client.post("/v1/maintenance", json=body, headers=OPERATOR)
    assert (answer.status_code, "milliseconds" in answer.json()["detail"]) == (422, True)
    assert client.post("/v1/maintenance", json=body | {"until": now + 3600}, headers=OPERATOR).status_code == 200
